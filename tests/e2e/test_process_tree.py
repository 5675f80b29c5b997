"""What happens to requests and processes when something ends: asked to, or killed. What comes back: test_restart."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from surefoot.engine.flight_recorder import PlanRecord, read_records
from surefoot.launch.records import KEPT_RINGS, new_record_dir, new_ring
from tests.e2e import gauges
from tests.e2e.conftest import TIGHT
from tests.e2e.server import Server, killed_after, wait_dead, wait_until
from tests.e2e.streams import Stream, open_streams
from tests.tiny import TinyLlama

FRONTEND, ENGINE = "surefoot.http.process", "surefoot.engine.process"
ONE_BY_ONE = {"weight_dtype": "float32", "max_running_requests": 1, "max_model_len": 512, "kv_cache_tokens": 512}
SLOW_START = {"chunked_prefill_size": 1}  # a long prompt keeps a request busy for many steps


def processes(log: Path) -> list[int]:
    """All that write to the log: supervisor, children, and whoever they have left behind."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "fd/2").readlink() == log:
                    found.append(int(entry.name))
            except OSError:
                pass  # it has ended, or is not ours
    return found


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


def test_without_restarts_the_death_of_the_engine_ends_every_stream_once_and_the_server(
    tiny_llama: TinyLlama, log: Path
) -> None:
    with Server(log, model=tiny_llama.path, **TIGHT, **SLOW_START, max_restarts=0) as server:
        frontend, engine = server.child(FRONTEND), server.child(ENGINE)
        streams = open_streams(server, 8)
        os.kill(engine, signal.SIGKILL)
        for stream in streams:
            stream.join(20)
            stream.check_ended_once()
        assert any(stream.errors() for stream in streams)
        assert server.process.wait(20) == 4
        wait_dead(frontend)
        assert "the engine was killed by SIGKILL" in server.log()
        (ring,) = log.parent.glob("run-*/steps-0.ring")
        records = list(read_records(ring))
        assert any(isinstance(record, PlanRecord) and record.plan.num_rows for record in records)


def test_the_engine_may_die_while_the_server_drains(tiny_llama: TinyLlama, log: Path) -> None:
    """Its streams end at once, not at the deadline of the drain."""
    with Server(log, model=tiny_llama.path, **ONE_BY_ONE, drain_seconds=300) as server:
        engine = server.child(ENGINE)
        streams = open_streams(server, 4, max_tokens=480)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in server.log())
        os.kill(engine, signal.SIGKILL)
        for stream in streams:
            stream.join(20)
            stream.check_ended_once()
        assert server.process.wait(20) == 4


def test_the_frontend_may_die_while_the_server_drains(tiny_llama: TinyLlama, log: Path) -> None:
    with Server(log, model=tiny_llama.path, **ONE_BY_ONE, drain_seconds=300) as server:
        frontend = server.child(FRONTEND)
        open_streams(server, 4, max_tokens=480)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in server.log())
        os.kill(frontend, signal.SIGKILL)
        assert server.process.wait(20) == 128 + signal.SIGKILL
        assert server.log().count("the frontend was killed by SIGKILL while the server drained") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["term", "int"])
def test_a_second_signal_ends_streams_with_an_error_and_at_once(
    tiny_llama: TinyLlama, log: Path, number: signal.Signals
) -> None:
    settings = dict(ONE_BY_ONE, max_running_requests=4, kv_cache_tokens=2048, drain_seconds=300)
    with Server(log, model=tiny_llama.path, **settings) as server:
        children = server.child(FRONTEND), server.child(ENGINE)
        streams = open_streams(server, 4, max_tokens=480)
        server.process.send_signal(number)
        wait_until(lambda: "draining" in server.log())
        began = time.monotonic()
        server.process.send_signal(number)
        assert server.process.wait(20) == 130
        assert time.monotonic() - began < 10  # not the 300 s of the drain
        wait_dead(*children)
        for stream in streams:
            stream.join(10)
            stream.check_ended_once()
        messages = [error["error"]["message"] for stream in streams for error in stream.errors()]
        assert messages
        assert all("shutting down" in message for message in messages)


def test_records_of_a_running_server_are_kept(tmp_path: Path) -> None:
    with ExitStack() as stack:
        running = stack.enter_context(new_record_dir(tmp_path))
        later = []
        for _ in range(12):
            with new_record_dir(tmp_path) as made:
                later.append(made)
        assert running.is_dir()
        assert [made.is_dir() for made in later] == [False] * 3 + [True] * 9
    with new_record_dir(tmp_path):
        assert not running.is_dir()


