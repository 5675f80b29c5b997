"""`surefoot bench step`: one step's time by kind and size, beside its floor on this machine.

The floor is the larger of two times: of reading what must be read, at the bandwidth with which this machine reads as
much; and of computing what must be computed, at the rate of torch's fp32 products here. A kernel on a unit that is
faster than fp32 vectors can be below the second one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from surefoot.commands.flags import Arguments
from surefoot.config.engine_plan import EnginePlan
from surefoot.config.planning import plan_engine
from surefoot.config.settings import Settings
from surefoot.protocol.messages import GREEDY, NO_LOGPROBS, Sampling
from surefoot.protocol.step_plan import NO_COUNT_ROW, Admission, PageRun, PrefillRow, StepPlan
from surefoot.runner.model_runner import ModelRunner

DECODE_ROWS = (1, 4, 16, 64)
CHUNKS = (16, 64, 256)
WARM_UPS = 2
DRAWING = msgspec.structs.replace(GREEDY, temperature=1.0)


class Machine(Struct, frozen=True):
    """Measured on the spot, with the plan's number of threads."""

    bytes_per_second: float  # reading a buffer of the weights' size
    flops_per_second: float  # of fp32 matrix products


class Step(Struct, frozen=True):
    what: str
    path: str  # as it was executed
    tokens: int
    seconds: float  # median
    fastest: float
    model_seconds: float  # without sampling: median
    bytes_read: int
    flops: int

    def floor(self, machine: Machine) -> tuple[float, str]:
        """Seconds, and what binds."""
        reading, computing = self.bytes_read / machine.bytes_per_second, self.flops / machine.flops_per_second
        return (reading, "reading") if reading >= computing else (computing, "computing")


def run(settings: Settings, arguments: Arguments, console: Console) -> int:
    """Raises ValueError if the plan has no room for the smallest step."""
    plan = plan_engine(settings, console)
    context, repeat = arguments["context"], arguments["repeat"]
    rows = [count for count in DECODE_ROWS if count <= plan.bounds.max_running_requests]
    if context + 1 > plan.bounds.max_model_len or rows[-1] * (context + 1) > plan.bounds.kv_tokens:
        raise ValueError(f"--context {context} does not fit: a request may have {plan.bounds.max_model_len} tokens")
    console.print("loading the model")
    runner = ModelRunner(plan, lambda done, total: None)
    console.print("measuring the machine")
    machine = measure_machine(plan)
    bench = _Bench(plan, runner, context, repeat)
    steps = []
    for step in bench.steps(rows):
        if console.is_terminal:
            console.print(f"{step.what:40}", end="\r")
        steps.append(step)
    _print(plan, machine, steps)
    if arguments["json"]:
        content = {"plan": plan, "machine": machine, "context": context, "steps": steps}
        Path(arguments["json"]).write_bytes(msgspec.json.format(msgspec.json.encode(content)))
        console.print(f"written: {arguments['json']}")
    return 0


