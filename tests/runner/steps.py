"""Running step plans by hand: one request in one slot, its tokens in any chunks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from surefoot.config import settings
from surefoot.config.bounds import Bounds, KVGroup
from surefoot.config.planning import plan_engine
from surefoot.protocol.messages import NO_LOGPROBS, Sampling
from surefoot.protocol.step_plan import NO_COUNT_ROW, Admission, PageRun, PrefillRow, StepDone, StepPlan
from surefoot.runner.model_runner import ModelRunner
from surefoot.runner.request_table import RequestTable


def sampling(**changes: Any) -> Sampling:
    """Greedy without `changes`."""
    neutral = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 0, "logit_bias": ()}
    penalties = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    return Sampling(**(neutral | penalties | changes))


GREEDY = sampling()


def make_runner(model: Path, **changes: Any) -> ModelRunner:
    wanted = {
        "cpu_kernels": "torch",
        "weight_dtype": "float32",
        "max_running_requests": 8,
        "kv_cache_tokens": 4096,
        **changes,
    }
    return ModelRunner(
        plan_engine(settings.load({"model": str(model), **wanted}), Console(stderr=True)), lambda *_: None
    )


def make_table(vocab_size: int, slots: int) -> RequestTable:
    """Without a model: one page per slot, and a count row for each."""
    bounds = Bounds(
        page_size=16,
        kv_groups=(KVGroup(window=0, num_pages=slots),),
        max_model_len=16,
        max_running_requests=slots,
        max_queued_requests=0,
        chunked_prefill_size=16,
        count_rows=slots,
        logits_rows=slots,
    )
    return RequestTable(bounds, vocab_size, torch.device("cpu"))


def admission(slot: int, asked: Sampling = GREEDY, prompt_length: int = 0, **changes: Any) -> Admission:
    """A request with penalties gets the count row of its slot's number."""
    fields: dict[str, Any] = {
        "slot": slot,
        "request_id": 100 + slot,
        "sampling": asked,
        "stop_ids": (),
        "min_tokens": 0,
        "logprobs": NO_LOGPROBS,
        "prompt_logprobs": NO_LOGPROBS,
        "count_row": slot if asked.penalises else NO_COUNT_ROW,
        "prompt_length": prompt_length,
        "history": (),
    }
    return Admission(**(fields | changes))


def prefill(
    slot: int,
    start: int,
    tokens: Sequence[int],
    pages: Sequence[int] = (),
    samples: bool = True,
    targets: Sequence[int] = (),
) -> PrefillRow:
    """pages: from the slot's first column on."""
    runs = (PageRun(0, 0, tuple(pages)),) if pages else ()
    return PrefillRow(100 + slot, slot, start, tuple(tokens), runs, samples, tuple(targets))


def step(
    admissions: Sequence[Admission] = (),
    decode: Sequence[tuple[int, int]] = (),
    rows: Sequence[PrefillRow] = (),
) -> StepPlan:
    """decode: (slot, start) of each row."""
    slots, starts = tuple(slot for slot, _ in decode), tuple(start for _, start in decode)
    return StepPlan(0, tuple(admissions), (), slots, starts, tuple(rows))


def chunked_logits(
    runner: ModelRunner, tokens: Sequence[int], chunk: int, pages: Sequence[int], slot: int = 0
) -> torch.Tensor:
    """Logits after every chunk's last token: [chunks, vocab]. The slot is admitted anew."""
    out = []
    for start in range(0, len(tokens), chunk):
        first = start == 0
        row = prefill(slot, start, tokens[start : start + chunk], pages if first else ())
        out.append(runner.forward(step([admission(slot)] if first else [], rows=[row]))[0])
    return torch.cat(out)


def generate(
    runner: ModelRunner,
    tokens: Sequence[int],
    count: int,
    pages: Sequence[int],
    slot: int = 0,
    asked: Sampling = GREEDY,
    prompt_length: int | None = None,
) -> list[int]:
    """`count` tokens after `tokens`, one decode step each. `prompt_length`: of a resumed request; else all tokens."""
    length = len(tokens) if prompt_length is None else prompt_length
    admitted = admission(slot, asked, length, history=tuple(tokens))
    done: StepDone = runner.run(step([admitted], rows=[prefill(slot, 0, tokens, pages)]))
    out = [*done.token_ids]
    while len(out) < count:
        out += runner.run(step(decode=[(slot, len(tokens) + len(out) - 1)])).token_ids
    return out


def set_last_token(runner: ModelRunner, slot: int, token: int) -> None:
    """As if `slot` had just sampled `token`."""
    with torch.inference_mode():
        runner._table.last_token[slot] = token
