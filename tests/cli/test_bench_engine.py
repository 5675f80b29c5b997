"""`surefoot bench offline` and `surefoot bench step` on a tiny model."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
from rich.console import Console

from surefoot import cli
from surefoot.checkpoint.gguf import GGUFFile
from surefoot.commands import bench_step
from surefoot.config import settings
from surefoot.config.engine_plan import CheckpointRef
from surefoot.config.planning import plan_engine, stored_matrix_bytes
from surefoot.protocol.step_plan import StepDone, StepPlan
from surefoot.runner.model_runner import ModelRunner
from tests.tiny import TinyLlama, TinyModel
from tests.tiny_families import write_tiny


def bench(kind: str, model: TinyModel, tmp_path: Path, *flags: str) -> dict[str, Any]:
    file = tmp_path / "result.json"
    assert cli.main(["bench", kind, str(model.path), "--json", str(file), *flags]) == 0
    result: dict[str, Any] = json.loads(file.read_bytes())
    return result


SMALL = ("--threads", "1", "--kv-cache-tokens", "4096", "--max-running-requests", "8")


def test_offline(tiny_llama: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--requests", "4", "--input", "20", "--output", "5", "--repeat", "2", *SMALL)
    result = bench("offline", tiny_llama, tmp_path, *flags)
    assert len(result["runs"]) == 2
    for run in result["runs"]:
        assert (run["output_tokens"], run["prompt_tokens"], run["cached_tokens"], run["preemptions"]) == (20, 80, 0, 0)
        steps = {path["path"].partition("/")[0]: path["steps"] for path in run["paths"]}
        assert steps == {"prefill": 1, "decode": 4}  # the step that ends a prompt gives the first token
        assert 0 < sum(path["seconds"] for path in run["paths"]) <= run["seconds"]
    assert "no prompt is sent twice" in capsys.readouterr().out


def test_offline_with_a_shared_prefix(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    flags = ("--requests", "4", "--prefix-length", "64", "--input", "4", "--output", "2", "--repeat", "1", *SMALL)
    result = bench("offline", tiny_llama, tmp_path, *flags, "--max-running-requests", "1")
    assert result["runs"][0]["cached_tokens"] == 3 * 64


def test_offline_with_too_few_pages(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    few = ("--kv-cache-tokens", "128", "--max-running-requests", "4", "--max-model-len", "64", "--page-size", "16")
    flags = ("--requests", "4", "--input", "20", "--output", "44", "--repeat", "1", *few)
    run = bench("offline", tiny_llama, tmp_path, *flags)["runs"][0]
    assert run["output_tokens"] == 4 * 44
    assert run["preemptions"] > 0


def test_offline_ends_with_a_request_that_failed(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: ModelRunner, plan: StepPlan) -> StepDone:
        raise ArithmeticError("as planted")

    monkeypatch.setattr(ModelRunner, "run", fail)
    assert cli.main(["bench", "offline", str(tiny_llama.path), *SMALL]) == 1
    assert "a request failed: ArithmeticError: as planted" in capsys.readouterr().err


@pytest.mark.parametrize("kind, flag", [("offline", "requests"), ("offline", "repeat"), ("step", "repeat")])
def test_nothing_to_measure(tiny_llama: TinyLlama, kind: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", kind, str(tiny_llama.path), f"--{flag}", "0"]) == 2
    assert f"--{flag} 0: it must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("kernels, products", [("torch", "dense"), ("auto", "")])
def test_steps(tiny_llama: TinyLlama, tmp_path: Path, kernels: str, products: str) -> None:
    flags = ("--context", "40", "--repeat", "2", "--cpu-kernels", kernels, "--weight-dtype", "float32", *SMALL)
    result = bench("step", tiny_llama, tmp_path, *flags)
    plan, steps = result["plan"], {step["what"]: step for step in result["steps"]}
    assert plan["linear_kernel"] == (products or plan["linear_kernel"])
    kernels_of_path = f"{plan['attention_backend']}/{plan['linear_kernel']}"
    paths = {what: step["path"] for what, step in steps.items()}
    assert paths == {
        "decode 1, greedy": f"decode/none/{kernels_of_path}/greedy/none",
        "decode 4, greedy": f"decode/none/{kernels_of_path}/greedy/none",
        "decode 1, drawing": f"decode/none/{kernels_of_path}/plain/none",
        "decode 4, drawing": f"decode/none/{kernels_of_path}/plain/none",
        "prefill 16": f"prefill/none/{kernels_of_path}/greedy/none",
        "prefill 16 after 24": f"prefill/some/{kernels_of_path}/greedy/none",
        "mixed 1 + 16": f"mixed/none/{kernels_of_path}/greedy/none",
        "mixed 1 + 16 after 24": f"mixed/some/{kernels_of_path}/greedy/none",
    }
    assert steps["decode 4, greedy"]["tokens"] == 4
    assert steps["decode 4, greedy"]["bytes_read"] - steps["decode 1, greedy"]["bytes_read"] == 3 * 41 * sum(
        plan["kv_layout"]["bytes_per_token"]
    )
    assert steps["prefill 16 after 24"]["flops"] > steps["prefill 16"]["flops"]
    assert all(step["fastest"] <= step["seconds"] <= step["slow"] for step in steps.values())
    assert result["machine"]["bytes_per_second"] > 1e8
    reading, computing = result["machine"].values()
    for step in steps.values():
        floors = step["bytes_read"] / reading, step["flops"] / computing
        assert step["floor"] == pytest.approx(max(floors))
        assert step["binds"] == ("bytes" if floors[0] >= floors[1] else "FLOPs")
        assert step["share"] == pytest.approx(step["floor"] / step["seconds"])


def test_what_a_step_must_do(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    """By hand, from the shapes of the tiny model: 3 layers, hidden 48, MLP 80, 6 heads of 16 over 2 of keys."""
    flags = ("--context", "40", "--repeat", "1", "--cpu-kernels", "torch", "--weight-dtype", "float32", *SMALL)
    result = bench("step", tiny_llama, tmp_path, *flags)
    steps = {step["what"]: step for step in result["steps"]}
    layers = 3 * (48 * (96 + 32 + 32) + 96 * 48 + 3 * 48 * 80)
    head = result["plan"]["model"]["vocab_size"] * 48  # the embedding beside it is not read
    kv = 3 * 2 * 32 * 4  # bytes of a token
    assert steps["decode 4, greedy"]["bytes_read"] == 4 * (layers + head) + 4 * 41 * kv
    assert steps["decode 4, greedy"]["flops"] == 4 * 2 * (layers + head) + 4 * 41 * 3 * 4 * 96
    assert steps["prefill 16 after 24"]["bytes_read"] == 4 * (layers + head) + 40 * kv
    pairs = sum(range(25, 41))
    assert steps["prefill 16 after 24"]["flops"] == 2 * (16 * layers + head) + pairs * 3 * 4 * 96


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_steps_of_a_model_with_windows(tmp_path: Path, kernels: str) -> None:
    """Its windowed KV groups have fewer pages than the rows' contexts, and no row writes beyond them."""
    model = write_tiny("gemma3", tmp_path)
    few = ("--threads", "1", "--kv-cache-tokens", "1024", "--max-running-requests", "4", "--chunked-prefill-size", "32")
    flags = ("--context", "200", "--repeat", "1", "--cpu-kernels", kernels, "--page-size", "16", *few)
    result = bench("step", model, tmp_path, *flags)
    bounds, layout = result["plan"]["bounds"], result["plan"]["kv_layout"]
    contexts = 4 * 201 // bounds["page_size"]
    assert any(group["num_pages"] < contexts for group in bounds["kv_groups"])
    steps = {step["what"]: step["bytes_read"] for step in result["steps"]}
    row = sum(
        min(group["window"] or 201, 201) * size
        for group, size in zip(bounds["kv_groups"], layout["bytes_per_token"], strict=True)
    )
    assert steps["decode 4, greedy"] - steps["decode 1, greedy"] == 3 * row