def measure_machine(plan: EnginePlan) -> Machine:
    threads = torch.get_num_threads()
    torch.set_num_threads(plan.num_threads)
    buffer = torch.ones(max(plan.weight_bytes, 1 << 20) // 4)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    reading = min(_timed(buffer.sum) for _ in range(8))
    computing = min(_timed(lambda: a @ b) for _ in range(8))
    torch.set_num_threads(threads)
    return Machine(buffer.numel() * 4 / reading, 2 * 1024**3 / computing)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class _Bench:
    def __init__(self, plan: EnginePlan, runner: ModelRunner, context: int, repeat: int) -> None:
        self._plan, self._runner, self._context, self._repeat = plan, runner, context, repeat
        self._pages_each = -(-(context + 1) // plan.bounds.page_size)

    def steps(self, row_counts: list[int]) -> Iterator[Step]:
        for sampling, name in ((GREEDY, "greedy"), (DRAWING, "drawing")):
            self._fill(max(row_counts), sampling)
            for rows in row_counts:
                yield self._measure(f"decode {rows}, {name}", self._decode(rows))
        self._fill(max(row_counts), GREEDY)
        chunk_limit = min(self._plan.bounds.chunked_prefill_size, self._context)
        chunks = [chunk for chunk in CHUNKS if chunk <= chunk_limit]
        for chunk in chunks:
            plan = self._step((), (self._row(0, 0, chunk),))
            yield self._measure(f"prefill {chunk}", plan)
            if chunk < self._context:
                start = self._context - chunk
                plan = self._step((), (self._row(0, start, chunk),))
                yield self._measure(f"prefill {chunk} after {start}", plan)
        if len(row_counts) > 1 and chunks:
            rows, chunk = row_counts[-2], chunks[-1]
            plan = self._step(tuple(range(1, rows + 1)), (self._row(0, 0, chunk),))
            yield self._measure(f"decode {rows} with prefill {chunk}", plan)

    def _measure(self, what: str, plan: StepPlan) -> Step:
        chunks = [(row.start, len(row.token_ids)) for row in plan.prefill]
        tokens = len(plan.decode_slots) + sum(count for _, count in chunks)
        logits_rows = len(plan.decode_slots) + len(chunks)
        decoded = len(plan.decode_slots) * (self._context + 1)  # places that decode rows see
        kv_tokens = decoded + sum(start + count for start, count in chunks)
        pairs = decoded + sum(start * count + count * (count + 1) // 2 for start, count in chunks)
        path = ""
        seconds, model_seconds = [], []
        for _ in range(WARM_UPS + self._repeat):
            began = time.perf_counter()
            path = self._runner.run(plan).path
            seconds.append(time.perf_counter() - began)
            model_seconds.append(_timed(lambda: self._runner.forward(plan)))
        model = self._plan.model
        head = model.vocab_size * model.hidden_size
        products = 2 * (tokens * model.num_linear_weights + logits_rows * head)
        scores = 4 * model.num_heads * model.head_dim * model.num_layers
        return Step(
            what=what,
            path=path,
            tokens=tokens,
            seconds=statistics.median(seconds[WARM_UPS:]),
            fastest=min(seconds[WARM_UPS:]),
            model_seconds=statistics.median(model_seconds[WARM_UPS:]),
            bytes_read=self._plan.weight_bytes + kv_tokens * sum(self._plan.kv_layout.bytes_per_token),
            flops=products + scores * pairs,
        )

    def _fill(self, rows: int, sampling: Sampling) -> None:
        """Gives each of the first slots a context of random tokens."""
        chunk = self._plan.bounds.chunked_prefill_size
        for slot in range(rows):
            admission = Admission(
                slot, slot, sampling, (), 0, NO_LOGPROBS, NO_LOGPROBS, NO_COUNT_ROW, self._context, ()
            )
            for start in range(0, self._context, chunk):
                row = self._row(slot, start, min(chunk, self._context - start))
                self._runner.run(self._step((), (row,), (admission,) if start == 0 else ()))

    def _decode(self, rows: int) -> StepPlan:
        return self._step(tuple(range(rows)), ())

    def _step(
        self, slots: tuple[int, ...], rows: tuple[PrefillRow, ...], admissions: tuple[Admission, ...] = ()
    ) -> StepPlan:
        return StepPlan(0, admissions, (), slots, (self._context,) * len(slots), rows)

    def _row(self, slot: int, start: int, count: int) -> PrefillRow:
        pages = tuple(range(slot * self._pages_each, (slot + 1) * self._pages_each))
        runs = tuple(PageRun(group, 0, pages) for group in range(len(self._plan.bounds.kv_groups)))
        tokens = tuple(1 + (7 * (start + i) + slot) % (self._plan.model.vocab_size - 1) for i in range(count))
        return PrefillRow(slot, slot, start, tokens, runs, samples=True, targets=())


def _print(plan: EnginePlan, machine: Machine, steps: list[Step]) -> None:
    out = Console(file=sys.stdout, highlight=False)
    gigabytes, gigaflops = machine.bytes_per_second / 1e9, machine.flops_per_second / 1e9
    out.print(f"attention {plan.attention_backend}, products {plan.linear_kernel}, weights {plan.weight_dtype}")
    out.print(f"{plan.num_threads} threads read {gigabytes:.1f} GB/s and compute {gigaflops:.0f} GFLOP/s in fp32")
    out.print(f"weights are {plan.weight_bytes / 1e6:.1f} MB")
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("step", no_wrap=True)
    for column in ("ms", "fastest", "model", "tok/s", "floor", "binds", "share"):
        table.add_column(column, justify="right", no_wrap=True)
    for step in steps:
        floor, binds = step.floor(machine)
        table.add_row(
            step.what,
            f"{1000 * step.seconds:.2f}",
            f"{1000 * step.fastest:.2f}",
            f"{1000 * step.model_seconds:.2f}",
            f"{step.tokens / step.seconds:.0f}",
            f"{1000 * floor:.2f}",
            binds,
            f"{floor / step.seconds:.0%}",
        )
    out.print(table)
