"""Reader of GGUF metadata, for the architectures of llama.cpp's converter.

What the converter leaves out is taken as llama.cpp takes it. Whatever would change a model's numbers and is not
computed here is refused with the key and its value.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np

from surefoot.checkpoint.errors import ModelSpecError
from surefoot.checkpoint.gguf import GGMLType, GGUFFile
from surefoot.config.model_parts import (
    PLAIN,
    attention_scale,
    check_factors,
    checked_layers,
    head_size,
    layer_kinds,
    magnitude,
    pattern,
    reach,
    windows,
)
from surefoot.config.model_spec import (
    FactorsRopeScaling,
    LinearRopeScaling,
    LongRopeScaling,
    ModelSpec,
    NoRopeScaling,
    Rope,
    RopeScaling,
    YarnRopeScaling,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")  # Mistral is "llama"
DEFAULT_THETA = 10_000.0
GEMMA_PERIODS = {"gemma2": 2, "gemma3": 6}  # every so many layers one attends to everything
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}

T = TypeVar("T", int, float, bool, str)


class _Metadata:
    """The keys of the file's own architecture."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.where = str(file.path)
        self.architecture = file.value("general.architecture", str)

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.file.metadata

    def value(self, name: str, kind: type[T]) -> T:
        return self.file.value(self.key(name), kind)

    def value_or(self, name: str, default: T) -> T:
        return self.file.value_or(self.key(name), default)

    def refuse_unless(self, name: str, supported: Any) -> None:
        value = self.file.metadata.get(self.key(name), supported)
        if value != supported:
            raise ModelSpecError(
                f"{self.where}: {self.key(name)} = {value!r} is not supported; supported is {supported!r}"
            )

    def refuse_unless_close(self, name: str, supported: float) -> None:
        """Files hold single precision."""
        if not math.isclose(self.value_or(name, supported), supported, rel_tol=1e-5):
            self.refuse_unless(name, supported)


