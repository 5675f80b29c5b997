"""`surefoot plan`: what it shows, to people and to programs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from surefoot import cli
from surefoot.config import settings
from tests.cli.terminal import surefoot
from tests.tiny import TinyLlama


@pytest.fixture
def checkpoint(tiny_llama: TinyLlama, tmp_path: Path) -> Path:
    """Without weights."""
    copy = tmp_path / "tiny"
    shutil.copytree(tiny_llama.path, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    return copy


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["plan", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_a_page_of_80_columns(checkpoint: Path) -> None:
    ended = surefoot("plan", str(checkpoint), "--max-model-len", "64", "--api-key", "hush")
    assert ended.returncode == 0
    assert ended.stderr in ("", "compiling the CPU kernels for this machine, once\n")
    lines = ended.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for title in ("Settings", "Server", "Memory", "Bounds", "Execution paths: "):
        assert any(line.startswith(title) for line in lines)
    words = [line.split() for line in lines]
    assert ["max_model_len", "64", "asked", "for"] in words
    assert ["api_key", "(set)", "asked", "for"] in words
    assert ["port", "8000", "default"] in words
    names = {line[0] for line in words if line}
    assert names >= {info.name for info in settings.infos()}
    assert not names & {"num_threads", "num_pages", "prefix_cache"}
    assert "hush" not in ended.stdout


def test_json_has_all_of_it(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, content = plan_json(
        capsys, str(checkpoint), "--max-running-requests=4", "--page-size=8", "--cpu-kernels=torch"
    )
    assert (code, content["conflicts"]) == (0, [])
    available = content["plan"]["hardware"]["memory_available"]
    assert sum(line["bytes"] for line in content["ledger"]) == available
    assert content["ledger"][-1]["owner"] == "left"
    bounds = content["bounds"]
    assert (bounds["max_running_requests"], bounds["page_size"]) == (4, 8)
    assert bounds["kv_tokens"] == 8 * bounds["kv_pages"]
    assert "decode/none/torch" in content["paths"][0]
    assert content["plan"]["native_library"] == ""
    assert len(content["paths"]) == len(set(content["paths"]))
    assert content["server"]["port"] == "8000"
    told = [reason[0] for reason in content["plan"]["reasons"]] + list(content["server"])
    assert sorted(told) == sorted(info.name for info in settings.infos())


def test_all_conflicts_come_with_exit_code_2(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (str(checkpoint), "--max-model-len=100000", "--threads=9999")
    code, content = plan_json(capsys, *flags)
    assert code == 2
    assert len(content["conflicts"]) == 2
    assert content["conflicts"][0].startswith("--max-model-len 100000 is more than the model's context of 512")
    assert cli.main(["plan", *flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert all(conflict in printed.err for conflict in content["conflicts"])


def test_a_model_that_is_not_there_is_a_conflict_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, content = plan_json(capsys, "/nowhere/model.gguf")
    assert code == 2
    assert "there is no file or directory /nowhere/model.gguf" in content["conflicts"][0]
