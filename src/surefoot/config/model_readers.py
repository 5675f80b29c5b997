"""Readers that make a `ModelSpec` of a checkpoint's own description: config.json, or GGUF metadata.

The supported family is Llama: RMS norm, rotary positions, grouped-query attention and a gated SiLU MLP, all without
biases. Whatever would change a model's numbers and is not computed here is refused with the key and its value; keys
that only training reads are left alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from surefoot.checkpoint.errors import ModelSpecError
from surefoot.checkpoint.gguf import GGMLType, GGUFFile
from surefoot.config.engine_plan import CheckpointRef
from surefoot.config.model_spec import (
    FactorsRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelSpec,
    NoRopeScaling,
    RopeScaling,
)

DEFAULT_ROPE_THETA = 10_000.0  # what Llama's config.json and GGUF mean when they do not say

T = TypeVar("T", int, float, bool, str)


def read_model_spec(ref: CheckpointRef) -> ModelSpec:
    """What the checkpoint is. Raises ModelSpecError, or CheckpointError if the file is damaged."""
    spec = read_gguf_spec(GGUFFile.open(ref.path)) if ref.format == "gguf" else read_hf_spec(Path(ref.path))
    _check_sizes(ref.path, spec)
    return spec


# ---- Hugging Face config.json ----------------------------------------------------------------------------------------


def read_hf_spec(directory: Path) -> ModelSpec:
    config = _Config.read(directory / "config.json")
    config.refuse_unless("architectures", [["LlamaForCausalLM"]], default=["LlamaForCausalLM"])
    config.refuse_unless("model_type", ["llama"], default="llama")
    config.refuse_unless("hidden_act", ["silu"], default="silu")
    config.refuse_unless("attention_bias", [False], default=False)
    config.refuse_unless("mlp_bias", [False], default=False)
    config.refuse_unless("quantization_config", [None], default=None)

    rope = _rope_parameters(config)
    rope.refuse_unless("partial_rotary_factor", [1], default=1.0)
    hidden_size, num_heads = config.value("hidden_size", int), config.value("num_attention_heads", int)
    return ModelSpec(
        family="llama",
        vocab_size=config.value("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=config.value("intermediate_size", int),
        num_layers=config.value("num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=config.value_or("num_key_value_heads", num_heads),
        head_dim=_head_dim(config.where, hidden_size, num_heads, stated=config.value_or("head_dim", 0)),
        norm_eps=config.value_or("rms_norm_eps", 1e-6),
        rope_theta=rope.value_or("rope_theta", DEFAULT_ROPE_THETA),
        rope_scaling=_rope_scaling(rope),
        max_context=config.value_or("max_position_embeddings", 2048),
        tied_embeddings=config.value_or("tie_word_embeddings", False),
    )


class _Config:
    """A JSON object with typed look-ups. A null counts as missing, as it does for Hugging Face."""

    def __init__(self, where: str, values: dict[str, Any]) -> None:
        self.where = where
        self.values = {key: value for key, value in values.items() if value is not None}

    @classmethod
    def read(cls, path: Path) -> _Config:
        try:
            values = json.loads(path.read_bytes())
        except OSError as error:
            raise ModelSpecError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ModelSpecError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ModelSpecError(f"{path} holds {type(values).__name__}, not a JSON object")
        return cls(str(path), values)

    def value(self, key: str, kind: type[T]) -> T:
        if key not in self.values:
            raise ModelSpecError(f"{self.where} lacks {key!r}")
        value = self.values[key]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelSpecError(f"{self.where}: {key} should be one {kind.__name__}, it is {value!r}")
        return value

    def value_or(self, key: str, default: T) -> T:
        return self.value(key, type(default)) if key in self.values else default

    def refuse_unless(self, key: str, supported: list[Any], default: Any) -> None:
        value = self.values.get(key, default)
        if value not in supported:
            listed = " or ".join(map(repr, supported))
            raise ModelSpecError(f"{self.where}: {key} = {value!r} is not supported; supported is {listed}")


def _rope_parameters(config: _Config) -> _Config:
    """The rotary settings as one object.

    transformers 5 writes `rope_parameters`; older versions wrote `rope_theta` and `rope_scaling` (null if none).
    """
    key = "rope_parameters" if "rope_parameters" in config.values else "rope_scaling"
    nested = config.values.get(key, {})
    if not isinstance(nested, dict):
        raise ModelSpecError(f"{config.where}: {key} = {nested!r} should be an object or null")
    outer = {name: value for name, value in config.values.items() if name in ("rope_theta", "partial_rotary_factor")}
    return _Config(f"{config.where}, {key}", outer | nested)


def _rope_scaling(rope: _Config) -> RopeScaling:
    match rope.values.get("rope_type", rope.values.get("type", "default")):
        case "default":
            return NoRopeScaling()
        case "linear":
            return LinearRopeScaling(rope.value("factor", float))
        case "llama3":
            return Llama3RopeScaling(
                factor=rope.value("factor", float),
                low_freq_factor=rope.value("low_freq_factor", float),
                high_freq_factor=rope.value("high_freq_factor", float),
                original_max_context=rope.value("original_max_position_embeddings", int),
            )
        case other:
            raise ModelSpecError(
                f"{rope.where}: rope_type = {other!r} is not supported; supported are 'default', 'linear' and 'llama3'"
            )


# ---- GGUF metadata ---------------------------------------------------------------------------------------------------


def read_gguf_spec(file: GGUFFile) -> ModelSpec:
    architecture = file.value("general.architecture", str)
    if architecture != "llama":
        raise ModelSpecError(
            f"{file.path}: general.architecture = {architecture!r} is not supported; supported is 'llama'"
        )
    biases = [name for name in file.tensors if name.endswith(".bias")]
    if biases:
        raise ModelSpecError(
            f"{file.path}: the tensor {biases[0]!r} is a bias; only models without biases are supported"
        )
    if "token_embd.weight" not in file.tensors:
        raise ModelSpecError(f"{file.path} lacks the tensor 'token_embd.weight'")

    hidden_size, num_heads = file.value("llama.embedding_length", int), file.value("llama.attention.head_count", int)
    head_dim = _head_dim(str(file.path), hidden_size, num_heads, stated=file.value_or("llama.attention.key_length", 0))
    for key, supported in (
        ("llama.expert_count", 0),
        ("llama.attention.value_length", head_dim),
        ("llama.rope.dimension_count", head_dim),
    ):
        if file.value_or(key, supported) != supported:
            raise ModelSpecError(
                f"{file.path}: {key} = {file.metadata[key]!r} is not supported; supported is {supported}"
            )
    return ModelSpec(
        family="llama",
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=file.value("llama.feed_forward_length", int),
        num_layers=file.value("llama.block_count", int),
        num_heads=num_heads,
        num_kv_heads=file.value_or("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        norm_eps=file.value("llama.attention.layer_norm_rms_epsilon", float),
        rope_theta=file.value_or("llama.rope.freq_base", DEFAULT_ROPE_THETA),
        rope_scaling=_gguf_rope_scaling(file, head_dim),
        max_context=file.value("llama.context_length", int),
        tied_embeddings="output.weight" not in file.tensors,
    )


def _gguf_rope_scaling(file: GGUFFile, head_dim: int) -> RopeScaling:
    kind = file.value_or("llama.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelSpecError(
            f"{file.path}: llama.rope.scaling.type = {kind!r} is not supported; supported are 'none' and 'linear'"
        )
    has_factors = "rope_freqs.weight" in file.tensors
    if kind == "linear":
        if has_factors:
            raise ModelSpecError(f"{file.path} has both linear rope scaling and 'rope_freqs.weight'; use one of them")
        return LinearRopeScaling(file.value("llama.rope.scaling.factor", float))
    if not has_factors:
        return NoRopeScaling()
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.type is not GGMLType.F32 or tensor.shape != (head_dim // 2,):
        raise ModelSpecError(
            f"{file.path}: 'rope_freqs.weight' should be F32({head_dim // 2},), it is {tensor.type.name}{tensor.shape}"
        )
    return FactorsRopeScaling(tuple(file.raw("rope_freqs.weight").view(np.float32).tolist()))


# ---- Both ------------------------------------------------------------------------------------------------------------


def _head_dim(where: str, hidden_size: int, num_heads: int, stated: int) -> int:
    """The width of a head: what the checkpoint states, or (if that is 0) an equal share of the hidden size."""
    if stated:
        return stated
    if num_heads < 1 or hidden_size % num_heads:
        raise ModelSpecError(f"{where}: hidden size {hidden_size} is not a multiple of its {num_heads} attention heads")
    return hidden_size // num_heads


def _check_sizes(where: str, spec: ModelSpec) -> None:
    """Refuses sizes that no model has, before anything is allocated by them."""
    sizes = {
        "vocabulary": spec.vocab_size,
        "hidden size": spec.hidden_size,
        "number of attention heads": spec.num_heads,
        "MLP size": spec.intermediate_size,
        "number of layers": spec.num_layers,
        "number of key-value heads": spec.num_kv_heads,
        "head size": spec.head_dim,
        "context": spec.max_context,
        "norm epsilon": spec.norm_eps,
        "rope theta": spec.rope_theta,
    }
    for what, size in sizes.items():
        if not size > 0:
            raise ModelSpecError(f"{where}: the {what} is {size}, it should be positive")
    if spec.num_heads % spec.num_kv_heads:
        raise ModelSpecError(
            f"{where}: {spec.num_heads} attention heads cannot share {spec.num_kv_heads} key-value heads"
        )
    if not all(number > 0 for number in _scaling_numbers(spec.rope_scaling)):
        raise ModelSpecError(f"{where}: the rope scaling has a number that is not positive: {spec.rope_scaling}")
    if spec.head_dim % 2:
        raise ModelSpecError(f"{where}: rotary positions need an even head size, it is {spec.head_dim}")


def _scaling_numbers(scaling: RopeScaling) -> tuple[float, ...]:
    """All that frequencies are divided by, or that a division's denominator comes from."""
    match scaling:
        case NoRopeScaling():
            return ()
        case LinearRopeScaling(factor):
            return (factor,)
        case FactorsRopeScaling(factors):
            return factors
        case Llama3RopeScaling(factor, low, high, original):
            return factor, low, high - low, original
