"""`surefoot bench serve` against servers that answer, fail and lie as the test wants."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from surefoot import cli
from surefoot.bench import servers
from surefoot.bench.client import Target
from surefoot.bench.load import arriving
from surefoot.bench.measure import doubts
from surefoot.bench.processes import LoadProcesses, LostProcessError
from surefoot.bench.results import BenchResult, RequestRecord, Run, ServerInfo, Workload, percentile, summaries
from surefoot.bench.workloads import Length, Maker, RandomWorkload, Session, Turn
from tests.bench.mock_server import Behaviour, MockServer


def bench(server: MockServer, tmp_path: Path, *flags: str, expected: int = 0) -> BenchResult:
    file = tmp_path / "result.json"
    code = cli.main(["bench", "serve", server.url, "--json", str(file), "--warm-up", "0", *flags])
    assert code == expected
    return msgspec.json.decode(file.read_bytes(), type=BenchResult)


def requests_of(result: BenchResult) -> list[RequestRecord]:
    return [request for run in result.runs for request in run.requests]


def test_closed_loop(tmp_path: Path) -> None:
    with MockServer(Behaviour(first_delay=0.05, gap=0.01)) as server:
        result = bench(server, tmp_path, "--concurrency", "2", "4", "--requests", "8", "--output", "5", "--repeat", "2")
    assert [(run.level, run.repeat) for run in result.runs] == [("c2", 0), ("c2", 1), ("c4", 0), ("c4", 1)]
    assert result.servers[0].software == "vLLM 1.2"
    assert result.servers[0].plan_hash == "unknown"
    assert result.workload.prompts == "fresh"
    for run in result.runs:
        assert len(run.requests) == 8
        for request in run.requests:
            assert (request.error, request.output_tokens, request.prompt_tokens) == ("", 5, 128)
            assert 0.05 <= request.ttft <= request.total <= run.seconds
            assert len(request.gaps) == 4
            assert sum(request.gaps) >= 0.03
        at_once = [
            sum(other.began <= request.began < other.began + other.total for other in run.requests)
            for request in run.requests
        ]
        assert max(at_once) == int(run.level[1:])
    prompts = [tuple(body["prompt"]) for body in server.behaviour.seen]
    assert len(set(prompts)) == len(prompts) == 32
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in server.behaviour.seen)


@pytest.mark.parametrize(
    "behaviour, kind",
    [
        (Behaviour(status=503), "HTTP 503"),
        (Behaviour(status=503, reason=" "), "HTTP 503"),
        (Behaviour(silent=True), "tokens without text"),
        (Behaviour(cut_after=2), "broken stream"),
        (Behaviour(error_after=2), "error event"),
        (Behaviour(first_delay=5), "timeout"),
    ],
)
def test_errors_by_kind(tmp_path: Path, behaviour: Behaviour, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with MockServer(behaviour) as server:
        flags = ("--concurrency", "2", "--requests", "2", "--output", "4", "--timeout", "1")
        result = bench(server, tmp_path, *flags, expected=1)
        bench(server, tmp_path, *flags, "--allow-errors")
    assert [request.error for request in requests_of(result)] == [kind, kind]
    (summary,) = summaries(result)
    assert summary.errors == {kind: 2}
    assert summary.output_rate == 0
    assert kind in capsys.readouterr().out


def test_short_answers_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MockServer(Behaviour(short_by=1)) as server:
        flags = ("--concurrency", "1", "--requests", "3", "--output", "4")
        result = bench(server, tmp_path, *flags, expected=1)
        assert "3 x answer with too few tokens" in capsys.readouterr().out
        assert summaries(result)[0].short == 3
        result = bench(server, tmp_path, *flags, "--stop-at-eos")
        assert summaries(result)[0].short == 0
        assert "ignore_eos" not in server.behaviour.seen[-1]


def test_a_server_that_counts_nothing(tmp_path: Path) -> None:
    with MockServer(Behaviour(usage=False)) as server:
        result = bench(server, tmp_path, "--concurrency", "1", "--requests", "2", "--output", "4")
    assert [request.output_tokens for request in requests_of(result)] == [4, 4]


def test_hits_that_should_not_be_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The incident's benchmark sent its prompts again without saying so."""
    with MockServer(Behaviour(cached_share=0.5)) as server:
        result = bench(server, tmp_path, "--concurrency", "1", "--output", "2")
        (warning,) = result.warnings
        assert warning.endswith("c1: 50% of prompt tokens came from its cache, although no run had sent them before")
        assert result.runs[0].hit_rate == 0.5
        result = bench(server, tmp_path, "--concurrency", "1", "--output", "2", "--prompts", "same", "--repeat", "2")
        assert "every run sends the same prompts" in result.warnings[0]
        assert result.workload.prompts == "same"
        sent = [body["prompt"] for body in server.behaviour.seen[-4:]]
        assert sent[:2] == sent[2:]
        prefix = ("--workload", "prefix", "--prefix-length", "100", "--input", "100")
        assert bench(server, tmp_path, *prefix, "--concurrency", "1", "--output", "2").warnings == ()
    assert "although no run had sent them before" in capsys.readouterr().out.replace("\n", " ")


