"""A server and a Hugging Face directory of the same fp32 weights, and the programs of `.venv-compat`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.checkpoint.gguf import GGUFFile
from surefoot.config.engine_plan import CheckpointRef
from surefoot.config.planning import plan_engine
from surefoot.config.settings import load
from surefoot.frontend.tokenizer import load_tokenizer
from tests.e2e.server import Server
from tests.models.test_smollm2 import hugging_face_model

PROGRAMS = Path(__file__).parents[2] / ".venv-compat" / "bin"
NAME = "SmolLM2-135M-Instruct"


def run(program: str, *arguments: str, cwd: Path, seconds: float = 600) -> str:
    """Standard output and error together. Fails with them if the program does."""
    done = subprocess.run(
        [str(PROGRAMS / program), *arguments], cwd=cwd, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def checkpoint(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model as transformers would have it."""
    from rich.console import Console

    directory = tmp_path_factory.mktemp("smollm2") / NAME
    plan = plan_engine(load({"model": str(default_model_path)}), Console(stderr=True))
    hugging_face_model(plan, round_to_fp16=False).save_pretrained(directory)
    tokenizer = load_tokenizer(CheckpointRef(str(default_model_path), "gguf"))
    tokenizer._backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "chat_template": GGUFFile.open(default_model_path).value("tokenizer.chat_template", str),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": list(tokenizer.eos_ids)}))
    return directory


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(log, model=checkpoint, weight_dtype="float32", max_running_requests=16) as running:
        yield running
