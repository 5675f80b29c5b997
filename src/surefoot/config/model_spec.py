"""What a checkpoint is. One reader per family makes a `ModelSpec` from config.json or from GGUF metadata."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

Activation = Literal["silu", "gelu_tanh"]


class NoRopeScaling(Struct, frozen=True, tag="none"):
    pass


class LinearRopeScaling(Struct, frozen=True, tag="linear"):
    """Positions are divided by `factor`."""

    factor: float


class Llama3RopeScaling(Struct, frozen=True, tag="llama3"):
    """Low frequencies are divided by `factor`, high ones are kept, those between are blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_context: int


class YarnRopeScaling(Struct, frozen=True, tag="yarn"):
    """Like llama3, with the bounds counted in turns within the original context (YaRN, arXiv 2309.00071)."""

    factor: float
    original_max_context: int
    beta_fast: float  # from so many turns on a frequency is kept
    beta_slow: float  # below so many it is divided by `factor`
    truncate: bool  # the bounds are rounded outwards to whole frequencies
    attention_factor: float  # of rotated queries and keys


class FactorsRopeScaling(Struct, frozen=True, tag="factors"):
    """Each frequency is divided by its own factor: LongRoPE's once they are chosen, and Llama 3.1's in GGUF."""

    factors: tuple[float, ...]  # Rope.size / 2
    attention_factor: float


class LongRopeScaling(Struct, frozen=True, tag="longrope"):
    """Factors as above, one set up to the original context and one beyond (LongRoPE, arXiv 2402.13753). `for_context`
    chooses."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_context: int
    attention_factor: float


class DynamicRopeScaling(Struct, frozen=True, tag="dynamic"):
    """No scaling within the original context. Beyond it every frequency depends on the sequence's length."""

    factor: float
    original_max_context: int


RopeScaling = (
    NoRopeScaling
    | LinearRopeScaling
    | Llama3RopeScaling
    | YarnRopeScaling
    | FactorsRopeScaling
    | LongRopeScaling
    | DynamicRopeScaling
)


class Rope(Struct, frozen=True):
    """Rotary position embedding."""

    theta: float
    scaling: RopeScaling
    size: int  # rotated elements of a head, its first ones; the others pass through


class LayerKind(Struct, frozen=True):
    """What some layers share. Their keys and values live in one KV group: the same pages hold the same tokens."""

    window: int  # tokens that a token sees, itself included; 0: all up to itself
    rope: Rope


class ModelSpec(Struct, frozen=True):
    """Zero means "none" for windows and soft caps, one for scales."""

    family: str  # key of models.registry
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_kinds: tuple[LayerKind, ...]
    layers: tuple[int, ...]  # each layer's kind, an index of layer_kinds
    norm_eps: float
    max_context: int  # tokens of prompt and output that the model was trained for
    tied_embeddings: bool  # the LM head is the embedding
    activation: Activation  # of the MLP's gate
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMS norm of each head's query and key, before rotation
    post_norms: bool  # RMS norm of what attention and MLP give, before it is added (Gemma 2)
    embedding_scale: float
    attention_scale: float  # of query times key
    attention_softcap: float  # scores become softcap * tanh(scores / softcap)
    logits_softcap: float

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_linear_weights(self) -> int:
        """Elements of all matrices of the layers (not of embedding and head)."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)


def context_conflict(spec: ModelSpec, max_model_len: int) -> str:
    """Why the model cannot run sequences of `max_model_len` tokens, with the way out; empty if it can."""
    for kind in spec.layer_kinds:
        scaling = kind.rope.scaling
        if isinstance(scaling, DynamicRopeScaling) and max_model_len > scaling.original_max_context:
            return (
                f"--max-model-len {max_model_len}: beyond {scaling.original_max_context} tokens the model's dynamic "
                f"rope scaling depends on each sequence's length, which is not implemented: "
                f"use --max-model-len {scaling.original_max_context}"
            )
    if max_model_len > spec.max_context:
        return f"--max-model-len {max_model_len} is more than the model's context of {spec.max_context}: lower it"
    return ""


def for_context(spec: ModelSpec, max_model_len: int) -> ModelSpec:
    """The spec for sequences of at most `max_model_len` tokens: LongRoPE's factors are chosen, once for all sequences,
    since cached keys of one set are useless to the other."""

    def chosen(scaling: RopeScaling) -> RopeScaling:
        if not isinstance(scaling, LongRopeScaling):
            return scaling
        short = max_model_len <= scaling.original_max_context
        return FactorsRopeScaling(scaling.short_factors if short else scaling.long_factors, scaling.attention_factor)

    kinds = (LayerKind(kind.window, replace(kind.rope, scaling=chosen(kind.rope.scaling))) for kind in spec.layer_kinds)
    return replace(spec, layer_kinds=tuple(kinds))