def test_two_servers_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MockServer(Behaviour(gap=0.01)) as fast, MockServer(Behaviour(gap=0.03)) as slow:
        flags = ("--against", slow.url, "--name", "fast", "--name", "slow", "--concurrency", "2", "--repeat", "2")
        result = bench(fast, tmp_path, *flags, "--requests", "4", "--output", "8")
        assert [(run.server, run.repeat) for run in result.runs] == [("fast", 0), ("slow", 0), ("slow", 1), ("fast", 1)]
        assert [body["prompt"] for body in fast.behaviour.seen[:4]] == [b["prompt"] for b in slow.behaviour.seen[:4]]
    first, second = summaries(result)
    assert (first.ratio, first.ratio_low, first.ratio_high) == (1, 1, 1)
    assert second.ratio_low <= second.ratio <= second.ratio_high
    assert second.ratio > 1
    assert f"{second.ratio_low:.2f}-{second.ratio_high:.2f}" in capsys.readouterr().out


def test_conversations_send_what_was_said(tmp_path: Path) -> None:
    with MockServer(Behaviour()) as server:
        flags = ("--workload", "conversations", "--turns", "3", "--input", "5", "--output", "2", "--concurrency", "1")
        result = bench(server, tmp_path, *flags, "--chat", "--requests", "1")
        first, second, third = (body["messages"] for body in server.behaviour.seen)
        assert len(requests_of(result)) == 3
        assert [len(messages) for messages in (first, second, third)] == [1, 3, 5]
        assert third[:3] == second
        assert second[1] == {"role": "assistant", "content": "word word "}
        bench(server, tmp_path, *flags, "--requests", "1")
        assert server.behaviour.seen[-1]["prompt"].startswith(server.behaviour.seen[-2]["prompt"])


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_hits_are_told_by_answers_too(tmp_path: Path, share: float) -> None:
    with MockServer(Behaviour(metrics=False, cached_share=share)) as server:
        result = bench(server, tmp_path, "--concurrency", "2", "--output", "2")
    assert result.runs[0].hit_rate == share


def test_processes_share_one_closed_loop(tmp_path: Path) -> None:
    with MockServer(Behaviour(gap=0.01)) as server:
        flags = ("--clients", "2", "--concurrency", "5", "--requests", "12", "--output", "10")
        result = bench(server, tmp_path, *flags)
        (run,) = result.runs
        assert (run.client_processes, len(run.requests)) == (2, 12)
        assert len({tuple(body["prompt"]) for body in server.behaviour.seen}) == 12
        at_once = [
            sum(other.began <= request.began < other.began + other.total for other in run.requests)
            for request in run.requests
        ]
        assert max(at_once) == 5
        (run,) = bench(server, tmp_path, "--clients", "2", "--rate", "100", "--requests", "7", "--output", "1").runs
        assert (run.client_processes, len(run.requests)) == (2, 7)


def test_a_process_of_the_client_dies() -> None:
    target = Target("http://127.0.0.1:1", "mock", False, "", 5.0, True)
    with LoadProcesses(1) as load:
        load._processes[0].kill()
        load._processes[0].join()
        with pytest.raises(LostProcessError):
            load.run(target, [Session((Turn("a", 1),))], 1, lambda _: None)