def test_rings_of_earlier_engines_are_kept_but_not_all(tmp_path: Path) -> None:
    for engine in range(20):
        new_ring(tmp_path, engine).touch()
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {f"steps-{engine}.ring" for engine in range(20 - KEPT_RINGS, 20)}


def test_the_ring_of_a_folder_that_is_gone(tmp_path: Path) -> None:
    ring = new_ring(tmp_path / "run", 1)
    assert ring.parent.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    assert new_ring(tmp_path / "file", 1)  # who writes there will say why it cannot


VICTIMS = ["supervisor", "frontend", "engine"]
SUBSETS = [subset for size in (1, 2, 3) for subset in itertools.combinations(VICTIMS, size)]
QUICK = {("serving", ("supervisor",)), ("loading", ("supervisor",)), ("draining", ("supervisor", "frontend"))}
KILLS = [
    pytest.param(phase, victims, id=f"{phase}-{'-'.join(victims)}", marks=[] if quick else [pytest.mark.slow])
    for phase in ("loading", "serving", "draining")
    for victims in SUBSETS
    for quick in [(phase, victims) in QUICK]
]


@pytest.mark.parametrize("phase, victims", KILLS)
def test_no_kill_leaves_an_orphan(tiny_llama: TinyLlama, log: Path, phase: str, victims: tuple[str, ...]) -> None:
    """Without the supervisor nobody is left. Else the server still ends when it is told to."""
    settings = dict(TIGHT, drain_seconds=2)
    with Server(log, wait_ready=phase != "loading", model=tiny_llama.path, **settings) as server:
        pids = {"supervisor": server.process.pid, "frontend": server.child(FRONTEND), "engine": server.child(ENGINE)}
        if phase != "loading":
            open_streams(server, 4)
        if phase == "draining":
            server.process.send_signal(signal.SIGTERM)
        else:
            assert set(processes(log)) == set(pids.values())
        for victim in victims:
            try:
                os.kill(pids[victim], signal.SIGKILL)
            except ProcessLookupError:
                assert phase == "draining"
        if "supervisor" not in victims:
            server.process.send_signal(signal.SIGTERM)
        server.process.wait(20)
        wait_until(lambda: not processes(log))


def test_children_that_cannot_see_it_end_with_the_supervisor_too(tiny_llama: TinyLlama, log: Path) -> None:
    with Server(log, model=tiny_llama.path, **TIGHT) as server:
        stopped = server.child(FRONTEND), server.child(ENGINE)
        with killed_after(stopped[0]), killed_after(stopped[1]):
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            server.process.kill()
            server.process.wait()
            wait_dead(*stopped)


def test_without_restarts_the_death_of_the_frontend_ends_the_tree(tiny_llama: TinyLlama, log: Path) -> None:
    with Server(log, model=tiny_llama.path, **TIGHT, max_restarts=0) as server:
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
            wait_until(lambda: gauges.value(server, gauges.RUNNING) == 1)
        wait_until(lambda: gauges.value(server, gauges.RUNNING) == 0)
        assert gauges.value(server, gauges.GENERATED) < 400


def test_a_full_queue_is_a_503_with_retry_after(tiny_llama: TinyLlama, log: Path) -> None:
    """One runs, one waits, the next are turned away before any event of a stream."""
    with Server(log, model=tiny_llama.path, **ONE_BY_ONE, max_queued_requests=1) as server:
        holders = [Stream(server, max_tokens=480), Stream(server, max_tokens=480)]
        wait_until(lambda: gauges.value(server, gauges.WAITING) == 1)
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
        (["--max-model-len=100000"], "more than the model's context"),
        (["--page-size=none"], "--page-size: 'none' is not valid"),
    ],
    ids=["path", "plan", "setting"],
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
    (line,) = [line for line in ended.stderr.splitlines() if "ERROR" in line or "error" in line]
    assert "the engine cannot start: " in line
    assert ended.stderr.count("missing: model.layers.3.mlp.up_proj.weight [80, 48]") == 1
    assert "Traceback" not in ended.stderr


def test_a_broken_tokenizer_is_the_one_cause(tmp_path: Path) -> None:
    from tests.tiny import write_tiny_llama

    write_tiny_llama(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    ended = serve(f"--model={tmp_path}", "--port=0", f"--record-dir={tmp_path}")
    assert ended.returncode == 2
    (line,) = [line for line in ended.stderr.splitlines() if "ERROR" in line or "error" in line]
    assert "the frontend cannot start: " in line
    assert "tokenizer.json" in line
    assert "Traceback" not in ended.stderr
