"""Readers of config.json, one per family.

Whatever would change a model's numbers and is not computed here is refused with the key and its value; keys that only
training reads, and those that transformers does not read, are left alone. Missing keys mean what transformers' config
classes mean by default, except sizes, which no file omits (those of Gemma 3 do).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from surefoot.checkpoint.errors import ModelSpecError
from surefoot.config.hf_config import HFConfig
from surefoot.config.hf_rope import read_gemma3_ropes, read_rope
from surefoot.config.model_parts import (
    PLAIN,
    attention_scale,
    checked_layers,
    head_size,
    layer_kinds,
    pattern,
    reach,
    windows,
)
from surefoot.config.model_spec import Activation, ModelSpec, Rope

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
FULL, SLIDING = "full_attention", "sliding_attention"

_COMMON = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}
_QWEN = {"max_position_embeddings": 32_768, "use_sliding_window": False, "sliding_window": 4096}
_GEMMA = {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"max_position_embeddings": 2048},
    "mistral": _COMMON | {"max_position_embeddings": 131_072, "sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": _COMMON | _QWEN | {"num_key_value_heads": 32, "max_window_layers": 28},
    "qwen3": _COMMON | _QWEN | {"num_key_value_heads": 32, "max_window_layers": 28, "head_dim": 128},
    "phi3": _COMMON | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    "gemma2": _GEMMA
    | {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": _GEMMA
    | {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
}


def read_hf_spec(directory: Path) -> ModelSpec:
    config = HFConfig.read(directory / "config.json")
    config.refuse_unless("quantization_config", [None], default=None)
    family = _family(config)
    if family == "gemma3" and "text_config" in config:
        tied = config.value_or("tie_word_embeddings", True)
        config = config.section("text_config").with_values({"tie_word_embeddings": tied})
    return READERS[family](config.with_defaults(DEFAULTS[family]))


ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
}
MODEL_TYPES = {"gemma3_text": "gemma3"} | {family: family for family in ARCHITECTURES.values()}


def _family(config: HFConfig) -> str:
    """By the class that the file names, or by its model type if it names none."""
    if "architectures" in config:
        config.refuse_unless("architectures", [[name] for name in ARCHITECTURES], default=None)
        family = ARCHITECTURES[config.values("architectures", str)[0]]
        types = [name for name, its_family in MODEL_TYPES.items() if its_family == family]
        config.refuse_unless("model_type", types, default=types[0])
        return family
    config.refuse_unless("model_type", list(MODEL_TYPES), default=None)
    return MODEL_TYPES[config.value("model_type", str)]


def _llama(config: HFConfig) -> ModelSpec:
    bias = config.value_or("attention_bias", False)
    return _spec(config, "llama", qkv_bias=bias, attention_out_bias=bias, mlp_bias=config.value_or("mlp_bias", False))


def _mistral(config: HFConfig) -> ModelSpec:
    config.refuse_unless("layer_types", [None], default=None)
    return _spec(config, "mistral", slides=_all_slide(config))


def _qwen2(config: HFConfig) -> ModelSpec:
    return _spec(config, "qwen2", slides=_last_slide(config), qkv_bias=True)


def _qwen3(config: HFConfig) -> ModelSpec:
    bias = config.value_or("attention_bias", False)
    return _spec(config, "qwen3", slides=_last_slide(config), qk_norm=True, qkv_bias=bias, attention_out_bias=bias)


def _phi3(config: HFConfig) -> ModelSpec:
    return _spec(config, "phi3", slides=_all_slide(config))


def _gemma2(config: HFConfig) -> ModelSpec:
    return _spec(
        config,
        "gemma2",
        slides=_layer_types(config) or pattern(config.where, "sliding_window_pattern", 2, _layers(config)),
        attention_softcap=_softcap(config, "attn_logit_softcapping"),
        **_gemma(config),
    )


def _gemma3(config: HFConfig) -> ModelSpec:
    config.refuse_unless("attn_logit_softcapping", [None], default=None)
    period = config.value("sliding_window_pattern", int)
    return _spec(
        config,
        "gemma3",
        slides=_layer_types(config) or pattern(config.where, "sliding_window_pattern", period, _layers(config)),
        qk_norm=True,
        **_gemma(config),
    )


def _gemma(config: HFConfig) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    config.refuse_unless("use_bidirectional_attention", [None, False], default=None)
    scalar = config.value("query_pre_attn_scalar", float)
    if not scalar > 0:
        raise ModelSpecError(f"{config.where}: query_pre_attn_scalar = {scalar} should be positive")
    bias = config.value_or("attention_bias", False)
    return {
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "post_norms": True,
        "embedding_scale": config.value("hidden_size", int) ** 0.5,
        "attention_scale": scalar**-0.5,
        "logits_softcap": _softcap(config, "final_logit_softcapping"),
    }


READERS: dict[str, Callable[[HFConfig], ModelSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}


def _spec(config: HFConfig, family: str, slides: list[bool] | None = None, **fields: Any) -> ModelSpec:
    """slides: which layers have a window, none by default; fields: where the family is not plain."""
    hidden_size, num_heads = config.value("hidden_size", int), config.value("num_attention_heads", int)
    head_dim = head_size(config.where, hidden_size, num_heads, stated=config.value_or("head_dim", 0))
    full, sliding = _ropes(config, head_dim, family)
    max_context = reach(full.scaling, config.value("max_position_embeddings", int))
    window = config.value_or("sliding_window", 0)
    each = windows(config.where, "sliding_window", window, slides or [False] * _layers(config))
    kinds, layers = layer_kinds(each, full, sliding, max_context)
    act = "hidden_activation" if family.startswith("gemma") else "hidden_act"
    config.refuse_unless(act, list(ACTIVATIONS), default=None)
    given: dict[str, Any] = {
        **PLAIN,
        "family": family,
        "vocab_size": config.value("vocab_size", int),
        "hidden_size": hidden_size,
        "intermediate_size": config.value("intermediate_size", int),
        "num_heads": num_heads,
        "num_kv_heads": config.value_or("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "layer_kinds": kinds,
        "layers": layers,
        "norm_eps": config.value("rms_norm_eps", float),
        "max_context": max_context,
        "tied_embeddings": config.value_or("tie_word_embeddings", False),
        "activation": ACTIVATIONS[config.value(act, str)],
        "attention_scale": attention_scale(head_dim),
        **fields,
    }
    return ModelSpec(**given)


def _ropes(config: HFConfig, head_dim: int, family: str) -> tuple[Rope, Rope]:
    """(of layers that see everything, of sliding ones)"""
    if family == "gemma3":
        return read_gemma3_ropes(config, head_dim)
    rope = read_rope(config, head_dim, family)
    return rope, rope


def _layers(config: HFConfig) -> int:
    return checked_layers(config.where, config.value("num_hidden_layers", int))


def _all_slide(config: HFConfig) -> list[bool]:
    """All layers, if there is a window at all."""
    return ["sliding_window" in config] * _layers(config)


def _last_slide(config: HFConfig) -> list[bool]:
    """Qwen: those that `layer_types` names, or those from `max_window_layers` on."""
    uses = config.value_or("use_sliding_window", False) and "sliding_window" in config
    slides = _layer_types(config)
    if not slides:
        first = config.value("max_window_layers", int)
        return [uses and i >= first for i in range(_layers(config))]
    if any(slides) and not uses:
        raise ModelSpecError(f"{config.where}: layer_types names {SLIDING!r}, and use_sliding_window is false")
    return slides


def _layer_types(config: HFConfig) -> list[bool]:
    """Which layers `layer_types` calls sliding; empty if there is no such key."""
    if "layer_types" not in config:
        return []
    types = config.values("layer_types", str)
    if len(types) != _layers(config):
        raise ModelSpecError(f"{config.where}: layer_types has {len(types)} entries for {_layers(config)} layers")
    if unknown := sorted(set(types) - {FULL, SLIDING}):
        raise ModelSpecError(
            f"{config.where}: layer_types names {unknown[0]!r}, which is not supported; "
            f"supported are {FULL!r} and {SLIDING!r}"
        )
    return [name == SLIDING for name in types]


def _softcap(config: HFConfig, key: str) -> float:
    """0 for null."""
    softcap = config.value_or(key, 0.0)
    if key in config and not softcap > 0:
        raise ModelSpecError(f"{config.where}: {key} = {softcap} should be positive, or null for none")
    return softcap
