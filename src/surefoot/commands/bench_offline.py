"""`surefoot bench offline`: the engine without HTTP."""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from surefoot.bench.workloads import Maker, PrefixWorkload, RandomWorkload, Session
from surefoot.commands.flags import Arguments
from surefoot.config.settings import Settings
from surefoot.frontend.sampling_params import SamplingParams
from surefoot.llm import LLM


class OfflineRun(Struct, frozen=True):
    """One batch of requests from its first step to its last."""

    seconds: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int  # of those, what came from the prefix cache
    preemptions: int

    @property
    def output_rate(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_rate(self) -> float:
        return (self.output_tokens + self.prompt_tokens) / self.seconds


def run(settings: Settings, arguments: Arguments, console: Console) -> int:
    """All prompts are random token ids, and no two runs share one. Raises ValueError for a setting that is wrong."""
    seed = random.SystemRandom().randrange(2**31) if arguments["bench_seed"] is None else arguments["bench_seed"]
    with LLM(settings) as llm:
        maker = Maker("ids", llm.plan.model.vocab_size)
        workload: RandomWorkload | PrefixWorkload = RandomWorkload(maker, arguments["input"], arguments["output"])
        if arguments["prefix_length"]:
            length = arguments["prefix_length"]
            workload = PrefixWorkload(maker, 1, length, arguments["input"], arguments["output"])
        runs = []
        for repeat in range(-1, arguments["repeat"]):  # the first one warms up
            sessions = list(workload.sessions(arguments["requests"], random.Random(f"{seed}/{repeat}")))
            console.print(f"run {repeat + 1} of {arguments['repeat']}" if repeat >= 0 else "warm-up")
            one = _run(llm, sessions if repeat >= 0 else sessions[:4])
            runs += [one] if repeat >= 0 else []
    _print(runs, f"{arguments['requests']} at once: {workload.describe()}; seed {seed}; no prompt is sent twice")
    if arguments["json"]:
        content = {"workload": workload.describe(), "seed": seed, "plan": llm.plan, "runs": runs}
        Path(arguments["json"]).write_bytes(msgspec.json.format(msgspec.json.encode(content)))
        console.print(f"written: {arguments['json']}")
    return 0


def _run(llm: LLM, sessions: list[Session]) -> OfflineRun:
    turns = [session.turns[0] for session in sessions]
    prompts = [tuple(map(int, turn.content)) for turn in turns]
    params = [SamplingParams(temperature=0, max_tokens=turn.output_tokens, ignore_eos=True) for turn in turns]
    before = llm.scheduler.stats()
    began = time.perf_counter()
    completions = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    return OfflineRun(
        seconds=seconds,
        output_tokens=sum(len(completion.token_ids) for completion in completions),
        prompt_tokens=sum(map(len, prompts)),
        cached_tokens=sum(completion.cached_tokens for completion in completions),
        preemptions=llm.scheduler.stats().preemptions - before.preemptions,
    )


def _print(runs: list[OfflineRun], what: str) -> None:
    out = Console(file=sys.stdout, highlight=False)
    out.print(what, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("run", "output tok/s", "with prompts", "seconds", "cached", "preemptions"):
        table.add_column(column, justify="right")
    for number, one in enumerate(runs, 1):
        share = one.cached_tokens / one.prompt_tokens
        rates = (f"{one.output_rate:.1f}", f"{one.total_rate:.1f}", f"{one.seconds:.2f}")
        table.add_row(str(number), *rates, f"{share:.0%}", str(one.preemptions))
    out.print(table)
    out.print(f"median: {statistics.median(one.output_rate for one in runs):.1f} output tok/s")
