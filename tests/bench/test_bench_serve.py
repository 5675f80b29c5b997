"""`surefoot bench serve` against servers that answer, fail and lie as the test wants."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from surefoot import cli
from surefoot.bench import servers
from surefoot.bench.load import arriving
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
        result = bench(server, tmp_path, "--concurrency", "1", "--requests", "3", "--output", "4")
    assert summaries(result)[0].short == 3
    assert "3 x answer with too few tokens" in capsys.readouterr().out


def test_a_server_that_counts_nothing(tmp_path: Path) -> None:
    with MockServer(Behaviour(usage=False)) as server:
        result = bench(server, tmp_path, "--concurrency", "1", "--requests", "2", "--output", "4")
    assert [request.output_tokens for request in requests_of(result)] == [4, 4]


def test_hits_that_should_not_be_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The incident's benchmark sent its prompts again without saying so."""
    with MockServer(Behaviour(cached_share=0.5)) as server:
        result = bench(server, tmp_path, "--concurrency", "1", "--output", "2")
        (warning,) = result.warnings
        assert warning.endswith("c1: 50% of prompt tokens came from its cache, although no prompt was sent before")
        assert result.runs[0].hit_rate == 0.5
        result = bench(server, tmp_path, "--concurrency", "1", "--output", "2", "--prompts", "same", "--repeat", "2")
        assert "every run sends the same prompts" in result.warnings[0]
        assert result.workload.prompts == "same"
        sent = [body["prompt"] for body in server.behaviour.seen[-4:]]
        assert sent[:2] == sent[2:]
        prefix = ("--workload", "prefix", "--prefix-length", "100", "--input", "100")
        assert bench(server, tmp_path, *prefix, "--concurrency", "1", "--output", "2").warnings == ()
    assert "although no prompt was sent before" in capsys.readouterr().out.replace("\n", " ")


def test_two_servers_in_turns(tmp_path: Path) -> None:
    with MockServer(Behaviour(gap=0.01)) as fast, MockServer(Behaviour(gap=0.03)) as slow:
        flags = ("--against", slow.url, "--name", "fast", "--name", "slow", "--concurrency", "2", "--repeat", "2")
        result = bench(fast, tmp_path, *flags, "--requests", "4", "--output", "8")
        assert [(run.server, run.repeat) for run in result.runs] == [("fast", 0), ("slow", 0), ("slow", 1), ("fast", 1)]
        assert [body["prompt"] for body in fast.behaviour.seen[:4]] == [b["prompt"] for b in slow.behaviour.seen[:4]]
    first, second = summaries(result)
    assert (first.ratio, first.ratio_low, first.ratio_high) == (1, 1, 1)
    assert second.ratio_low <= second.ratio <= second.ratio_high
    assert second.ratio > 1


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


def test_sharegpt_and_traces(tmp_path: Path) -> None:
    talk = [
        {"conversations": [{"from": "human", "value": f"Question {i}?"}, {"from": "gpt", "value": "x" * 40}]}
        for i in range(5)
    ]
    (tmp_path / "talk.json").write_text(json.dumps(talk))
    lines = [{"timestamp": 100 * i, "input_length": 10 + i, "output_length": 3} for i in range(4)]
    lines.append({"timestamp": 50, "prompt": "As it is", "output_length": 2})
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with MockServer(Behaviour()) as server:
        bench(
            server,
            tmp_path,
            "--workload",
            "sharegpt",
            "--file",
            str(tmp_path / "talk.json"),
            "--concurrency",
            "2",
            "--requests",
            "5",
        )
        assert sorted(body["prompt"] for body in server.behaviour.seen) == [f"Question {i}?" for i in range(5)]
        assert {body["max_tokens"] for body in server.behaviour.seen} == {10}
        result = bench(
            server, tmp_path, "--workload", "trace", "--file", str(tmp_path / "trace.jsonl"), "--requests", "5"
        )
    (run,) = result.runs
    assert run.level == "trace"
    assert [
        round(request.began, 1) for request in sorted(run.requests, key=lambda request: request.began)
    ] == pytest.approx([0, 0.1, 0.1, 0.2, 0.3], abs=0.06)
    assert server.behaviour.seen[6]["prompt"] == "As it is"


def test_the_highest_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server of one slot that takes 50 ms an answer: 20 a second at most, fewer if they come at random."""
    with MockServer(Behaviour(first_delay=0.05, slots=1)) as server:
        flags = (
            "--find-rate",
            "--rate",
            "2",
            "--ttft-limit",
            "0.2",
            "--requests",
            "20",
            "--output",
            "2",
            "--seed",
            "3",
        )
        result = bench(server, tmp_path, *flags)
    found = float(capsys.readouterr().out.split(" requests a second keep the limits")[0].split()[-1])
    assert 4 < found < 30
    assert {run.level for run in result.runs} >= {"r2", "r4", "r8"}


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
    assert complaint in capsys.readouterr().err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", "http://127.0.0.1:1"]) == 2
    assert "http://127.0.0.1:1 does not answer" in capsys.readouterr().err


def test_lengths() -> None:
    workload = RandomWorkload(Maker("ids", 2000), Length(3, 9), Length(2, 2))
    sessions = list(workload.sessions(300, random.Random(0)))
    lengths = {len(session.turns[0].content) for session in sessions}
    assert lengths == set(range(3, 10))
    assert all(1000 <= token < 2000 for session in sessions for token in session.turns[0].content)
