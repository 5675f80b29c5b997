"""A process that dies comes back; whoever was served by it is told, once; what had died has no say any more."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from surefoot.engine.flight_recorder import PlanRecord, read_records
from tests.e2e import gauges
from tests.e2e.conftest import TIGHT
from tests.e2e.faulty import FaultyServer
from tests.e2e.faulty_server import Fault
from tests.e2e.server import Server, wait_dead, wait_until
from tests.e2e.streams import Stream, open_streams
from tests.tiny import TinyLlama

FRONTEND, ENGINE = "surefoot.http.process", "surefoot.engine.process"
STEM = list(range(20, 60))


def ask(server: Server, max_tokens: int = 4, prompt: list[int] = STEM) -> httpx.Response:
    body = {"model": server.model_name, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def is_ready(server: Server) -> bool:
    return httpx.get(f"{server.url}/ready").status_code == 200


@pytest.fixture(scope="module")
def faulty(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    log = tmp_path_factory.mktemp("faulty") / "log"
    with FaultyServer(log, model=tiny_llama.path, max_restarts=100, **TIGHT) as server:
        yield server
        assert server.stop() == 0


def test_a_killed_engine_comes_back(tiny_llama: TinyLlama, log: Path) -> None:
    slow = {"chunked_prefill_size": 1, "cpu_kernels": "torch"}  # or streams end before the kill
    with Server(log, model=tiny_llama.path, **TIGHT, **slow) as server:
        frontend, engine = server.child(FRONTEND), server.child(ENGINE)
        with ThreadPoolExecutor() as pool:
            answers = [pool.submit(ask, server, max_tokens=80) for _ in range(4)]
            streams = open_streams(server, 12)
            os.kill(engine, signal.SIGKILL)
            statuses = {answer.result().status_code for answer in answers}
        assert 500 in statuses
        assert statuses <= {200, 500, 503}  # 503 if it had not been accepted
        for stream in streams:
            stream.join(20)
            stream.check_ended_once()
        errors = [error["error"] for stream in streams for error in stream.errors()]
        assert errors
        assert all("the engine was killed by SIGKILL" in error["message"] for error in errors)

        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 200
        refused = ask(server)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_unavailable"
        assert int(refused.headers["retry-after"]) >= 1

        wait_until(lambda: is_ready(server))
        assert server.child(FRONTEND) == frontend
        assert server.child(ENGINE) != engine
        assert ask(server).status_code == 200
        gauges.check_pages(server)
        dead, living = sorted(log.parent.glob("run-*/steps-*.ring"))
        assert any(isinstance(record, PlanRecord) and record.plan.num_rows for record in read_records(dead))
        assert living.name == "steps-1.ring"
        assert server.stop() == 0


@pytest.mark.parametrize(
    "fault, says",
    [
        (Fault.RAISE, "failed: AttributeError: 'PrefillMetadata' object has no attribute 'page_table_1_flattened'"),
        (Fault.OUT_OF_MEMORY, "failed: out of memory: a smaller --mem-fraction or --kv-cache-tokens needs less"),
        (Fault.EXIT, "ended with exit code 7"),
        (Fault.WEDGE, "made no step for 3 s and was killed"),
    ],
    ids=["raise", "memory", "exit", "wedge"],
)
def test_however_the_engine_dies(faulty: FaultyServer, fault: Fault, says: str) -> None:
    wait_until(lambda: is_ready(faulty))
    engine = faulty.engine()
    stream = Stream(faulty, max_tokens=90)
    stream.began.wait(30)
    guilty = ask(faulty, prompt=[fault, 20, 21])
    assert guilty.status_code == 503  # it had not been accepted: its client may try again
    stream.join(20)
    stream.check_ended_once()
    assert stream.finish_reasons() or says in stream.errors()[0]["error"]["message"]
    wait_dead(engine)
    assert f"the engine {says}" in faulty.log()
    wait_until(lambda: is_ready(faulty), 60)
    assert ask(faulty).status_code == 200


def test_a_stopped_engine_is_killed_and_comes_back(faulty: FaultyServer) -> None:
    wait_until(lambda: is_ready(faulty), 60)
    engine = faulty.engine()
    os.kill(engine, signal.SIGSTOP)
    assert ask(faulty).status_code == 503
    wait_dead(engine)
    wait_until(lambda: is_ready(faulty), 60)
    assert ask(faulty).status_code == 200


def test_a_killed_frontend_comes_back_and_the_engine_keeps_its_cache(tiny_llama: TinyLlama, log: Path) -> None:
    with Server(log, model=tiny_llama.path, **TIGHT, chunked_prefill_size=1) as server:
        frontend, engine = server.child(FRONTEND), server.child(ENGINE)
        assert ask(server).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        streams = open_streams(server, 8)
        os.kill(frontend, signal.SIGKILL)
        for stream in streams:
            stream.join(20)
            assert stream.broken
        assert ask(server).status_code in (200, 503)  # it has waited for the next frontend, and was not refused
        wait_until(lambda: is_ready(server))
        assert server.child(ENGINE) == engine
        assert ask(server).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        gauges.check_pages(server)
        assert server.stop() == 0


def test_both_may_die_at_once(tiny_llama: TinyLlama, log: Path) -> None:
    with Server(log, model=tiny_llama.path, **TIGHT) as server:
        old = server.child(FRONTEND), server.child(ENGINE)
        open_streams(server, 8)
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        wait_dead(*old)
        wait_until(lambda: ask(server).status_code == 200)
        gauges.check_pages(server)
        assert server.stop() == 0


def test_an_engine_that_dies_too_often_ends_the_server(tiny_llama: TinyLlama, log: Path) -> None:
    with Server(log, model=tiny_llama.path, **TIGHT, max_restarts=2) as server:
        for _ in range(3):
            wait_until(lambda: is_ready(server))
            streams = open_streams(server, 2)
            os.kill(server.child(ENGINE), signal.SIGKILL)
            for stream in streams:
                stream.join(20)
                stream.check_ended_once()
        assert server.process.wait(20) == 5
        assert "the engine was killed by SIGKILL" in server.log()
        assert "it has died 3 times within 10 minutes" in server.log()


def test_an_engine_that_cannot_load_again_ends_the_server(tiny_llama: TinyLlama, log: Path, tmp_path: Path) -> None:
    from tests.tiny import write_tiny_llama

    write_tiny_llama(tmp_path)
    with Server(log, model=tmp_path, **TIGHT) as server:
        (tmp_path / "model.safetensors").unlink()
        os.kill(server.child(ENGINE), signal.SIGKILL)
        assert server.process.wait(30) == 5
        assert "it has died 2 times in a row while it started" in server.log()


def test_a_frontend_that_dies_too_often_ends_the_server(tiny_llama: TinyLlama, log: Path) -> None:
    with Server(log, model=tiny_llama.path, **TIGHT, max_restarts=1) as server:
        for _ in range(2):
            wait_until(lambda: is_ready(server))
            os.kill(server.child(FRONTEND), signal.SIGKILL)
        assert server.process.wait(20) == 5
        assert "the frontend was killed by SIGKILL" in server.log()


def test_a_signal_while_the_engine_is_down_ends_the_server(tiny_llama: TinyLlama, log: Path) -> None:
    with Server(log, model=tiny_llama.path, **TIGHT) as server:
        os.kill(server.child(ENGINE), signal.SIGKILL)
        wait_until(lambda: not is_ready(server))
        assert server.stop() == 0


def test_the_log_as_json(tiny_llama: TinyLlama, log: Path) -> None:
    with Server(log, wait_ready=False, model=tiny_llama.path, **TIGHT, log_format="json") as server:
        wait_until(lambda: is_ready(server))
        os.kill(server.child(ENGINE), signal.SIGKILL)
        wait_until(lambda: not is_ready(server))
        wait_until(lambda: is_ready(server))
        assert ask(server).status_code == 200
        assert server.stop() == 0
    entries = [json.loads(line) for line in server.log().splitlines()]
    assert {entry["process"] for entry in entries} == {"supervisor", "frontend", "engine"}
    assert all(set(entry) >= {"time", "level", "logger", "message"} for entry in entries)
    (death,) = [entry for entry in entries if entry["level"] == "error"]
    assert death["message"].startswith("the engine was killed by SIGKILL")
