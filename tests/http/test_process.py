"""The frontend as the supervisor starts it: lines on stdin and stdout, ZeroMQ to the engine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from surefoot.protocol.channel import Receiver, Sender
from surefoot.protocol.control import (
    Connect,
    Drain,
    EngineDied,
    Failed,
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

STATS = EngineStats(0, 0, (), 0, 0, 0)
FIRST_ID = 1001


class Frontend:
    def __init__(self, folder: Path, tokenizer_path: Path, **changes: object) -> None:
        self.folder = folder
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "surefoot.http.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[self.listener.fileno()],
        )
        plan = msgspec.Raw(msgspec.json.encode(server_plan(str(tokenizer_path), **changes)))
        self.tell(StartFrontend(plan, self.listener.fileno(), FIRST_ID))
        self.connect(1)

    def connect(self, number: int) -> None:
        """Makes the channels of another engine, and tells the frontend."""
        channels = f"ipc://{self.folder}/commands-{number}", f"ipc://{self.folder}/events-{number}"
        self.commands: Receiver[Command] = Receiver(channels[0], Command)
        self.events: Sender[Event] = Sender(channels[1])
        self.tell(Connect(*channels))

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
        self.listener.close()


@pytest.fixture
def frontend(tmp_path: Path, tokenizer_path: Path) -> Iterator[Frontend]:
    made = Frontend(tmp_path, tokenizer_path)
    yield made
    made.close()


def test_from_start_to_drain(frontend: Frontend):
    url = frontend.url
    assert frontend.report() == FrontendListening()
    assert httpx.get(f"{url}/ready").status_code == 503
    frontend.events.send([EngineReady(2.5, STATS)])
    assert frontend.report() == FrontendReady()
    assert httpx.get(f"{url}/ready").status_code == 200

    answers: list[httpx.Response] = []
    body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 2}
    client = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body)))
    client.start()
    [submit] = frontend.commands.drain(10)
    assert isinstance(submit, Submit)
    request_id = submit.request.id
    assert request_id == FIRST_ID
    frontend.events.send([Accepted(request_id), TokenBatch((request_id,), (70,), (), (), (), "a/path", STATS)])

    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(frontend.process.pid, number)  # nothing happens: the supervisor decides
    frontend.tell(Drain(30))
    finished = Finished(request_id, FinishReason.LENGTH, 0, "")
    frontend.events.send([TokenBatch((request_id,), (71,), (finished,), (), (), "a/path", STATS)])
    client.join(10)
    [answer] = answers
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert frontend.process.wait(10) == 0
    assert frontend.commands.drain(5) == [Stop()]


def test_engine_death_is_told_to_clients(frontend: Frontend):
    frontend.tell(EngineDied("it was killed by SIGKILL", restarting=False, retry_seconds=0))
    while (health := httpx.get(f"{frontend.url}/health")).status_code == 200:
        pass
    assert "SIGKILL" in health.json()["detail"]
    frontend.tell(Drain(30))
    assert frontend.process.wait(10) == 0


def test_only_the_living_engine_is_heard(frontend: Frontend):
    """Neither do commands for the dead one reach the next, nor is what it said taken for the next one's."""
    frontend.report()
    frontend.events.send([EngineReady(2.5, STATS)])
    assert frontend.report() == FrontendReady()
    dead_commands, dead_events = frontend.commands, frontend.events

    frontend.tell(EngineDied("it was killed by SIGKILL", restarting=True, retry_seconds=42))
    frontend.connect(2)
    while (refused := httpx.post(f"{frontend.url}/v1/completions", json={"model": MODEL, "prompt": [5]})).is_success:
        pass
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "42")
    assert httpx.get(f"{frontend.url}/health").status_code == 200
    dead_events.send([EngineReady(2.5, STATS)])
    time.sleep(0.3)
    assert httpx.get(f"{frontend.url}/ready").status_code == 503

    frontend.events.send([EngineReady(2.5, STATS)])
    assert frontend.report() == FrontendReady()
    with ThreadPoolExecutor() as pool:
        body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 1}
        answer = pool.submit(httpx.post, f"{frontend.url}/v1/completions", json=body)
        [submit] = frontend.commands.drain(10)
        assert isinstance(submit, Submit)
        finished = Finished(submit.request.id, FinishReason.LENGTH, 0, "")
        batch = TokenBatch((submit.request.id,), (70,), (finished,), (), (), "a/path", STATS)
        frontend.events.send([Accepted(submit.request.id), batch])
        assert answer.result(10).status_code == 200
    assert dead_commands.drain(0) == []
    dead_commands.close()
    dead_events.close(linger=False)


def test_a_second_drain_with_less_time_counts(frontend: Frontend):
    frontend.report()
    frontend.events.send([EngineReady(2.5, STATS)])
    frontend.report()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(httpx.post, f"{frontend.url}/v1/completions", json={"model": MODEL, "prompt": [5, 6]})
        [submit] = frontend.commands.drain(10)
        assert isinstance(submit, Submit)
        frontend.events.send([Accepted(submit.request.id)])
        frontend.tell(Drain(300))
        frontend.tell(Drain(0))
        assert answer.result(10).status_code in (500, 503)
    assert frontend.process.wait(10) == 0


def test_the_end_of_stdin_ends_it_at_once(frontend: Frontend):
    frontend.report()
    assert frontend.process.stdin
    frontend.process.stdin.close()
    assert frontend.process.wait(5) == 1


def test_a_checkpoint_without_a_tokenizer(tmp_path: Path, tokenizer_path: Path):
    model = tmp_path / "model"
    shutil.copytree(tokenizer_path, model)
    (model / "tokenizer.json").unlink()
    frontend = Frontend(tmp_path, model)
    try:
        report = frontend.report()
        assert isinstance(report, Failed)
        assert "tokenizer.json" in report.detail
        assert report.trace == ""
        assert frontend.process.wait(10) == 2
    finally:
        frontend.close()


def test_it_never_imports_torch():
    code = (
        "import sys, surefoot.http.process\n"
        "found = {'torch', 'transformers', 'triton'} & set(sys.modules)\n"
        "sys.exit(f'imported {found}' if found else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
