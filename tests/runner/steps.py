"""Running step plans by hand: one request in one slot, its tokens in any chunks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from surefoot.config import settings
from surefoot.config.planning import plan_engine
from surefoot.protocol.messages import Sampling
from surefoot.protocol.step_plan import Admission, PrefillRow, StepDone, StepPlan
from surefoot.runner.model_runner import ModelRunner

GREEDY = Sampling(temperature=0, top_k=0, top_p=1, min_p=0, seed=0)


def make_runner(model: Path, **changes: Any) -> ModelRunner:
    wanted = {"weight_dtype": "float32", "max_running_requests": 8, "kv_cache_tokens": 4096, **changes}
    return ModelRunner(
        plan_engine(settings.load({"model": str(model), **wanted}), Console(stderr=True)), lambda *_: None
    )


def admission(slot: int, sampling: Sampling = GREEDY, stop_ids: tuple[int, ...] = (), min_tokens: int = 0) -> Admission:
    return Admission(slot, 100 + slot, sampling, stop_ids, min_tokens)


def prefill(
    slot: int, start: int, tokens: Sequence[int], pages: Sequence[int] = (), samples: bool = True
) -> PrefillRow:
    return PrefillRow(100 + slot, slot, start, tuple(tokens), 0, tuple(pages), samples)


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


def greedy(runner: ModelRunner, tokens: Sequence[int], count: int, pages: Sequence[int], slot: int = 0) -> list[int]:
    """`count` tokens after `tokens`, one decode step each."""
    done: StepDone = runner.run(step([admission(slot)], rows=[prefill(slot, 0, tokens, pages)]))
    out = [*done.token_ids]
    while len(out) < count:
        out += runner.run(step(decode=[(slot, len(tokens) + len(out) - 1)])).token_ids
    return out


def set_last_token(runner: ModelRunner, slot: int, token: int) -> None:
    """As if `slot` had just sampled `token`."""
    with torch.inference_mode():
        runner._table.last_token[slot] = token
