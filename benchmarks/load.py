"""What starting costs: each part of loading the default model, and a decode step and a prefill of it by size.

    python benchmarks/load.py

Appends to results/load.csv and results/steps.csv.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

from record import append

T = TypeVar("T")
CONTEXT = 192
BATCHES = (1, 4, 16, 64)
CHUNKS = (16, 128, 256)
REPEAT = 10


def main() -> None:
    parts: dict[str, float] = {}

    def timed(name: str, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = work()
        parts[name] = time.perf_counter() - began
        return result

    timed("import torch", lambda: __import__("torch"))
    from rich.console import Console

    from surefoot.checkpoint.gguf import GGUFFile
    from surefoot.config import settings
    from surefoot.config.planning import plan_engine
    from surefoot.frontend.tokenizer import load_tokenizer
    from surefoot.quant.gguf import dequantize
    from surefoot.runner.model_runner import ModelRunner

    for weight_dtype in ("float16", "float32"):
        plan = plan_engine(settings.load({"weight_dtype": weight_dtype, "max_running_requests": 64}), Console())
        file = timed("open GGUF", lambda path=plan.checkpoint.path: GGUFFile.open(path))
        timed("tokenizer", lambda ref=plan.checkpoint: load_tokenizer(ref))
        tensors = file.tensors.items()
        timed("dequantise", lambda f=file, ts=tensors: [dequantize(f.raw(n), t.type, t.shape) for n, t in ts])
        runner = timed(f"model runner {weight_dtype}", lambda plan=plan: ModelRunner(plan, lambda done, total: None))
        append("steps.csv", [{"weight_dtype": weight_dtype, **row} for row in step_times(runner)], "torch")
    append("load.csv", [{"part": name, "seconds": f"{seconds:.2f}"} for name, seconds in parts.items()], "torch")


def step_times(runner: Any) -> list[dict[str, Any]]:
    """Medians of decode steps of CONTEXT tokens, greedy and drawing, and of one whole prefill chunk."""
    from surefoot.protocol.messages import Sampling
    from surefoot.protocol.step_plan import Admission, PrefillRow, StepPlan

    pages_each = CONTEXT // 16 + 1
    rows = []
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, top_k=0, top_p=1, min_p=0, seed=0)
        for slot in range(max(BATCHES)):
            pages = tuple(range(slot * pages_each, (slot + 1) * pages_each))
            prompt = tuple(range(1000, 1000 + CONTEXT))
            row = PrefillRow(slot, slot, 0, prompt, 0, pages, samples=True)
            runner.run(StepPlan(0, (Admission(slot, slot, sampling, (), 0),), (), (), (), (row,)))
        for batch in BATCHES:
            plan = StepPlan(0, (), (), tuple(range(batch)), (CONTEXT,) * batch, ())
            sampler = "greedy" if temperature == 0 else "plain"
            rows.append({"step": f"decode {batch} x {CONTEXT} {sampler}", **median(runner, plan, batch)})
    for chunk in CHUNKS:
        row = PrefillRow(0, 0, 0, tuple(range(1000, 1000 + chunk)), 0, tuple(range(chunk // 16)), samples=True)
        rows.append({"step": f"prefill {chunk}", **median(runner, StepPlan(0, (), (), (), (), (row,)), chunk)})
    return rows


def median(runner: Any, plan: Any, tokens: int) -> dict[str, str]:
    times = []
    for _ in range(REPEAT + 2):
        began = time.perf_counter()
        runner.run(plan)
        times.append(time.perf_counter() - began)
    seconds = statistics.median(times[2:])
    return {"ms": f"{1000 * seconds:.1f}", "tok_s": f"{tokens / seconds:.0f}"}


if __name__ == "__main__":
    main()
