"""A server in odd surroundings: the current folder, closed descriptors, limits, temporary folders."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import TIGHT
from tests.e2e.server import Server, wait_dead, wait_until
from tests.tiny import TinyLlama

FRONTEND, ENGINE = "surefoot.http.process", "surefoot.engine.process"


class ShellServer(Server):
    """Started by a line of the shell, in which "$@" is the command."""

    def __init__(self, log: Path, line: str, **settings: Any) -> None:
        super().__init__(log, **settings)
        self._command = ["sh", "-c", line, "sh", *self._command]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Short enough for the path of a socket, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def check_answers(server: Server) -> None:
    body = {"model": server.model_name, "prompt": [20, 21], "max_tokens": 2}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()


def test_python_files_of_the_current_folder_are_not_run(
    tiny_llama: TinyLlama, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("httptools", "zmq"):  # of frontend and engine; the supervisor needs neither
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('run')")
    monkeypatch.chdir(tmp_path)
    with Server(log, model=tiny_llama.path, **TIGHT) as server:
        check_answers(server)
        assert server.stop() == 0


def test_closed_descriptors(tiny_llama: TinyLlama, log: Path) -> None:
    with ShellServer(log, 'exec "$@" <&- >&-', model=tiny_llama.path, **TIGHT) as server:
        check_answers(server)
        assert server.stop() == 0


def test_a_chat_without_stdin_is_an_empty_one(tiny_llama: TinyLlama) -> None:
    command = [sys.executable, "-m", "surefoot", "chat", str(tiny_llama.path)]
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *command], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


def test_children_may_open_as_many_files_as_are_allowed(tiny_llama: TinyLlama, log: Path) -> None:
    with ShellServer(log, 'ulimit -Sn 100; ulimit -Hn 300; exec "$@"', model=tiny_llama.path, **TIGHT) as server:
        for module in (FRONTEND, ENGINE):
            assert resource.prlimit(server.child(module), resource.RLIMIT_NOFILE) == (300, 300)
        assert "may open" not in server.log()


def test_too_few_files_for_the_requests(tiny_llama: TinyLlama, log: Path) -> None:
    with ShellServer(log, 'ulimit -n 200; exec "$@"', model=tiny_llama.path, **TIGHT) as server:
        assert server.log().count("a process may open 200 files here") == 1
        check_answers(server)


def test_folders_that_were_cleaned_up_are_made_again(
    tiny_llama: TinyLlama, log: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_folder))
    with Server(log, model=tiny_llama.path, **TIGHT) as server:
        (records,) = log.parent.glob("run-*")
        (sockets,) = short_folder.glob("surefoot-*")
        shutil.rmtree(records)
        shutil.rmtree(sockets)
        engine = server.child(ENGINE)
        os.kill(engine, signal.SIGKILL)
        wait_dead(engine)
        wait_until(lambda: "another one starts" in server.log())
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code != 200)
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
        check_answers(server)
        assert [ring.name for ring in records.iterdir()] == ["steps-1.ring"]
        assert server.stop() == 0
    assert not sockets.exists()


def test_a_long_folder_of_temporary_files(
    tiny_llama: TinyLlama, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than the path of a socket may be."""
    folder = tmp_path / ("x" * 107)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    with Server(log, model=tiny_llama.path, **TIGHT) as server:
        check_answers(server)
        assert server.stop() == 0
