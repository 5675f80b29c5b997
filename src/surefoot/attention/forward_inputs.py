"""What one step gives to a model and to its attention backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """What a backend needs for one step. Each backend has its own subclass, and alone reads it."""


Metadata = TypeVar("Metadata", bound=AttentionMetadata)


@dataclass(frozen=True)
class AttentionSpec:
    """How the layers of one kind attend."""

    group: int  # KV group, an index of Bounds.kv_groups
    scale: float
    softcap: float  # 0: none


@dataclass(frozen=True)
class PrefillSpan:
    slot: int
    start: int  # tokens already in the cache
    num_tokens: int  # tokens that this step computes, at least one


@dataclass(frozen=True)
class Rows:
    """The rows of a step as a backend sees them. Tokens are in row order: decode rows first, one token each."""

    decode_slots: tuple[int, ...]
    decode_lengths: tuple[int, ...]  # tokens to attend to, the new one included
    prefill: tuple[PrefillSpan, ...]


@dataclass(frozen=True)
class ForwardInputs(Generic[Metadata]):
    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    places: Tensor  # [KV groups, tokens] int64: page * page_size + offset, where each token's KV is written
    sample_rows: Tensor  # [samples] int64: tokens whose logits are wanted
    attention: Metadata