def test_steps_as_csv(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    file = tmp_path / "steps.csv"
    flags = ("--context", "20", "--repeat", "1", "--csv", str(file), *SMALL)
    steps = bench("step", tiny_llama, tmp_path, *flags)["steps"]
    with file.open(newline="") as lines:
        assert list(csv.DictReader(lines)) == [{name: str(value) for name, value in step.items()} for step in steps]


def test_rows_that_do_not_fit(tiny_llama: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """4 rows of 41 tokens take 12 pages of 16, and there are 11."""
    few = ("--kv-cache-tokens", "176", "--max-running-requests", "8", "--max-model-len", "64", "--page-size", "16")
    result = bench("step", tiny_llama, tmp_path, "--context", "40", "--repeat", "1", *few)
    decoding = {step["what"] for step in result["steps"] if step["what"].startswith("decode")}
    assert decoding == {"decode 1, greedy", "decode 1, drawing"}
    assert "no room for 4 or 16 or 64 rows" in capsys.readouterr().err


def test_a_step_that_takes_another_path(tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_step, "DRAWING", msgspec.structs.replace(bench_step.DRAWING, top_k=5))
    with pytest.raises(
        RuntimeError, match=r"took path decode/.*/full/none, and decode/.*/plain/none was to be measured"
    ):
        cli.main(["bench", "step", str(tiny_llama.path), "--context", "20", "--repeat", "1", *SMALL])


@pytest.mark.parametrize("type_, matrix_bytes", [("Q8_0", 64 * 2 * 34), ("F32", 64 * 64 * 2)])
def test_weights_that_a_step_reads(tiny_llama: TinyLlama, tmp_path: Path, type_: str, matrix_bytes: int) -> None:
    """Of quantised matrices too, an embedding of its own is not read, and one that is the head is."""
    quantization = gguf.GGMLQuantizationType[type_]
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    matrix = gguf.quants.quantize(np.ones((64, 64), np.float32), quantization)
    writer.add_tensor("token_embd.weight", matrix, raw_dtype=quantization)
    head = gguf.quants.quantize(np.ones((64, 64), np.float32), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("output.weight", head, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = stored_matrix_bytes(GGUFFile.open(path))
    plan = msgspec.structs.replace(
        plan_engine(settings.load({"model": str(tiny_llama.path)}), Console(quiet=True)),
        checkpoint=CheckpointRef(str(path), "gguf"),
        weight_dtype="stored",
        weight_bytes=stored,
    )
    tied = msgspec.structs.replace(plan, model=msgspec.structs.replace(plan.model, tied_embeddings=True))
    assert bench_step.step_weight_bytes(tied) == stored
    assert stored - bench_step.step_weight_bytes(plan) == matrix_bytes


def test_packed_weights_that_a_step_reads(tiny_llama: TinyLlama) -> None:
    """FBGEMM's packed head is a copy of a tied embedding, which is then only looked up in."""
    asked = {"model": str(tiny_llama.path), "cpu_kernels": "torch", "weight_dtype": "float16"}
    plan = plan_engine(settings.load(asked), Console(quiet=True))
    table = 2 * plan.model.vocab_size * plan.model.hidden_size
    assert plan.weight_bytes - bench_step.step_weight_bytes(plan) == table


def test_a_context_that_does_not_fit(tiny_llama: TinyLlama, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "step", str(tiny_llama.path), "--context", "100000"]) == 2
    assert "--context 100000 does not fit" in capsys.readouterr().err
