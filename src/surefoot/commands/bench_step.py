"""`surefoot bench step`: one step's time by kind and size, beside its floor on this machine.

The floor is the larger of two times: of reading what must be read, at the bandwidth with which this machine reads as
much as the weights are; and of computing what must be computed, at the rate of torch's fp32 products here. Both are
measured between the steps, and the best counts. A kernel on a unit that is faster than fp32 vectors can be below the
second one.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from msgspec.structs import asdict, replace
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from surefoot.checkpoint.gguf import GGUFFile
from surefoot.commands.flags import Arguments
from surefoot.config.engine_plan import EnginePlan
from surefoot.config.paths import ExecutionPath, LogprobsKind, PrefixRegime, SamplerKind, StepKind
from surefoot.config.planning import NATIVE_BLOCK_BYTES, plan_engine
from surefoot.config.resolve import weight_bytes
from surefoot.config.settings import Settings
from surefoot.protocol.messages import GREEDY, NO_LOGPROBS, Sampling
from surefoot.protocol.step_plan import NO_COUNT_ROW, Admission, PageRun, PrefillRow, StepPlan
from surefoot.runner.model_runner import ModelRunner

DECODE_ROWS = (1, 4, 16, 64)
CHUNKS = (16, 64, 256)
WARM_UPS = 2
PROBES = 3  # of the machine, between any two steps
LARGEST_BUFFER = 1 << 30  # bytes: no cache holds as much, and more reads no faster or slower
DRAWING = replace(GREEDY, temperature=1.0)


class Machine(Struct, frozen=True):
    """Measured on the spot, with the plan's number of threads."""

    bytes_per_second: float  # reading a buffer of the weights' size, if that is below LARGEST_BUFFER
    flops_per_second: float  # of fp32 matrix products

    def better(self, other: Machine) -> Machine:
        """The best of two measurements."""
        return Machine(
            max(self.bytes_per_second, other.bytes_per_second), max(self.flops_per_second, other.flops_per_second)
        )


class Step(Struct, frozen=True):
    what: str
    path: str  # as it was executed
    tokens: int
    seconds: float  # median
    fastest: float
    slow: float  # nine of ten are no slower
    model_seconds: float  # without sampling: median
    bytes_read: int  # at least: weights, and keys and values that some token sees
    flops: int  # at least: of matrix products and attention

    def floor(self, machine: Machine) -> tuple[float, str]:
        """Seconds, and what binds."""
        reading, computing = self.bytes_read / machine.bytes_per_second, self.flops / machine.flops_per_second
        return (reading, "bytes") if reading >= computing else (computing, "FLOPs")

    def record(self, machine: Machine) -> dict[str, Any]:
        """Everything about the step, for programs."""
        floor, binds = self.floor(machine)
        return {**asdict(self), "floor": floor, "binds": binds, "share": floor / self.seconds}


def run(settings: Settings, arguments: Arguments, console: Console) -> int:
    """Raises ValueError if the plan has no room for the smallest step."""
    context, repeat = arguments["context"], arguments["repeat"]
    for flag, value in (("--context", context), ("--repeat", repeat)):
        if value < 1:
            raise ValueError(f"{flag} {value}: it must be at least 1")
    plan = plan_engine(settings, console)
    rows = _fitting_rows(plan, context)
    console.print("loading the model")
    runner = ModelRunner(plan, lambda done, total: None)
    machine = measure_machine(plan)
    steps = []
    for step in _Bench(plan, runner, context, repeat).steps(rows):
        if console.is_terminal:
            console.print(f"{step.what:40}", end="\r")
        steps.append(step)
        machine = machine.better(measure_machine(plan))  # others may use the machine too, now more and now less
    _print(plan, context, machine, steps)
    if left_out := [count for count in DECODE_ROWS if count not in rows]:
        console.print(f"no room for {' or '.join(map(str, left_out))} rows: --max-running-requests, --kv-cache-tokens")
    records = [step.record(machine) for step in steps]
    if arguments["csv"]:
        with Path(arguments["csv"]).open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(records[0]))
            writer.writeheader()
            writer.writerows(records)
        console.print(f"written: {arguments['csv']}")
    if arguments["json"]:
        content = {"plan": plan, "machine": machine, "context": context, "steps": records}
        Path(arguments["json"]).write_bytes(msgspec.json.format(msgspec.json.encode(content)))
        console.print(f"written: {arguments['json']}")
    return 0


