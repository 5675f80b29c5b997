"""`surefoot bench offline` and `surefoot bench step` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefoot import cli
from tests.tiny import TinyLlama


def bench(kind: str, tiny_llama: TinyLlama, tmp_path: Path, *flags: str) -> dict[str, Any]:
    file = tmp_path / "result.json"
    assert cli.main(["bench", kind, str(tiny_llama.path), "--json", str(file), *flags]) == 0
    result: dict[str, Any] = json.loads(file.read_bytes())
    return result


SMALL = ("--kv-cache-tokens", "4096", "--max-running-requests", "8")


def test_offline(tiny_llama: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--requests", "4", "--input", "20", "--output", "5", "--repeat", "2", *SMALL)
    result = bench("offline", tiny_llama, tmp_path, *flags)
    assert len(result["runs"]) == 2
    for run in result["runs"]:
        assert (run["output_tokens"], run["prompt_tokens"], run["cached_tokens"], run["preemptions"]) == (20, 80, 0, 0)
        assert run["seconds"] > 0
    assert "no prompt is sent twice" in capsys.readouterr().out


def test_offline_with_a_shared_prefix(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    flags = ("--requests", "4", "--prefix-length", "64", "--input", "4", "--output", "2", "--repeat", "1", *SMALL)
    result = bench("offline", tiny_llama, tmp_path, *flags, "--max-running-requests", "1")
    assert result["runs"][0]["cached_tokens"] == 3 * 64


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
        "decode 1 with prefill 16": f"mixed/none/{kernels_of_path}/greedy/none",
    }
    assert steps["decode 4, greedy"]["tokens"] == 4
    assert steps["decode 4, greedy"]["bytes_read"] - steps["decode 1, greedy"]["bytes_read"] == 3 * 41 * sum(
        plan["kv_layout"]["bytes_per_token"]
    )
    assert steps["prefill 16 after 24"]["flops"] > steps["prefill 16"]["flops"]
    assert all(step["fastest"] <= step["seconds"] for step in steps.values())
    assert result["machine"]["bytes_per_second"] > 1e8


def test_a_context_that_does_not_fit(tiny_llama: TinyLlama, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "step", str(tiny_llama.path), "--context", "100000"]) == 2
    assert "--context 100000 does not fit" in capsys.readouterr().err
