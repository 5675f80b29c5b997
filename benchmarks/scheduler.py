"""How long the scheduler takes: `plan` and `commit` of pure decode steps, by number of rows.

    python benchmarks/scheduler.py

Every request decodes in its own pages of 16 tokens, with page edges spread evenly over the steps, and the step in
flight is committed before the next is planned. Prints two tables and appends them to results: scheduler.csv is of one
KV group without a window, scheduler_windows.csv of two groups, of which one has a window that slides all the time.
"""

from __future__ import annotations

import gc
from time import perf_counter

from record import append

from surefoot.config.bounds import Bounds, KVGroup, pages_for
from surefoot.protocol.messages import GREEDY, NO_LOGPROBS, GenerateRequest, Submit
from surefoot.protocol.step_plan import StepDone, StepPlan
from surefoot.scheduler.scheduler import Scheduler

ROWS = (1, 64, 256, 512)
PAGE_SIZE = 16
WINDOW = 64
STEPS = 1600
WARM_UP = 64


def done(plan: StepPlan) -> StepDone:
    count = len(plan.decode_slots) + sum(row.samples for row in plan.prefill)
    return StepDone(plan.step_id, (7,) * count, (True,) * count, (), (), "benchmark")


def make_request(request_id: int, prompt: tuple[int, ...], new_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        id=request_id,
        group_id=request_id,
        prompt_ids=prompt,
        max_new_tokens=new_tokens,
        min_new_tokens=0,
        stop_ids=(1, 2),
        sampling=GREEDY,
        logprobs=NO_LOGPROBS,
        prompt_logprobs=NO_LOGPROBS,
        cache_namespace="",
        priority=0,
    )


def decoding_scheduler(rows: int, windows: tuple[int, ...]) -> Scheduler:
    """A scheduler in which `rows` requests decode, long enough for the whole measurement.

    windows: of each KV group.
    """
    new_tokens = STEPS + WARM_UP + 2 * PAGE_SIZE
    longest = 100 + PAGE_SIZE + new_tokens
    num_pages = rows * pages_for(longest, PAGE_SIZE)
    bounds = Bounds(
        page_size=PAGE_SIZE,
        kv_groups=tuple(KVGroup(window, num_pages) for window in windows),
        max_model_len=longest,
        max_running_requests=rows,
        max_queued_requests=0,
        chunked_prefill_size=rows * longest,
        count_rows=0,
        logits_rows=rows,
    )
    scheduler = Scheduler(bounds, prefix_cache=True)
    for i in range(rows):
        prompt = tuple(range(1000 * i, 1000 * i + 100 + i % PAGE_SIZE))
        scheduler.apply(Submit(make_request(i, prompt, new_tokens)))
    plan = scheduler.plan()
    scheduler.commit(plan, done(plan))
    return scheduler


def measure(rows: int, windows: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """Microseconds of each `plan` and of each `commit`."""
    scheduler = decoding_scheduler(rows, windows)
    plan_us, commit_us = [], []
    gc.collect()
    for _ in range(WARM_UP + STEPS):
        started = perf_counter()
        plan = scheduler.plan()
        planned = perf_counter()
        result = done(plan)
        ready = perf_counter()
        scheduler.commit(plan, result)
        plan_us.append((planned - started) * 1e6)
        commit_us.append((perf_counter() - ready) * 1e6)
    assert scheduler.stats().running == rows
    return plan_us[WARM_UP:], commit_us[WARM_UP:]


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[(len(values) - 1) * percent // 100]


def figures(rows: int, windows: tuple[int, ...]) -> dict[str, object]:
    plan_us, commit_us = measure(rows, windows)
    total_us = [a + b for a, b in zip(plan_us, commit_us, strict=True)]
    return {
        "rows": rows,
        "plan_us_p50": f"{percentile(plan_us, 50):.1f}",
        "commit_us_p50": f"{percentile(commit_us, 50):.1f}",
        "total_us_p50": f"{percentile(total_us, 50):.1f}",
        "total_us_p99": f"{percentile(total_us, 99):.1f}",
        "total_us_mean": f"{sum(total_us) / len(total_us):.1f}",
    }


def main() -> None:
    append("scheduler.csv", [figures(rows, windows=(0,)) for rows in ROWS])
    append("scheduler_windows.csv", [figures(rows, windows=(0, WINDOW)) for rows in ROWS])


if __name__ == "__main__":
    main()
