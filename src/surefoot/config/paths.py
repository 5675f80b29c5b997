"""`ExecutionPath`: the key under which a step runs."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


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
    FULL = "full"  # some row cuts tokens off: top-k, top-p, min-p, or a stop id before min_tokens


class ExecutionPath(Struct, frozen=True):
    kind: StepKind
    prefix: PrefixRegime
    attention: str  # the backend's algorithm
    linear: str  # the kernel of the matrix products
    sampler: SamplerKind

    @property
    def key(self) -> str:
        """For example `mixed/some/torch/fp16_packed/greedy`."""
        return "/".join((self.kind, self.prefix, self.attention, self.linear, self.sampler))
