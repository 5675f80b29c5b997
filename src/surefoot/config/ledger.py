"""What a plan means in bytes: one line for each thing that will be allocated for long. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from surefoot.config.engine_plan import EnginePlan
from surefoot.config.resolve import COUNT_BYTES, SAMPLING_BYTES, activation_bytes


class LedgerLine(Struct, frozen=True):
    owner: str
    bytes: int
    formula: str  # how they come about


def ledger(plan: EnginePlan) -> tuple[LedgerLine, ...]:
    """The lines add up to the memory that was available when the plan was made: the last one is what is left of it."""
    lines = tuple(_lines(plan))
    left = plan.hardware.memory_available - sum(line.bytes for line in lines)
    return (*lines, LedgerLine("left", left, f"of {plan.hardware.memory_available} that were available"))


def _lines(plan: EnginePlan) -> Iterator[LedgerLine]:
    model, bounds = plan.model, plan.bounds
    yield LedgerLine(
        "weights",
        plan.weight_bytes,
        f"matrices of {model.num_layers} layers, embedding and head, in {plan.weight_dtype}",
    )
    for group, per_token in zip(bounds.kv_groups, plan.kv_layout.bytes_per_token, strict=True):
        pages = group.num_pages + 1
        yield LedgerLine(
            f"KV cache, window {group.window}" if group.window else "KV cache",
            pages * bounds.page_size * per_token,
            f"({group.num_pages} pages + a spare one) x {bounds.page_size} tokens x {per_token} bytes",
        )
    yield LedgerLine(
        "sampling",
        bounds.max_running_requests * model.vocab_size * SAMPLING_BYTES,
        f"{bounds.max_running_requests} rows x {model.vocab_size} logits x {SAMPLING_BYTES} bytes",
    )
    yield LedgerLine(
        "penalties",
        bounds.count_rows * model.vocab_size * COUNT_BYTES,
        f"{bounds.count_rows} rows x {model.vocab_size} tokens x {COUNT_BYTES} bytes",
    )
    yield LedgerLine(
        "activations",
        bounds.chunked_prefill_size * activation_bytes(model, bounds.max_model_len),
        f"{bounds.chunked_prefill_size} tokens x {activation_bytes(model, bounds.max_model_len)} bytes",
    )