def measure_machine(plan: EnginePlan) -> Machine:
    threads = torch.get_num_threads()
    torch.set_num_threads(plan.num_threads)
    buffer = torch.ones(min(max(plan.weight_bytes, 1 << 20), LARGEST_BUFFER) // 4)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    reading = min(_timed(buffer.sum) for _ in range(PROBES))
    computing = min(_timed(lambda: a @ b) for _ in range(PROBES))
    torch.set_num_threads(threads)
    return Machine(buffer.numel() * 4 / reading, 2 * 1024**3 / computing)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _held(plan: EnginePlan, context: int) -> tuple[int, ...]:
    """Pages of each KV group that a row of the bench holds: of `context` tokens and one more."""
    return tuple(plan.bounds.most_pages(group, context + 1) for group in plan.bounds.kv_groups)


def _fitting_rows(plan: EnginePlan, context: int) -> list[int]:
    bounds, held = plan.bounds, _held(plan, context)
    if context + 1 > bounds.max_model_len:
        raise ValueError(
            f"--context {context} does not fit: with the token that follows, a request may have "
            f"{bounds.max_model_len}: lower it, or raise --max-model-len"
        )
    most = min(group.num_pages // pages for group, pages in zip(bounds.kv_groups, held, strict=True))
    return [count for count in DECODE_ROWS if count <= min(most, bounds.max_running_requests)]


def step_weight_bytes(plan: EnginePlan) -> int:
    """Bytes of weights that each step reads: all but an embedding that is held besides the head, of which a step reads
    only its tokens' rows."""
    if plan.weight_dtype != "stored":
        return weight_bytes(replace(plan.model, tied_embeddings=True), plan.weight_dtype, "dense", 0)
    if plan.model.tied_embeddings:
        return plan.weight_bytes
    embedding = GGUFFile.open(Path(plan.checkpoint.path)).tensors["token_embd.weight"]
    elements = math.prod(embedding.shape)
    if embedding.type in NATIVE_BLOCK_BYTES:
        blocks = elements // embedding.type.block_elements
        return plan.weight_bytes - blocks * NATIVE_BLOCK_BYTES[embedding.type]
    return plan.weight_bytes - 2 * elements  # float16


def _seen(start: int, count: int, window: int) -> tuple[int, int]:
    """Of `count` tokens after `start` others: places that some of them sees, and pairs of a token and a place."""
    end = start + count
    if not window:
        return end, sum(range(start + 1, end + 1))
    return min(end, window + count - 1), sum(min(place, window) for place in range(start + 1, end + 1))


class _Bench:
    """Steps of requests with a context each. A slot's pages of a KV group are its own, as many as a request holds at
    once; past a window they are used anew, as those of a request are."""

    def __init__(self, plan: EnginePlan, runner: ModelRunner, context: int, repeat: int) -> None:
        self._plan, self._runner, self._context, self._repeat = plan, runner, context, repeat
        self._held = _held(plan, context)
        self._weight_bytes = step_weight_bytes(plan)

    def steps(self, row_counts: Sequence[int]) -> Iterator[Step]:
        most, context = max(row_counts), self._context
        self._fill(most)
        for sampler, sampling in ((SamplerKind.GREEDY, GREEDY), (SamplerKind.PLAIN, DRAWING)):
            self._admit(most, sampling)
            name = "greedy" if sampling is GREEDY else "drawing"
            for rows in row_counts:
                yield self._measure(f"decode {rows}, {name}", range(rows), (), sampler)
        self._admit(most, GREEDY)
        chunks = [chunk for chunk in CHUNKS if chunk <= min(self._plan.bounds.chunked_prefill_size, context)]
        for chunk in chunks:
            for start in dict.fromkeys((0, context - chunk)):
                yield self._measure(f"prefill {_chunk_name(chunk, start)}", (), (self._row(0, start, chunk),))
        if len(row_counts) > 1:
            slots = range(1, row_counts[-2] + 1)
            # The longest chunk, and the longest that a prefix is left for.
            cases = [(chunk, 0) for chunk in chunks[-1:]]
            cases += [(chunk, context - chunk) for chunk in chunks if chunk < context][-1:]
            for chunk, start in cases:
                what = f"mixed {len(slots)} + {_chunk_name(chunk, start)}"
                yield self._measure(what, slots, (self._row(0, start, chunk),))

    def _measure(
        self, what: str, slots: Sequence[int], rows: tuple[PrefillRow, ...], sampler: SamplerKind = SamplerKind.GREEDY
    ) -> Step:
        plan = self._step(tuple(slots), rows)
        expected = self._path(plan, sampler)
        seconds, model_seconds = [], []
        for _ in range(WARM_UPS + self._repeat):
            began = time.perf_counter()
            done = self._runner.run(plan)
            seconds.append(time.perf_counter() - began)
            model_seconds.append(_timed(lambda: self._runner.forward(plan)))
            if done.path != expected:
                raise RuntimeError(f"{what}: the step took path {done.path}, and {expected} was to be measured")
        seconds = sorted(seconds[WARM_UPS:])
        spans = [(self._context, 1)] * len(slots) + [(row.start, len(row.token_ids)) for row in rows]
        bytes_read, flops = self._work(spans)
        return Step(
            what=what,
            path=expected,
            tokens=sum(count for _, count in spans),
            seconds=statistics.median(seconds),
            fastest=seconds[0],
            slow=seconds[math.ceil(0.9 * len(seconds)) - 1],
            model_seconds=statistics.median(model_seconds[WARM_UPS:]),
            bytes_read=bytes_read,
            flops=flops,
        )

    def _path(self, plan: StepPlan, sampler: SamplerKind) -> str:
        kind = StepKind.MIXED if plan.decode_slots else StepKind.PREFILL
        kind = kind if plan.prefill else StepKind.DECODE
        prefix = PrefixRegime.SOME if any(row.start for row in plan.prefill) else PrefixRegime.NONE
        kernels = self._plan.attention_backend, self._plan.linear_kernel
        return ExecutionPath(kind, prefix, *kernels, sampler, LogprobsKind.NONE).key

    def _work(self, spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Bytes to read and FLOPs to compute, for rows of (tokens before, tokens to compute), each of which samples."""
        model = self._plan.model
        head = model.vocab_size * model.hidden_size
        tokens = sum(count for _, count in spans)
        bytes_read = self._weight_bytes
        flops = 2 * (tokens * model.num_linear_weights + len(spans) * head)
        for group, kind in enumerate(model.layer_kinds):
            places, pairs = map(sum, zip(*(_seen(start, count, kind.window) for start, count in spans), strict=True))
            bytes_read += places * self._plan.kv_layout.bytes_per_token[group]
            flops += 4 * model.q_size * model.layers.count(group) * pairs  # query times key, weight times value
        return bytes_read, flops

    def _fill(self, rows: int) -> None:
        """Gives each of the first slots a context of some tokens, and the place of the one that decode steps add."""
        chunk, end = self._plan.bounds.chunked_prefill_size, self._context + 1
        for slot in range(rows):
            for start, stop in pairwise((*range(0, end, chunk), end)):
                admissions = (self._admission(slot, GREEDY),) if start == 0 else ()
                self._runner.run(self._step((), (self._row(slot, start, stop - start),), admissions))

    def _admit(self, rows: int, sampling: Sampling) -> None:
        """The first slots get new owners with the same contexts."""
        for slot in range(rows):
            row = self._row(slot, self._context, 1)
            self._runner.run(self._step((), (row,), (self._admission(slot, sampling),)))

    def _admission(self, slot: int, sampling: Sampling) -> Admission:
        return Admission(slot, slot, sampling, (), 0, NO_LOGPROBS, NO_LOGPROBS, NO_COUNT_ROW, self._context, ())

    def _step(
        self, slots: tuple[int, ...], rows: tuple[PrefillRow, ...], admissions: tuple[Admission, ...] = ()
    ) -> StepPlan:
        return StepPlan(0, admissions, (), slots, (self._context,) * len(slots), rows)

    def _row(self, slot: int, start: int, count: int) -> PrefillRow:
        page_size = self._plan.bounds.page_size
        first = -(-start // page_size)  # an earlier chunk has brought the page that it ended within
        columns = range(first, -(-(start + count) // page_size))
        runs = [
            PageRun(group, first, tuple(slot * held + column % held for column in columns))
            for group, held in enumerate(self._held)
        ]
        tokens = tuple(1 + (7 * (start + i) + slot) % (self._plan.model.vocab_size - 1) for i in range(count))
        return PrefillRow(slot, slot, start, tokens, tuple(runs) if columns else (), samples=True, targets=())


def _chunk_name(chunk: int, start: int) -> str:
    return f"{chunk} after {start}" if start else str(chunk)


def _milliseconds(seconds: float) -> str:
    """With three digits, or all that are before the point."""
    milliseconds = 1000 * seconds
    return f"{milliseconds:.{2 if milliseconds < 10 else 1 if milliseconds < 100 else 0}f}"


def _print(plan: EnginePlan, context: int, machine: Machine, steps: Sequence[Step]) -> None:
    out = Console(file=sys.stdout, highlight=False)
    gigabytes, gigaflops = machine.bytes_per_second / 1e9, machine.flops_per_second / 1e9
    out.print(f"attention {plan.attention_backend}, products {plan.linear_kernel}, weights {plan.weight_dtype}")
    out.print(f"{plan.num_threads} threads read {gigabytes:.1f} GB/s and compute {gigaflops:.0f} GFLOP/s in fp32")
    out.print(f"a step reads {step_weight_bytes(plan) / 1e6:.1f} MB of weights; decode rows have {context} tokens")
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("step", no_wrap=True)
    for column in ("ms", "min", "p90", "model", "tok/s", "floor", "binds", "share"):
        table.add_column(column, justify="right", no_wrap=True)
    for step in steps:
        floor, binds = step.floor(machine)
        times = (step.seconds, step.fastest, step.slow, step.model_seconds)
        table.add_row(
            step.what,
            *map(_milliseconds, times),
            f"{step.tokens / step.seconds:.0f}",
            _milliseconds(floor),
            binds,
            f"{floor / step.seconds:.0%}",
        )
    out.print(table)
    if any(step.floor(machine)[0] > step.seconds for step in steps):
        out.print(
            "above 100 %: a unit of this CPU that is faster than fp32 vectors, or other programs ran", soft_wrap=True
        )
