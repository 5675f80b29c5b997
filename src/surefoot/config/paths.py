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
    samples = sampler is not SamplerKind.NONE
    if kind is StepKind.DECODE:  # each row samples, none is of a prompt
        return prefix is PrefixRegime.NONE and samples and logprobs is not LogprobsKind.PROMPT
    if samples:
        most_prefill_rows = bounds.max_running_requests - (kind is StepKind.MIXED)
        least_to_compute = 1
    else:  # one row, of a prompt that the step's budget does not finish
        most_prefill_rows = int(kind is StepKind.PREFILL and logprobs is not LogprobsKind.OUTPUT)
        least_to_compute = bounds.chunked_prefill_size + 1
    if most_prefill_rows == 0:
        return False
    # A row whose prompt's logprobs are wanted matches no cached prefix, but another row may.
    may_match = plan.prefix_cache and (logprobs is not LogprobsKind.PROMPT or most_prefill_rows > 1)
    cached = 0 if prefix is PrefixRegime.NONE else _fewest_cached(bounds, may_match)
    longest_prompt = bounds.max_model_len - 1  # the last token is never computed
    return cached + least_to_compute <= longest_prompt


def _fewest_cached(bounds: Bounds, may_match: bool) -> int:
    """Tokens that are in the cache already when a chunk begins that is not the first: those of a page that matched, or
    of a first chunk that got what the longest prompts of all other requests had left of its step."""
    others = (bounds.max_running_requests - 1) * (bounds.max_model_len - 1)
    first_chunk = max(1, bounds.chunked_prefill_size - others)
    return min(first_chunk, bounds.page_size) if may_match else first_chunk