def test_ctrl_c_leaves_what_was_finished(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    with MockServer(Behaviour(stall_from=3)) as server:
        command = [sys.executable, "-m", "surefoot", "bench", "serve", server.url, "--json", str(file), "--warm-up=0"]
        process = subprocess.Popen(
            [*command, "--concurrency", "1", "2", "--requests", "3", "--output", "10"],
            stdout=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        while len(server.behaviour.seen) < 5:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"c1" in output
    assert [run.level for run in msgspec.json.decode(file.read_bytes(), type=BenchResult).runs] == ["c1"]


def sharegpt(path: Path, count: int) -> tuple[str, ...]:
    talk = [
        {"conversations": [{"from": "human", "value": f"Question {i}?"}, {"from": "gpt", "value": "x" * 40}]}
        for i in (*range(count), 0)
    ]
    talk.append({"conversations": [{"from": "human", "value": "long " * 2000}, {"from": "gpt", "value": "x"}]})
    path.write_text(json.dumps(talk))
    return ("--workload", "sharegpt", "--file", str(path))


def test_sharegpt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No question comes twice unless that is wanted: not in repeats, not after the warm-up."""
    flags = (*sharegpt(tmp_path / "talk.json", 8), "--concurrency", "2", "--repeat", "2")
    with MockServer(Behaviour()) as server:
        result = bench(server, tmp_path, *flags, "--requests", "3", "--warm-up", "2")
        sent = [body["prompt"] for body in server.behaviour.seen]
        assert sorted(sent) == [f"Question {i}?" for i in range(8)]
        assert {body["max_tokens"] for body in server.behaviour.seen} == {10}
        assert [run.sent_before for run in result.runs] == [0, 0]
        result = bench(server, tmp_path, *flags, "--requests", "6", "--prompts", "same", "--output", "3")
        sent = [body["prompt"] for body in server.behaviour.seen[8:]]
        assert sorted(sent[:6]) == sorted(sent[6:])
        assert len(set(sent)) == 6
        assert {body["max_tokens"] for body in server.behaviour.seen[8:]} == {3}
        assert [run.sent_before for run in result.runs] == [0, 6]
        assert cli.main(["bench", "serve", server.url, *flags, "--requests", "4"]) == 2
        assert len(server.behaviour.seen) == 20
    assert "has 8 questions, and 12 are wanted" in " ".join(capsys.readouterr().err.split())


def trace(path: Path, lines: list[dict[str, Any]]) -> tuple[str, ...]:
    path.write_text("\n".join(map(json.dumps, lines)))
    return ("--workload", "trace", "--file", str(path))


def test_traces(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"timestamp": 100 * i, "input_length": 10 + i, "output_length": 3} for i in range(4)]
    lines.append({"arrival_time": 0.05, "prompt": "As it is", "output_length": 2})
    flags = trace(tmp_path / "trace.jsonl", lines)
    with MockServer(Behaviour()) as server:
        result = bench(server, tmp_path, *flags, "--repeat", "2")
        prompts = [body["prompt"] for body in server.behaviour.seen]
    run, again = result.runs
    assert run.level == "trace"
    began = sorted(request.began for request in run.requests)  # never before their time; later on a busy machine
    assert all(at >= due - 0.001 for at, due in zip(began, (0, 0.05, 0.1, 0.2, 0.3), strict=True))
    assert [len(prompt) for prompt in prompts[:5]] == [10, len("As it is"), 11, 12, 13]
    assert (run.sent_before, again.sent_before) == (0, 1)
    assert any("trace: 1 of 5 prompts had been sent to it in an earlier run" in told for told in result.warnings)


def test_the_blocks_of_a_trace_are_shared(tmp_path: Path) -> None:
    ids = [[1, 2, 3], [1, 2, 4], [5, 2]]
    lengths = [512 * 2 + 7, 512 * 2 + 9, 512 * 2]
    lines = [
        {"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": blocks}
        for length, blocks in zip(lengths, ids, strict=True)
    ]
    with MockServer(Behaviour()) as server:
        result = bench(server, tmp_path, *trace(tmp_path / "trace.jsonl", lines))
        prompts = sorted((body["prompt"] for body in server.behaviour.seen), key=len)
    other, first, second = prompts
    assert [len(prompt) for prompt in prompts] == sorted(lengths)
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1031]
    assert (other[:512] != first[:512], other[512:]) == (True, first[512:1024])
    assert result.workload.shared_tokens == 1024 // 3


def test_the_highest_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server of one slot that takes 10 ms an answer: not quite 100 a second if they come evenly."""
    with MockServer(Behaviour(first_delay=0.01, slots=1)) as server:
        flags = ("--find-rate", "--rate", "40", "--burstiness", "50", "--ttft-limit", "0.05", "--output", "1")
        result = bench(server, tmp_path, *flags)
        found = float(capsys.readouterr().out.split(" requests a second keep the limits")[0].split()[-1])
        assert 30 < found < 110
        assert {run.level for run in result.runs} >= {"r40", "r80"}
        assert len(result.runs[0].requests) == 40
        assert max(len(run.requests) for run in result.runs) > 40
        flags = ("--find-rate", "--rate", "1000", "--ttft-limit", "9", "--output", "1", "--requests", "2")
        bench(server, tmp_path, *flags)
    assert "at least" in capsys.readouterr().out


def test_open_loops_do_not_wait(tmp_path: Path) -> None:
    with MockServer(Behaviour(first_delay=0.5)) as server:
        result = bench(server, tmp_path, "--rate", "50", "--requests", "10", "--output", "2")
    assert result.runs[0].level == "r50"
    assert max(request.began for request in requests_of(result)) < 0.5


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0])
def test_arrivals(burstiness: float) -> None:
    sessions = (Session((Turn("a", 1),)) for _ in range(20_000))
    times = [session.arrives for session in arriving(sessions, 5.0, burstiness, random.Random(0))]
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.var() == pytest.approx(0.2**2 / burstiness, rel=0.1)


