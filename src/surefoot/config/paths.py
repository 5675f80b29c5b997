"""`ExecutionPath`: the key under which a step runs. `reachable_paths`: all that a plan allows."""

from __future__ import annotations

import itertools
from enum import StrEnum

from msgspec import Struct

from surefoot.config.bounds import Bounds
from surefoot.config.engine_plan import EnginePlan


class StepKind(StrEnum):
    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"


class PrefixRegime(StrEnum):
    """Whether prefill rows of the step attend to KV that an earlier step wrote."""

    NONE = "none"
    SOME = "some"


class SamplerKind(StrEnum):
    NONE = "none"  # no row samples: inner chunks of prompts
    GREEDY = "greedy"  # every row takes the most probable token
    PLAIN = "plain"  # temperature only
    FULL = "full"  # some row changes logits or cuts tokens off: bias, penalties, top-k, ..., stop ids before min_tokens


class LogprobsKind(StrEnum):
    """Which logprobs are wanted besides the sampled tokens."""

    NONE = "none"
    OUTPUT = "output"  # of sampled tokens
    PROMPT = "prompt"  # of prompt tokens, and perhaps of sampled ones


class ExecutionPath(Struct, frozen=True):
    kind: StepKind
    prefix: PrefixRegime
    attention: str  # the backend's algorithm
    linear: str  # the kernel of the matrix products
    sampler: SamplerKind
    logprobs: LogprobsKind

    @property
    def key(self) -> str:
        """For example `mixed/some/torch/fp16_packed/greedy/none`."""
        return "/".join((self.kind, self.prefix, self.attention, self.linear, self.sampler, self.logprobs))


def reachable_paths(plan: EnginePlan) -> tuple[ExecutionPath, ...]:
    """Every path that a step of this engine can take, and no other."""
    return tuple(
        ExecutionPath(kind, prefix, plan.attention_backend, plan.linear_kernel, sampler, logprobs)
        for kind, prefix, sampler, logprobs in itertools.product(StepKind, PrefixRegime, SamplerKind, LogprobsKind)
        if _is_reachable(kind, prefix, sampler, logprobs, plan)
    )


def _is_reachable(
    kind: StepKind, prefix: PrefixRegime, sampler: SamplerKind, logprobs: LogprobsKind, plan: EnginePlan
) -> bool:
    bounds = plan.bounds
    if kind is StepKind.DECODE:  # each row samples, none is of a prompt
        return prefix is PrefixRegime.NONE and sampler is not SamplerKind.NONE and logprobs is not LogprobsKind.PROMPT
    most_prefill_rows = bounds.max_running_requests - (kind is StepKind.MIXED)
    if most_prefill_rows == 0:
        return False
    if sampler is SamplerKind.NONE:  # one row, of a prompt that the step's budget does not finish
        if kind is StepKind.MIXED or logprobs is LogprobsKind.OUTPUT:
            return False
        most_prefill_rows = 1
    # A row whose prompt's logprobs are wanted matches no cached prefix, but another row may.
    may_match = plan.prefix_cache and (logprobs is not LogprobsKind.PROMPT or most_prefill_rows > 1)
    start = 0 if prefix is PrefixRegime.NONE else _smallest_start(bounds, may_match)
    longest = bounds.max_model_len - 1  # the last token is never computed
    return longest - start > (bounds.chunked_prefill_size if sampler is SamplerKind.NONE else 0)


def _smallest_start(bounds: Bounds, may_match: bool) -> int:
    """How many tokens, at least one, may be in the cache already when a chunk begins."""
    # What an earlier step's budget left to it, after the chunks of all others.
    others = (bounds.max_running_requests - 1) * (bounds.max_model_len - 1)
    left_over = max(1, bounds.chunked_prefill_size - others)
    return min(left_over, bounds.page_size) if may_match else left_over