def read_gguf_spec(file: GGUFFile) -> ModelSpec:
    metadata = _Metadata(file)
    if metadata.architecture not in ARCHITECTURES:
        raise ModelSpecError(
            f"{file.path}: general.architecture = {metadata.architecture!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    hidden_size, num_heads = metadata.value("embedding_length", int), metadata.value("attention.head_count", int)
    head_dim = head_size(metadata.where, hidden_size, num_heads, stated=metadata.value_or("attention.key_length", 0))
    num_layers = checked_layers(metadata.where, metadata.value("block_count", int))
    _refuse_unknown_numbers(metadata, head_dim)
    full, sliding = _ropes(metadata, head_dim)
    max_context = reach(full.scaling, metadata.value("context_length", int))
    kinds, layers = layer_kinds(_windows(metadata, num_layers, max_context), full, sliding, max_context)
    # Files of Gemma do not say what queries are divided by. It is the head size except in the largest models.
    largest = num_layers == GEMMA_27B_LAYERS.get(metadata.architecture)
    scaled_by = hidden_size // max(1, num_heads) if largest else head_dim
    metadata.refuse_unless_close("attention.scale", attention_scale(scaled_by))
    fields: dict[str, Any] = {
        **PLAIN,
        "family": metadata.architecture,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.value("feed_forward_length", int),
        "num_heads": num_heads,
        "num_kv_heads": metadata.value_or("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "layer_kinds": kinds,
        "layers": layers,
        "norm_eps": metadata.value("attention.layer_norm_rms_epsilon", float),
        "max_context": max_context,
        "tied_embeddings": "output.weight" not in file.tensors,
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "qk_norm": metadata.architecture in ("qwen3", "gemma3"),
        "attention_scale": attention_scale(scaled_by),
        **_gemma(metadata, hidden_size),
    }
    return ModelSpec(**fields)


def _vocab_size(file: GGUFFile) -> int:
    """From the embedding, since not every file states it."""
    if "token_embd.weight" not in file.tensors:
        raise ModelSpecError(f"{file.path} lacks the tensor 'token_embd.weight'")
    shape = file.tensors["token_embd.weight"].shape
    if len(shape) != 2:
        raise ModelSpecError(f"{file.path}: 'token_embd.weight' should be a matrix, its shape is {shape}")
    return shape[0]


def _refuse_unknown_numbers(metadata: _Metadata, head_dim: int) -> None:
    for name, supported in (
        ("expert_count", 0),
        ("attention.value_length", head_dim),
        ("attention.causal", True),
        ("rope.scale_linear", 1.0),
    ):
        metadata.refuse_unless(name, supported)
    if metadata.architecture != "phi3":
        metadata.refuse_unless("rope.dimension_count", head_dim)


def _gemma(metadata: _Metadata, hidden_size: int) -> dict[str, Any]:
    if not metadata.architecture.startswith("gemma"):
        return {}
    softcaps = (50.0, 30.0) if metadata.architecture == "gemma2" else (0.0, 0.0)
    if metadata.architecture == "gemma3":
        metadata.refuse_unless("attn_logit_softcapping", 0.0)
    return {
        "activation": "gelu_tanh",
        "post_norms": True,
        "embedding_scale": hidden_size**0.5,
        "attention_softcap": metadata.value_or("attn_logit_softcapping", softcaps[0]),
        "logits_softcap": metadata.value_or("final_logit_softcapping", softcaps[1]),
    }


def _windows(metadata: _Metadata, num_layers: int, max_context: int) -> list[int]:
    """Each layer's window."""
    name = "attention.sliding_window"
    window = metadata.value_or(name, 4096 if metadata.architecture == "gemma2" else 0)
    if metadata.architecture in GEMMA_PERIODS:
        slides = _slides(metadata, num_layers) if window else [False] * num_layers
    else:
        slides = [window != 0] * num_layers
        if metadata.architecture.startswith("qwen") and 0 < window < max_context:
            raise ModelSpecError(
                f"{metadata.where}: {metadata.key(name)} = {window} is not supported, since the file does not say for "
                "which layers; supported is 0"
            )
    return windows(metadata.where, metadata.key(name), window, slides)


def _slides(metadata: _Metadata, num_layers: int) -> list[bool]:
    """Which layers of a Gemma have a window: the file gives a period, or a boolean for each, or nothing."""
    name = metadata.key("attention.sliding_window_pattern")
    if not isinstance(metadata.file.metadata.get(name), list):
        period = metadata.file.value_or(name, GEMMA_PERIODS[metadata.architecture])
        return pattern(metadata.where, name, period, num_layers)
    slides = metadata.file.array(name, bool)
    if len(slides) != num_layers:
        raise ModelSpecError(f"{metadata.where}: {name} has {len(slides)} entries for {num_layers} layers")
    return slides


# ---- Rope ------------------------------------------------------------------------------------------------------------


def _ropes(metadata: _Metadata, head_dim: int) -> tuple[Rope, Rope]:
    """(of layers that see everything, of sliding ones)"""
    size = metadata.value_or("rope.dimension_count", head_dim)
    scaling = _rope_scaling(metadata, size)
    check_factors(metadata.where, scaling, size)
    theta = metadata.value_or("rope.freq_base", DEFAULT_THETA)
    if metadata.architecture == "gemma3":
        sliding = Rope(metadata.value_or("rope.freq_base_swa", DEFAULT_THETA), NoRopeScaling(), size)
        return Rope(theta, scaling, size), sliding
    metadata.refuse_unless("rope.freq_base_swa", theta)
    rope = Rope(theta, scaling, size)
    return rope, rope


def _rope_scaling(metadata: _Metadata, size: int) -> RopeScaling:
    """The tensors with factors decide before the type, which files of Phi-3 do not state."""
    kind = metadata.value_or("rope.scaling.type", "linear" if "rope.scaling.factor" in metadata else "none")
    tensors = metadata.file.tensors
    has_factors = "rope_freqs.weight" in tensors
    if "rope_factors_long.weight" in tensors:
        kind = "longrope" if kind == "none" else kind
    if has_factors and kind != "none":
        raise ModelSpecError(f"{metadata.where} has both {kind} rope scaling and 'rope_freqs.weight'; use one of them")
    if kind in ("none", "linear"):
        metadata.refuse_unless("rope.scaling.attn_factor", 1.0)
    match kind:
        case "none":
            return FactorsRopeScaling(_factors(metadata, "rope_freqs", size), 1.0) if has_factors else NoRopeScaling()
        case "linear":
            return LinearRopeScaling(metadata.value("rope.scaling.factor", float))
        case "yarn":
            return _yarn(metadata)
        case "longrope":
            return LongRopeScaling(
                short_factors=_factors(metadata, "rope_factors_short", size),
                long_factors=_factors(metadata, "rope_factors_long", size),
                original_max_context=_original(metadata),
                attention_factor=metadata.value_or("rope.scaling.attn_factor", 1.0),
            )
        case _:
            raise ModelSpecError(
                f"{metadata.where}: {metadata.key('rope.scaling.type')} = {kind!r} is not supported; supported are "
                "'none', 'linear', 'yarn' and 'longrope'"
            )


def _original(metadata: _Metadata) -> int:
    return metadata.value_or("rope.scaling.original_context_length", metadata.value("context_length", int))


def _yarn(metadata: _Metadata) -> YarnRopeScaling:
    """`attn_factor` multiplies YaRN's own magnitude. What converters write as `yarn_attn_factor` stands for the whole
    of it, and llama.cpp's versions disagree on its meaning: it is taken only where that makes no difference."""
    for name, supported in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        metadata.refuse_unless(f"rope.scaling.{name}", supported)
    factor = metadata.value("rope.scaling.factor", float)
    own = magnitude(factor)
    metadata.refuse_unless_close("rope.scaling.yarn_attn_factor", own)
    return YarnRopeScaling(
        factor=factor,
        original_max_context=_original(metadata),
        beta_fast=metadata.value_or("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=metadata.value_or("rope.scaling.yarn_beta_slow", 1.0),
        truncate=True,
        attention_factor=own * metadata.value_or("rope.scaling.attn_factor", 1.0),
    )


def _factors(metadata: _Metadata, name: str, size: int) -> tuple[float, ...]:
    name = f"{name}.weight"
    if name not in metadata.file.tensors:
        raise ModelSpecError(f"{metadata.where} lacks the tensor {name!r}")
    tensor = metadata.file.tensors[name]
    if tensor.type is not GGMLType.F32 or tensor.shape != (size // 2,):
        raise ModelSpecError(
            f"{metadata.where}: {name!r} should be F32({size // 2},), it is {tensor.type.name}{tensor.shape}"
        )
    return tuple(metadata.file.raw(name).view(np.float32).tolist())