def test_percentiles_are_numpys() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 7, 1000):
        values = np.sort(rng.exponential(size=size))
        for share in (0.0, 0.5, 0.9, 0.99, 1.0):
            assert percentile(values.tolist(), share) == pytest.approx(np.percentile(values, 100 * share))


def test_time_per_token() -> None:
    """Pieces of several tokens make long gaps, but no longer time per token."""
    requests = (RequestRecord(0, 0.1, 1, (0.4, 0.5), 1, 0, 10, 10, ""), RequestRecord(0, 0.1, 1, (), 1, 0, 1, 1, ""))
    result = BenchResult(
        1,
        "",
        "",
        "",
        "",
        Workload("random", "", 0, "fresh", 0),
        (ServerInfo("a", "", "", "", ""),),
        (Run("a", "c1", 0, 1.0, requests, -1.0, 0.1),),
        (),
    )
    (summary,) = summaries(result)
    assert summary.per_token.p50 == pytest.approx(0.1)
    assert summary.inter_token.p50 == pytest.approx(0.45)


def run_with(**changes: Any) -> Run:
    requests = (RequestRecord(0, 0.1, 5, (), 100, 0, 1, 1, ""),)
    return msgspec.structs.replace(Run("a", "c1", 0, 5.0, requests, -1.0, 0.1), **changes)


@pytest.mark.parametrize(
    "run, same, told",
    [
        (run_with(), False, ""),
        (run_with(hit_rate=0.01), False, ""),
        (run_with(hit_rate=0.1), False, "10% of prompt tokens came from its cache, although"),
        (run_with(hit_rate=0.1, sent_before=1), False, "1 of 1 prompts had been sent to it"),
        (run_with(hit_rate=0.1, sent_before=1), True, "since every run sends the same prompts"),
        (run_with(client_busy=0.9), False, "the client computed for 90%"),
        (run_with(client_busy=0.9, seconds=0.1), False, ""),
        (run_with(client_lag=0.05), False, "up to 50 ms late"),
    ],
)
def test_doubts(run: Run, same: bool, told: str) -> None:
    workload = RandomWorkload(Maker("ids", 2000), Length(9, 9), Length(2, 2))
    (doubt,) = list(doubts(workload, False, same, [run])) or [""]
    assert told in doubt
    assert bool(doubt) == bool(told)


