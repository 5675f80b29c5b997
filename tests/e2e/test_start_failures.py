"""Whatever keeps a server from starting is said once, first and in plain words; the exit code says of which kind it is.

2: asked for something that cannot be, found before anything is loaded. 3: the engine could not load it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.fake_hub import FakeHub, Repo
from tests.e2e.server import wait_until
from tests.tiny import TinyLlama

BAD_INPUT, CANNOT_LOAD = 2, 3
MARK = "START_FAILURE_TEST"  # in the environment of a process tree, to find its members by
ERROR_LINE = re.compile(r"^error: |ERROR")
TINY_MEMORY = 2 * 2**30  # bytes of data: enough to start every process, not for a cache of the size that is asked for
DEEP = b"[" * 100_000  # deeper than a parser can recurse


@dataclass
class Start:
    """One attempt at `surefoot serve`."""

    record_dir: Path
    env: dict[str, str] = field(default_factory=dict)
    data_limit: int = resource.RLIM_INFINITY  # bytes that each process may allocate
    file_limit: int = resource.RLIM_INFINITY  # bytes that a file may have
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def begin(self, *flags: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "surefoot.cli", "serve", "--port=0", f"--record-dir={self.record_dir}", *flags]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.env, MARK: self.mark},
            preexec_fn=self._set_limits,
        )

    def _set_limits(self) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (self.data_limit, self.data_limit))
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.file_limit, self.file_limit))

    def members(self) -> list[int]:
        """The processes of the tree that live."""
        return [int(entry.name) for entry in Path("/proc").iterdir() if self.mark in _environment(entry)]

    def child(self, module: str) -> int:
        wait_until(lambda: bool(self._running(module)))
        return self._running(module)[0]

    def _running(self, module: str) -> list[int]:
        return [pid for pid in self.members() if module in _read(Path(f"/proc/{pid}/cmdline"))]

    def fails(self, process: subprocess.Popen[str], code: int, *says: str) -> None:
        """Asserts that the attempt ends so: one error line, with all of `says` in it, and nothing left behind."""
        _, stderr = process.communicate(timeout=60)
        assert "Traceback" not in stderr, stderr
        errors = [line for line in stderr.splitlines() if ERROR_LINE.search(line)]
        assert len(errors) == 1, stderr
        said = stderr[stderr.index(errors[0]) :]
        for text in says:
            assert text in said, stderr
        assert process.returncode == code, stderr
        wait_until(lambda: not self.members())


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:  # it has just ended
        return ""


def _environment(process: Path) -> str:
    return _read(process / "environ") if process.name.isdigit() else ""


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return Start(tmp_path / "records")


@pytest.fixture
def model(tmp_path: Path, tiny_llama: TinyLlama) -> Path:
    """A checkpoint to spoil."""
    return Path(shutil.copytree(tiny_llama.path, tmp_path / "model"))


def change_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ---- config.json -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, says",
    [
        (DEEP, "nested too deeply"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b"\xff\xfe{", "is not valid JSON"),
        (b"[]", "holds list, not a JSON object"),
        (b"{}", "model_type = None is not supported"),
    ],
    ids=["deep", "digits", "not-unicode", "list", "empty"],
)
def test_a_damaged_config(start: Start, model: Path, content: bytes, says: str) -> None:
    (model / "config.json").write_bytes(content)
    start.fails(start.begin(f"--model={model}"), BAD_INPUT, "config.json", says)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"hidden_size": "48"}, "hidden_size should be one int, it is '48'"),
        ({"num_hidden_layers": [3]}, "num_hidden_layers should be one int"),
        ({"rope_parameters": [1]}, "rope_parameters = [1] should be an object"),
        ({"architectures": ["OtherForCausalLM"], "model_type": "other"}, "is not supported; supported is"),
        ({"hidden_size": 10**9}, "hidden size"),
        ({"vocab_size": 10**12}, "vocabulary"),
        ({"num_hidden_layers": 10**10}, "layers"),
        ({"num_hidden_layers": 10**30}, "layers"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rms_norm_eps": float("inf")}, "epsilon"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}}, "rope theta"),
        ({"num_key_value_heads": 0}, "key-value heads"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_a_config_that_cannot_be(start: Start, model: Path, changes: dict[str, Any], says: str) -> None:
    """Refused before anything is allocated by it."""
    change_config(model, **changes)
    start.data_limit = TINY_MEMORY
    start.fails(start.begin(f"--model={model}"), BAD_INPUT, says)


# ---- Weights ---------------------------------------------------------------------------------------------------------


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def lose_a_tensor(path: Path) -> None:
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)


@pytest.mark.parametrize(
    "spoil, says",
    [
        pytest.param(lambda path: truncate(path, -100), "is truncated: tensor", id="data"),
        *(
            pytest.param(spoil, says, id=id, marks=pytest.mark.slow)
            for id, spoil, says in (
                ("header", lambda path: truncate(path, 100), "is truncated or not a safetensors file"),
                ("empty", lambda path: truncate(path, 0), "is truncated or not a safetensors file"),
                ("absent", lambda path: path.unlink(), "has no weights"),
                ("deep", lambda path: path.write_bytes(len(DEEP).to_bytes(8, "little") + DEEP), "JSON is damaged"),
                ("tensor", lose_a_tensor, "missing: model.norm.weight"),
            )
        ),
    ],
)
def test_damaged_weights(start: Start, model: Path, spoil: Callable[[Path], None], says: str) -> None:
    spoil(model / "model.safetensors")
    start.fails(start.begin(f"--model={model}"), CANNOT_LOAD, says)


@pytest.mark.slow
def test_weights_of_another_model(start: Start, model: Path) -> None:
    change_config(model, num_hidden_layers=4)
    start.fails(start.begin(f"--model={model}"), CANNOT_LOAD, "missing: model.layers.3.")


@pytest.mark.parametrize("size", [2, 1000, 30_000, -100])
def test_a_truncated_gguf(start: Start, default_model_path: Path, tmp_path: Path, size: int) -> None:
    path = tmp_path / "m.gguf"
    with default_model_path.open("rb") as file:
        path.write_bytes(file.read(size if size > 0 else default_model_path.stat().st_size + size))
    start.fails(start.begin(f"--model={path}"), BAD_INPUT, str(path))


def test_a_gguf_of_another_family(start: Start, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", torch.zeros(4, 4).numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    start.fails(start.begin(f"--model={tmp_path / 'm.gguf'}"), BAD_INPUT, "'mamba' is not supported")


# ---- Tokenizer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file, content, says",
    [
        ("tokenizer.json", None, "has no tokenizer"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "chat_template"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("tokenizer.json", b"{}", "tokenizer.json cannot be read"),
                ("tokenizer.json", DEEP, "tokenizer.json cannot be read"),
                ("tokenizer_config.json", b"[]", "tokenizer_config.json"),
                ("tokenizer_config.json", DEEP, "tokenizer_config.json"),
                ("tokenizer_config.json", b'{"chat_template": "{% for"}', "chat template"),
                ("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": {}}]}', "chat_template"),
                ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja"),
                ("generation_config.json", b'{"eos_token_id": "x"}', "eos_token_id = 'x'"),
                ("special_tokens_map.json", b"[1]", "special_tokens_map.json"),
            )
        ),
    ],
)
def test_a_damaged_tokenizer(start: Start, model: Path, file: str, content: bytes | None, says: str) -> None:
    if content is None:
        (model / file).unlink()
    else:
        (model / file).write_bytes(content)
    start.fails(start.begin(f"--model={model}"), BAD_INPUT, says, str(model))


# ---- The machine -----------------------------------------------------------------------------------------------------


def test_a_taken_port(start: Start, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        says = f"cannot listen on 127.0.0.1 port {port}: Address already in use", "--port"
        start.fails(start.begin(f"--model={model}", f"--port={port}"), BAD_INPUT, *says)


def test_a_record_folder_that_cannot_be_written(start: Start, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    start.record_dir = tmp_path / "file" / "records"
    start.fails(start.begin(f"--model={model}"), BAD_INPUT, str(start.record_dir), "--record-dir")


def test_a_model_cache_that_cannot_be_written(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    start.fails(start.begin(f"--model-cache={tmp_path / 'file'}"), BAD_INPUT, f"{tmp_path / 'file'} cannot be used")


def test_too_little_memory(start: Start, model: Path) -> None:
    """More than the limit of a process, which is not known beforehand."""
    start.data_limit = TINY_MEMORY
    flags = ("--mem-fraction=0.95", "--kv-cache-tokens=4000000", "--max-running-requests=4")  # 3 GB at 768 bytes each
    start.fails(start.begin(f"--model={model}", *flags), CANNOT_LOAD, "memory", "--kv-cache-tokens")


def test_an_engine_that_is_killed_while_it_loads(start: Start, model: Path) -> None:
    process = start.begin(f"--model={model}")
    os.kill(start.child("surefoot.engine.process"), signal.SIGKILL)
    start.fails(process, CANNOT_LOAD, "the engine was killed by SIGKILL")


@pytest.mark.slow
def test_a_frontend_that_is_killed_while_it_starts(start: Start, model: Path) -> None:
    process = start.begin(f"--model={model}")
    os.kill(start.child("surefoot.http.process"), signal.SIGKILL)
    start.fails(process, 128 + signal.SIGKILL, "the frontend was killed by SIGKILL")


@pytest.mark.slow
def test_a_ring_that_does_not_fit(start: Start, model: Path) -> None:
    start.file_limit = 100_000
    start.fails(start.begin(f"--model={model}"), CANNOT_LOAD, "steps-0.ring", "--record-dir")


# ---- The hub ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offline, says", [("0", "no model org/absent on the Hugging Face hub"), ("1", "unset it")])
def test_a_model_that_the_hub_does_not_have(start: Start, tmp_path: Path, offline: str, says: str) -> None:
    with FakeHub({"org/other": Repo({})}) as hub:
        start.env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": offline}
        start.fails(start.begin("--model=org/absent"), BAD_INPUT, says)
