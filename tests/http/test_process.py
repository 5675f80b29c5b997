"""The frontend as the supervisor starts it: lines on stdin and stdout, ZeroMQ to the engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from surefoot.protocol.channel import Receiver, Sender
from surefoot.protocol.control import (
    Drain,
    EngineDied,
    FrontendListening,
    FrontendReady,
    FrontendReport,
    StartFrontend,
    encode_line,
)
from surefoot.protocol.messages import (
    Accepted,
    Command,
    EngineReady,
    EngineStats,
    Event,
    Finished,
    FinishReason,
    Stop,
    Submit,
    TokenBatch,
)
from tests.http.conftest import MODEL, server_plan

STATS = EngineStats(0, 0, 0, 0, 0, 0, 0, 0)


class Frontend:
    def __init__(self, folder: Path, tokenizer_path: Path, **changes: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "surefoot.http.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        commands, events = f"ipc://{folder}/commands", f"ipc://{folder}/events"
        self.commands: Receiver[Command] = Receiver(commands, Command)
        self.events: Sender[Event] = Sender(events)
        plan = msgspec.Raw(msgspec.json.encode(server_plan(str(tokenizer_path), **changes)))
        self.tell(StartFrontend(plan, commands, events))

    def tell(self, message: msgspec.Struct) -> None:
        assert self.process.stdin
        self.process.stdin.write(encode_line(message))
        self.process.stdin.flush()

    def report(self) -> FrontendReport:
        assert self.process.stdout
        return msgspec.json.decode(self.process.stdout.readline(), type=FrontendReport)

    def close(self) -> None:
        with self.process:
            self.process.kill()
        self.commands.close()
        self.events.close()


@pytest.fixture
def frontend(tmp_path: Path, tokenizer_path: Path) -> Iterator[Frontend]:
    made = Frontend(tmp_path, tokenizer_path)
    yield made
    made.close()


def test_from_start_to_drain(frontend: Frontend):
    listening = frontend.report()
    assert isinstance(listening, FrontendListening)
    url = f"http://{listening.host}:{listening.port}"
    assert httpx.get(f"{url}/ready").status_code == 503
    frontend.events.send([EngineReady(2.5, STATS)])
    assert frontend.report() == FrontendReady(2.5)
    assert httpx.get(f"{url}/ready").status_code == 200

    answers: list[httpx.Response] = []
    body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 2}
    client = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body)))
    client.start()
    [submit] = frontend.commands.drain(10)
    assert isinstance(submit, Submit)
    request_id = submit.request.id
    frontend.events.send([Accepted(request_id), TokenBatch((request_id,), (70,), (), "a/path", STATS)])

    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(frontend.process.pid, number)  # nothing happens: the supervisor decides
    frontend.tell(Drain())
    finished = Finished(request_id, FinishReason.LENGTH, 0, "")
    frontend.events.send([TokenBatch((request_id,), (71,), (finished,), "a/path", STATS)])
    client.join(10)
    [answer] = answers
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert frontend.process.wait(10) == 0
    assert frontend.commands.drain(5) == [Stop()]


def test_engine_death_is_told_to_clients(frontend: Frontend):
    listening = frontend.report()
    assert isinstance(listening, FrontendListening)
    frontend.tell(EngineDied("it was killed by SIGKILL", restarting=False))
    url = f"http://{listening.host}:{listening.port}"
    while (health := httpx.get(f"{url}/health")).status_code == 200:
        pass
    assert "SIGKILL" in health.json()["detail"]
    frontend.tell(Drain())
    assert frontend.process.wait(10) == 0


def test_the_end_of_stdin_ends_it_at_once(frontend: Frontend):
    frontend.report()
    assert frontend.process.stdin
    frontend.process.stdin.close()
    assert frontend.process.wait(5) == 1


def test_a_port_that_is_taken(tmp_path: Path, tokenizer_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        frontend = Frontend(tmp_path, tokenizer_path, port=port)
        try:
            assert frontend.process.wait(10) == 2
            assert frontend.process.stderr
            message = frontend.process.stderr.read().decode()
            assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in message
            assert "--port" in message
            assert "Traceback" not in message
        finally:
            frontend.close()


def test_a_checkpoint_without_a_tokenizer(tmp_path: Path):
    frontend = Frontend(tmp_path, tmp_path)
    try:
        assert frontend.process.wait(10) == 2
        assert frontend.process.stderr
        assert "tokenizer.json" in frontend.process.stderr.read().decode()
    finally:
        frontend.close()


def test_it_never_imports_torch():
    code = (
        "import sys, surefoot.http.process\n"
        "found = {'torch', 'transformers', 'triton'} & set(sys.modules)\n"
        "sys.exit(f'imported {found}' if found else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
