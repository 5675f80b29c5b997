"""What happens to requests and processes when something ends: asked to, or killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from surefoot.engine.flight_recorder import PlanRecord, read_records
from surefoot.launch import new_record_dir
from tests.e2e.conftest import TIGHT
from tests.e2e.server import Server, killed_after, wait_dead, wait_until
from tests.tiny import TinyLlama

FRONTEND, ENGINE = "surefoot.http.process", "surefoot.engine.process"
ONE_BY_ONE = {"weight_dtype": "float32", "max_running_requests": 1, "max_model_len": 512, "kv_cache_tokens": 512}
SLOW_START = {"chunked_prefill_size": 1}  # a long prompt keeps a request busy for many steps


class Stream(threading.Thread):
    """One streamed completion, read to its end: its events, and the status it began with."""

    def __init__(self, server: Server, max_tokens: int = 100) -> None:
        super().__init__()
        self._url = f"{server.url}/v1/completions"
        self._body = {
            "model": server.model_name,
            "prompt": list(range(20, 40)),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        self.answered = threading.Event()  # the headers have come, or nothing will
        self.began = threading.Event()  # a first event has come, or nothing will
        self.events: list[Any] = []
        self.status = 0
        self.broken = ""
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as response:
                self.status = response.status_code
                self.answered.set()
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
                        self.began.set()
        except httpx.TransportError as error:  # the frontend has ended
            self.broken = str(error)
        finally:
            self.answered.set()
            self.began.set()

    def finish_reasons(self) -> list[str]:
        chunks = [event for event in self.events if isinstance(event, dict) and "choices" in event]
        return [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]

    def errors(self) -> list[Any]:
        return [event for event in self.events if isinstance(event, dict) and "error" in event]


def open_streams(server: Server, count: int, max_tokens: int = 100) -> list[Stream]:
    """All of them answered, the first one with an event."""
    streams = [Stream(server, max_tokens) for _ in range(count)]
    streams[0].began.wait(30)
    for stream in streams:
        assert stream.answered.wait(30)
    return streams


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(tiny_llama: TinyLlama, log: Path) -> None:
    with Server(log, model=tiny_llama.path, **ONE_BY_ONE) as server:
        children = server.child(FRONTEND), server.child(ENGINE)
        streams = open_streams(server, 3, max_tokens=400)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in server.log())
        late = Stream(server)
        late.join(10)
        assert late.status == 503
        assert server.process.wait(30) == 0
        for stream in streams:
            stream.join(10)
            assert stream.status == 200
            assert stream.finish_reasons() == ["length"]
            assert not stream.errors()
        wait_dead(*children)


def test_the_deadline_of_a_drain_ends_what_still_runs(tiny_llama: TinyLlama, log: Path) -> None:
    with Server(log, model=tiny_llama.path, **dict(TIGHT, max_running_requests=1), drain_seconds=0) as server:
        streams = open_streams(server, 6)
        assert server.stop() == 0
        for stream in streams:
            stream.join(10)
            assert stream.status in (200, 503)
            if stream.status == 200:
                assert len(stream.finish_reasons()) + len(stream.errors()) == 1


def test_killing_the_engine_ends_every_stream_once_and_the_server_with_its_own_code(
    tiny_llama: TinyLlama, log: Path
) -> None:
    with Server(log, model=tiny_llama.path, **TIGHT, **SLOW_START) as server:
        frontend, engine = server.child(FRONTEND), server.child(ENGINE)
        streams = open_streams(server, 8)
        os.kill(engine, signal.SIGKILL)
        for stream in streams:
            stream.join(20)
            assert len(stream.finish_reasons()) + len(stream.errors()) == 1 or stream.status == 503
        assert any(stream.errors() for stream in streams)
        assert server.process.wait(20) == 4
        wait_dead(frontend)
        assert "the engine was killed by SIGKILL" in server.log()
        (ring,) = log.parent.glob("run-*/steps.ring")
        records = list(read_records(ring))
        assert any(isinstance(record, PlanRecord) and record.plan.num_rows for record in records)


def test_the_engine_may_die_while_the_server_drains(tiny_llama: TinyLlama, log: Path) -> None:
    """Its streams end at once, not at the deadline of the drain."""
    with Server(log, model=tiny_llama.path, **ONE_BY_ONE, drain_seconds=300) as server:
        engine = server.child(ENGINE)
        streams = open_streams(server, 4, max_tokens=480)
        server.process.send_signal(signal.SIGTERM)
        os.kill(engine, signal.SIGKILL)
        for stream in streams:
            stream.join(20)
            assert not stream.is_alive()
            assert len(stream.finish_reasons()) + len(stream.errors()) == 1 or stream.status == 503
        assert server.process.wait(20) == 4


def test_records_of_a_running_server_are_kept(tmp_path: Path) -> None:
    running, lock = new_record_dir(tmp_path)
    later = []
    for _ in range(12):
        made, other = new_record_dir(tmp_path)
        other.close()
        later.append(made)
    assert running.is_dir()
    assert [made.is_dir() for made in later] == [False] * 3 + [True] * 9
    lock.close()
    new_record_dir(tmp_path)[1].close()
    assert not running.is_dir()


def test_killing_the_supervisor_leaves_no_orphan(tiny_llama: TinyLlama, log: Path) -> None:
    with Server(log, model=tiny_llama.path, **TIGHT) as server:
        frontend, engine = server.child(FRONTEND), server.child(ENGINE)
        with killed_after(frontend), killed_after(engine):
            stream = Stream(server)
            stream.began.wait(30)
            server.process.kill()
            server.process.wait()
            wait_dead(frontend, engine)
            stream.join(10)
            assert stream.broken


def test_killing_the_frontend_ends_the_tree(tiny_llama: TinyLlama, log: Path) -> None:
    with Server(log, model=tiny_llama.path, **TIGHT) as server:
        engine = server.child(ENGINE)
        os.kill(server.child(FRONTEND), signal.SIGKILL)
        assert server.process.wait(20) == 128 + signal.SIGKILL
        wait_dead(engine)


def test_a_client_that_leaves_frees_its_slot(tiny_llama: TinyLlama, log: Path) -> None:
    """Long before its 480 tokens are computed."""
    with Server(log, model=tiny_llama.path, **ONE_BY_ONE) as server:
        body = {"model": server.model_name, "prompt": [20, 21], "max_tokens": 480, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            next(response.iter_lines())
            wait_until(lambda: server.metrics()["surefoot_requests_running"] == 1)
        wait_until(lambda: server.metrics()["surefoot_requests_running"] == 0)
        assert server.metrics()["surefoot_generation_tokens_total"] < 400


def test_a_full_queue_is_a_503_with_retry_after(tiny_llama: TinyLlama, log: Path) -> None:
    """One runs, one waits, the next are turned away before any event of a stream."""
    with Server(log, model=tiny_llama.path, **ONE_BY_ONE, max_queued_requests=1) as server:
        holders = [Stream(server, max_tokens=480), Stream(server, max_tokens=480)]
        wait_until(lambda: server.metrics()["surefoot_requests_waiting"] == 1)
        for stream in (False, True):
            body = {"model": server.model_name, "prompt": [20], "stream": stream}
            refused = httpx.post(f"{server.url}/v1/completions", json=body)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert "all 1 running and 1 waiting places are taken" in refused.json()["error"]["message"]
        for holder in holders:
            holder.join(30)
            assert holder.finish_reasons() == ["length"]


def serve(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "surefoot.cli", "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_taken_port_is_named(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = serve(f"--model={tiny_llama.path}", f"--port={port}", f"--record-dir={tmp_path}")
    assert ended.returncode == 2
    assert str(port) in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--model=/nowhere/model.gguf"], "there is no file or directory /nowhere/model.gguf"),
        (["--model=org/name"], "Hugging Face hub"),
        (["--max-model-len=100000"], "more than the model's context"),
        (["--page-size=none"], "--page-size: 'none' is not valid"),
    ],
    ids=["path", "hub", "plan", "setting"],
)
def test_what_cannot_start_says_why_and_exits_with_2(default_model_path: Path, flags: list[str], says: str) -> None:
    ended = serve(*flags)
    assert ended.returncode == 2
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


def test_weights_that_do_not_fit_the_config_end_the_server_before_it_is_ready(tmp_path: Path) -> None:
    from tests.tiny import write_tiny_llama

    write_tiny_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    ended = serve(f"--model={tmp_path}", "--port=0", f"--record-dir={tmp_path}")
    assert ended.returncode == 3
    assert "missing: model.layers.3.mlp.up_proj.weight [80, 48]" in ended.stderr
    assert "Traceback" not in ended.stderr
