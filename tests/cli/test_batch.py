"""`surefoot generate`: prompts, and batches that answer every line, whatever is in it, and can be resumed."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from surefoot import LLM, cli
from surefoot.commands import batch
from surefoot.commands.in_process_server import InProcessServer
from surefoot.config.resolve import server_plan
from surefoot.config.settings import Settings
from surefoot.protocol.step_plan import StepPlan
from tests.cli.terminal import surefoot
from tests.tiny import TinyLlama

Json = dict[str, Any]

CHAT = [{"role": "user", "content": "the lazy dog"}]
PROMPT = [30, 31, 32]
FLAGS = (
    "--weight-dtype=float32",
    "--max-running-requests=2",
    "--max-queued-requests=1",
    "--kv-cache-tokens=1024",
    "--threads=1",
)


def openai_line(custom_id: Any, url: str = "/v1/completions", method: str = "POST", **body: Any) -> Json:
    return {"custom_id": custom_id, "method": method, "url": url, "body": {"model": "m", **body}}


def write(path: Path, lines: Sequence[Json | str]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(tiny: TinyLlama, source: Path, target: Path, *flags: str) -> list[str]:
    return ["generate", f"--model={tiny.path}", "--served-model-name=m", *FLAGS, f"-i{source}", f"-o{target}", *flags]


def answers(tiny: TinyLlama, folder: Path, lines: Sequence[Json | str], *flags: str) -> list[Json]:
    source = write(folder / "in.jsonl", lines)
    assert cli.main(command(tiny, source, folder / "out.jsonl", *flags)) == 0
    return read(folder / "out.jsonl")


def test_each_line_has_its_answer_in_order(
    tiny_llama: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [[30 + k, 31, 32] for k in range(9)]
    lines = [
        {"id": f"line {k}", "prompt": prompt, "max_tokens": 9 - k, "ignore_eos": True}
        for k, prompt in enumerate(prompts)
    ]
    results = answers(tiny_llama, tmp_path, lines)
    with LLM(str(tiny_llama.path), weight_dtype="float32", kv_cache_tokens=1024, threads=1) as llm:
        expected = [llm.tokenizer.decode(tiny_llama.greedy(prompt, 9 - k)) for k, prompt in enumerate(prompts)]
    assert [result["text"] for result in results] == expected
    assert [(result["index"], result["id"]) for result in results] == [(k, f"line {k}") for k in range(9)]
    assert [result["usage"]["completion_tokens"] for result in results] == list(range(9, 0, -1))
    assert {result["finish_reason"] for result in results} == {"length"}
    assert "9 of 9 lines answered, 0 with an error; 45 tokens" in capsys.readouterr().err


def test_openai_lines_get_the_servers_bodies(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    chat, completion = answers(
        tiny_llama,
        tmp_path,
        [
            openai_line("a", "/v1/chat/completions", messages=CHAT, max_tokens=4, ignore_eos=True),
            openai_line("b", prompt=PROMPT, max_tokens=3, ignore_eos=True, temperature=0),
        ],
    )
    assert [line["custom_id"] for line in (chat, completion)] == ["a", "b"]
    assert all(line["error"] is None and line["response"]["status_code"] == 200 for line in (chat, completion))
    assert chat["response"]["body"]["object"] == "chat.completion"
    assert chat["response"]["body"]["usage"]["completion_tokens"] == 4
    assert completion["response"]["body"]["object"] == "text_completion"
    assert len({line["id"] for line in (chat, completion)} | {chat["response"]["request_id"]}) == 3


def test_a_wrong_line_gets_its_error_and_the_others_go_on(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    lines: list[Json | str] = [
        "{not JSON",
        '{"x": ' + "[" * 20_000 + "]" * 20_000 + "}",
        '{"prompt": "a", "prompt": "b"}',
        '{"prompt": "half a character: \\ud800"}',
        "[1, 2]",
        {"id": 7, "prompt": PROMPT, "temperature": 5},
        {"prompt": PROMPT, "nonsense": 1},
        {"prompt": PROMPT, "messages": CHAT},
        {"prompt": PROMPT, "stream": True},
        "   ",
        {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True},
    ]
    *wrong, right = answers(tiny_llama, tmp_path, lines)
    assert [line["index"] for line in (*wrong, right)] == list(range(10))  # the blank line is none
    assert {line["status_code"] for line in wrong} == {400}
    messages = [line["error"]["message"] for line in wrong]
    says = (
        "this line is not valid JSON: Expecting property name",
        "nested more than 64 deep",
        "'prompt' stands twice",
        "this line is not valid JSON",
        "not a JSON object",
        "temperature is 5",
        "unknown parameter: nonsense",
        "either",
        "stream",
    )
    assert all(word in message for word, message in zip(says, messages, strict=True))
    assert (wrong[5]["id"], wrong[5]["error"]["param"]) == (7, "temperature")
    assert right["usage"]["completion_tokens"] == 2


def test_a_wrong_openai_line_gets_a_response_with_status_400(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    lines = [
        openai_line("a", method="GET", prompt=PROMPT),
        openai_line("b", url="/v1/embeddings", input="x"),
        openai_line(3, prompt=PROMPT),
        {"custom_id": "d", "method": "POST", "url": "/v1/completions"},
        openai_line("e", prompt=PROMPT, top_p=7),
        openai_line("f", prompt=PROMPT) | {"priority": 1},
    ]
    results = answers(tiny_llama, tmp_path, lines)
    assert [result["custom_id"] for result in results] == ["a", "b", 3, "d", "e", "f"]
    assert {result["response"]["status_code"] for result in results} == {400}
    messages = [result["response"]["body"]["error"]["message"] for result in results]
    says = ("method is 'GET'", "url is '/v1/embeddings'", "custom_id is 3", "body must be", "top_p", "unknown field")
    assert all(word in message for word, message in zip(says, messages, strict=True))


def test_flags_fill_in_what_a_line_leaves_out(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    lines = [
        {"prompt": PROMPT, "ignore_eos": True},
        {"prompt": PROMPT, "ignore_eos": True, "max_tokens": 3},
        openai_line("a", prompt=PROMPT, ignore_eos=True),
        {"messages": CHAT, "ignore_eos": True, "max_completion_tokens": 4},
    ]
    results = answers(tiny_llama, tmp_path, lines[:3], "--max-tokens=5")
    usages = [result.get("response", {"body": result})["body"]["usage"] for result in results]
    assert [usage["completion_tokens"] for usage in usages] == [5, 3, 5]
    (tmp_path / "out.jsonl").unlink()
    assert answers(tiny_llama, tmp_path, lines[3:])[0]["usage"]["completion_tokens"] == 4


def test_max_tokens_gives_way_to_its_newer_name(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    body = {"messages": CHAT, "ignore_eos": True, "max_completion_tokens": 4}
    lines = [body, openai_line("a", "/v1/chat/completions", **body)]
    short, openai = answers(tiny_llama, tmp_path, lines, "--max-tokens=5")
    assert short["usage"]["completion_tokens"] == openai["response"]["body"]["usage"]["completion_tokens"] == 4


def test_lines_of_more_sequences_than_free_places_wait_for_them(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    lines = [{"prompt": [PROMPT, [40, 41]], "max_tokens": 3, "ignore_eos": True}] * 6
    results = answers(tiny_llama, tmp_path, lines)
    assert [len(result["choices"]) for result in results] == [2] * 6
    assert len({json.dumps(result["choices"]) for result in results}) == 1


def test_a_batch_goes_on_where_it_was_killed(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    lines = [{"id": k, "prompt": [30 + k, 31], "max_tokens": 2 + k, "ignore_eos": True} for k in range(8)]
    whole = answers(tiny_llama, tmp_path, lines)
    target = tmp_path / "out.jsonl"
    data = target.read_bytes()
    for size in (0, 10, len(data) // 2, len(data)):
        target.write_bytes(data[:size])
        assert cli.main(command(tiny_llama, tmp_path / "in.jsonl", target, "--resume")) == 0
        assert read(target) == whole


def test_answers_to_something_else_are_not_touched(
    tiny_llama: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(tiny_llama, tmp_path, [{"id": "a", "prompt": PROMPT}, {"id": "b", "prompt": PROMPT}], "--max-tokens=1")
    target = tmp_path / "out.jsonl"
    kept = target.read_bytes()
    for lines, flag, says in (
        ([{"id": "a", "prompt": PROMPT}, {"id": "c", "prompt": PROMPT}], "--resume", "line 2 of"),
        ([{"id": "a", "prompt": PROMPT}], "--resume", "has 2 answers, and the input only 1 line:"),
        ([{"id": "a", "prompt": PROMPT}], "--seed=1", "has answers already: go on with --resume"),
    ):
        source = write(tmp_path / "other.jsonl", lines)
        assert cli.main(command(tiny_llama, source, target, flag)) == 2
        assert says in " ".join(capsys.readouterr().err.split())
        assert target.read_bytes() == kept


@pytest.mark.parametrize(
    "request_line",
    [{"id": "a", "prompt": PROMPT}, openai_line("a", prompt=PROMPT)],
    ids=["short", "openai"],
)
def test_only_the_beginning_of_an_answer_is_dropped(
    tiny_llama: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str], request_line: Json
) -> None:
    line = batch.parse(json.dumps(request_line).encode(), 0, {}, {})
    whole = json.dumps(answers(tiny_llama, tmp_path, [request_line])[0], separators=(",", ":")).encode()
    other = whole.replace(b'"a"', b'"b"', 1)
    for size in range(1, len(whole)):
        assert line.may_begin(whole[:size])
    for text in (b"garbage", b" ", b"{}", b'{"x', b'{"index":01', other):
        assert not line.may_begin(text)

    target = tmp_path / "out.jsonl"
    for kept in (b"garbage", other, whole + b"\n" + whole[:9]):
        target.write_bytes(kept)
        assert cli.main(command(tiny_llama, tmp_path / "in.jsonl", target, "--resume")) == 2
        assert "no answer to the input that was cut short" in " ".join(capsys.readouterr().err.split())
        assert target.read_bytes() == kept


@pytest.mark.parametrize("flags", [(), ("--resume",)], ids=["new", "resumed"])
def test_the_input_is_no_output(
    tiny_llama: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: Sequence[str]
) -> None:
    source = tmp_path / "one.jsonl"
    source.write_text(json.dumps({"prompt": PROMPT}))
    link = tmp_path / "link.jsonl"
    link.symlink_to(source)
    kept = source.read_bytes()
    for target in (source, link):
        assert cli.main(command(tiny_llama, source, target, *flags)) == 2
        assert "is the input too: give another --output" in " ".join(capsys.readouterr().err.split())
    with source.open("rb") as stdin:
        run = [sys.executable, "-m", "surefoot", *command(tiny_llama, Path("-"), source, *flags)]
        ended = subprocess.run(run, stdin=stdin, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "is the input too" in ended.stderr
    assert source.read_bytes() == kept


def test_two_runs_do_not_write_one_file(
    tiny_llama: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = write(tmp_path / "in.jsonl", [{"prompt": PROMPT, "max_tokens": 1}]), tmp_path / "out.jsonl"
    with target.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for flags in ((), ("--resume",)):
            assert cli.main(command(tiny_llama, source, target, *flags)) == 2
            assert f"another run writes {target}" in " ".join(capsys.readouterr().err.split())
    assert cli.main(command(tiny_llama, source, target)) == 0


def test_an_interrupted_batch_keeps_what_it_has(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    lines = [{"prompt": [30, 31], "max_tokens": 400, "ignore_eos": True}] * 500
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "surefoot", *command(tiny_llama, source, target)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (target.exists() and target.read_bytes().count(b"\n") >= 2):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    done = read(target)
    assert 2 <= len(done) < 500
    assert f"stopped early: {len(done)} of 500 lines answered" in stderr
    assert "Traceback" not in stderr


def test_an_engine_that_raises_ends_the_run(tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(model=str(tiny_llama.path), weight_dtype="float32", kv_cache_tokens=1024, threads=1)

    def broken(self: Any) -> StepPlan:
        raise RuntimeError("the scheduler is broken")

    with LLM(settings) as llm:
        name = llm.plan.served_model_name

        async def post() -> None:
            async with InProcessServer(llm, server_plan(settings, llm.plan)) as server:
                await server.post("/v1/completions", msgspec.json.encode({"model": name, "prompt": PROMPT}))

        monkeypatch.setattr("surefoot.scheduler.scheduler.Scheduler.plan", broken)
        with pytest.raises(RuntimeError, match="the scheduler is broken"):
            asyncio.run(asyncio.wait_for(post(), 20))


@pytest.mark.parametrize("output", [(), ("-o/dev/stdout",)], ids=["stdout", "a pipe by name"])
def test_batches_read_stdin_and_write_stdout(tiny_llama: TinyLlama, output: Sequence[str]) -> None:
    line = json.dumps({"prompt": PROMPT, "max_tokens": 1, "ignore_eos": True})
    ended = surefoot("generate", str(tiny_llama.path), "-i-", *output, *FLAGS, stdin=line + "\n\n")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["usage"]["completion_tokens"] == 1
    assert "1 of 1 line answered, 0 with an error; 1 token in" in ended.stderr


def test_a_byte_order_mark_is_no_part_of_the_first_line(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": PROMPT, "max_tokens": 1}) + "\n", encoding="utf-8-sig")
    assert cli.main(command(tiny_llama, source, tmp_path / "out.jsonl")) == 0
    assert "usage" in read(tmp_path / "out.jsonl")[0]

    ended = surefoot("generate", str(tiny_llama.path), *FLAGS, "--max-tokens=1", stdin="\ufeffthe quick\n")
    assert ended.stdout.startswith("the quick")


@pytest.mark.parametrize(
    "flags, says",
    [
        (["-o", "x"], "--output is for batches"),
        (["--resume"], "--resume is for batches"),
        (["-i", "in.jsonl", "prompt"], "give one of them"),
        (["-i", "/nowhere.jsonl"], "there is no file /nowhere.jsonl: give"),
        (["-i", "/nowhere/in.jsonl"], "there is no directory /nowhere for in.jsonl: make it"),
        (["-i", "/tmp"], "/tmp is a directory: give a file"),
        (["-i", "~nobody-here/x"], "~nobody-here/x begins with a user who is not known here"),
        (["-i", "in.jsonl", "-o", "/tmp"], "/tmp is a directory: give a file"),
        (["-i", "in.jsonl", "-o", "/nowhere/x"], "there is no directory /nowhere for x: make it"),
        (["-i", "in.jsonl", "-o", "/dev/null", "--resume"], "--resume goes on in a file, and /dev/null is none"),
        (["-i", "/dev/null"], "has no lines"),
        (["x", "--temperature", "9"], "temperature is 9.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_makes_no_sense_is_said(
    tiny_llama: TinyLlama,
    flags: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", [{"prompt": PROMPT}])
    assert cli.main(["generate", f"--model={tiny_llama.path}", *flags]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_model_without_a_prompt_is_named(tiny_llama: TinyLlama) -> None:
    ended = surefoot("generate", "and/or")
    assert ended.returncode == 2
    assert "there is no prompt (and/or was taken as the model" in ended.stderr


def test_prompts_are_arguments_or_lines(tiny_llama: TinyLlama) -> None:
    flags = (*FLAGS, "--max-tokens", "4")
    given = surefoot("generate", str(tiny_llama.path), "the quick", *flags, "the lazy")
    piped = surefoot("generate", str(tiny_llama.path), *flags, stdin="the quick\n\nthe lazy\n")
    assert given.returncode == piped.returncode == 0, given.stderr + piped.stderr
    assert given.stdout == piped.stdout
    assert given.stdout.startswith("the quick")
    assert "the lazy" in given.stdout


def test_an_engine_that_fails_is_an_error_and_no_traceback(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: Any, plan: StepPlan) -> None:
        raise ValueError("this step is broken")

    monkeypatch.setattr("surefoot.runner.model_runner.ModelRunner.run", broken)
    assert cli.main(["generate", f"--model={tiny_llama.path}", "x", *FLAGS]) == 1
    assert "error: 1 requests failed; the first: ValueError: this step is broken" in capsys.readouterr().err