def test_a_key_stays_out_of_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["surefoot", "bench", "serve", "--api-key=hush", "--seed", "3"])
    with MockServer(Behaviour()) as server:
        flags = ("--api-key=hush", "--seed", "3", "--concurrency", "1", "--output", "1")
        result = bench(server, tmp_path, *flags)
    assert "hush" not in (tmp_path / "result.json").read_text()
    assert result.command == "surefoot bench serve --api-key=KEY --seed 3"
    assert "--seed 3 was given" in result.warnings[-1]


def test_the_json_has_the_summaries(tmp_path: Path) -> None:
    with MockServer(Behaviour()) as server:
        result = bench(server, tmp_path, "--concurrency", "1", "2", "--output", "3")
    written = json.loads((tmp_path / "result.json").read_text())["summaries"]
    assert [one["level"] for one in written] == ["c1", "c2"]
    assert written[0]["output_rate"] == summaries(result)[0].output_rate


def test_ratios_are_of_pairs() -> None:
    def run(server: str, repeat: int, tokens: int) -> Run:
        return Run(server, "c1", repeat, 1.0, (RequestRecord(0, 0.1, 1, (), 1, 0, tokens, tokens, ""),), -1.0, 0.1)

    rates = {"a": [30, 10, 20], "b": [10, 10, 5]}
    result = BenchResult(
        1,
        "",
        "",
        "",
        "",
        Workload("random", "", 0, "fresh", 0),
        tuple(ServerInfo(name, "", "", "", "") for name in rates),
        tuple(run(name, repeat, tokens) for name, all_ in rates.items() for repeat, tokens in enumerate(all_)),
        (),
    )
    summary = summaries(result)[1]
    assert (summary.ratio, summary.ratio_low, summary.ratio_high) == (3, 1, 4)


def test_the_hash_of_a_plan_is_of_what_was_decided() -> None:
    plan: dict[str, Any] = {
        "lookahead": 1,
        "hardware": {"num_cpus": 2, "memory_available": 5},
        "reasons": [["a", "1", "5 free"]],
    }
    other = {**plan, "hardware": {"num_cpus": 2, "memory_available": 6}, "reasons": [["a", "1", "6 free"]]}
    assert servers.plan_hash(plan) == servers.plan_hash(other)
    assert servers.plan_hash(plan) != servers.plan_hash({**plan, "lookahead": 0})


@pytest.mark.parametrize(
    "flags, complaint",
    [
        (("--input", "9-5"), "goes from 9 to 5"),
        (("--concurrency", "0"), "0 is no load"),
        (("--rate", "nan"), "nan is no load"),
        (("--requests", "0"), "'0' is no count"),
        (("--clients", "many"), "'many' is no count: write 1 or more, or auto"),
        (("--burstiness", "2"), "--burstiness means nothing without --rate"),
        (("--ttft-limit", "2"), "--ttft-limit means nothing without --find-rate"),
        (("--find-rate", "--rate", "1", "2"), "one --rate to begin with"),
        (("--find-rate", "--limit-share", "2"), "--limit-share 2 is no share"),
        (("--prefixes", "2"), "--prefixes means nothing to --workload random"),
        (("--workload", "conversations", "--prompt-kind", "ids"), "--prompt-kind means nothing to"),
        (("--workload", "trace", "--file", "/nowhere", "--speed", "0"), "--speed 0 is no speed"),
        (("--workload", "trace"), "needs --file"),
        (("--chat", "--prompt-kind", "ids"), "takes no token ids"),
        (("--against", "http://127.0.0.1:1", "--name", "a", "--name", "a"), "different names"),
        (("--workload", "sharegpt", "--file", "/nowhere"), "/nowhere cannot be read"),
    ],
)
def test_bad_arguments(flags: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(["bench", "serve", "http://127.0.0.1:1", *flags])
    except SystemExit as exit:
        code = int(str(exit.code))
    assert code == 2
    assert complaint in " ".join(capsys.readouterr().err.split())


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", "http://127.0.0.1:1"]) == 2
    assert "http://127.0.0.1:1 does not answer" in capsys.readouterr().err


def test_lengths() -> None:
    workload = RandomWorkload(Maker("ids", 2000), Length(3, 9), Length(2, 2))
    sessions = list(workload.sessions(300, random.Random(0)))
    lengths = {len(session.turns[0].content) for session in sessions}
    assert lengths == set(range(3, 10))
    assert all(1000 <= token < 2000 for session in sessions for token in session.turns[0].content)
