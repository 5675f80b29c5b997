"""config.json of every family gives a `ModelSpec`; whatever is not computed is refused by key and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers

from surefoot.config.engine_plan import CheckpointRef
from surefoot.config.hf_readers import ARCHITECTURES, DEFAULTS
from surefoot.config.model_readers import read_model_spec
from surefoot.config.model_spec import (
    DynamicRopeScaling,
    LayerKind,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ModelSpec,
    NoRopeScaling,
    Rope,
    YarnRopeScaling,
    context_conflict,
    for_context,
)
from tests.config.specs import SPEC, spec

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 0.5**17,
    "rope_theta": 500_000.0,
    "rope_scaling": None,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "factor": 8,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FACTORS = [1.0, 1.0, 2.5, 8.0]
LONGROPE = {"type": "longrope", "short_factor": [1] * 4, "long_factor": FACTORS}


def read_config(directory: Path, config: dict[str, Any]) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(config))
    return read_model_spec(CheckpointRef(str(directory), "safetensors"))


def without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in CONFIG.items() if name not in keys} | changes


def of_family(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    return CONFIG | {"architectures": [architecture], "model_type": model_type} | changes


def mistral(**changes: Any) -> dict[str, Any]:
    return of_family("MistralForCausalLM", "mistral", **changes)


def qwen2(**changes: Any) -> dict[str, Any]:
    return of_family("Qwen2ForCausalLM", "qwen2", **changes)


def phi3(**changes: Any) -> dict[str, Any]:
    return of_family("Phi3ForCausalLM", "phi3", original_max_position_embeddings=256, **changes)


def gemma2(**changes: Any) -> dict[str, Any]:
    return of_family("Gemma2ForCausalLM", "gemma2", **{"head_dim": 8, "sliding_window": 64, **changes})


def test_config(tmp_path: Path) -> None:
    assert read_config(tmp_path, CONFIG) == SPEC


@pytest.mark.parametrize(
    "config, expected",
    [
        (CONFIG | {"head_dim": 16}, spec(rope={"size": 16}, head_dim=16, attention_scale=0.25)),
        (CONFIG | {"head_dim": None}, SPEC),
        (CONFIG | {"tie_word_embeddings": True}, spec(tied_embeddings=True)),
        (CONFIG | {"tie_word_embeddings": None}, SPEC),
        (CONFIG | {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "use_cache": True}, SPEC),
        (CONFIG | {"attention_bias": True}, spec(qkv_bias=True, attention_out_bias=True)),
        (CONFIG | {"mlp_bias": True}, spec(mlp_bias=True)),
        (CONFIG | {"hidden_act": "gelu_pytorch_tanh"}, spec(activation="gelu_tanh")),
        (CONFIG | {"sliding_window": 7}, SPEC),  # no key of Llama's
        (without("num_key_value_heads"), spec(num_kv_heads=6)),
        (without("rope_theta"), spec(rope={"theta": 10_000.0})),
        (without("architectures"), SPEC),
        (without("rope_theta", rope_parameters={"rope_type": "default", "rope_theta": 7e4}), spec(rope={"theta": 7e4})),
        (CONFIG | {"rope_theta": 10_000}, spec(rope={"theta": 10_000.0})),
        (
            CONFIG | {"rope_scaling": {"type": "linear", "factor": 4.0}},
            spec(rope={"scaling": LinearRopeScaling(4.0)}),
        ),
        (
            CONFIG | {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            spec(rope={"scaling": Llama3RopeScaling(8.0, 1.0, 4.0, 8192)}),
        ),
        (
            without("rope_theta", rope_parameters={"rope_type": "llama3", "rope_theta": 3e5, **LLAMA3}),
            spec(rope={"theta": 3e5, "scaling": Llama3RopeScaling(8.0, 1.0, 4.0, 8192)}),
        ),
        (
            CONFIG | {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            spec(rope={"scaling": DynamicRopeScaling(4.0, 2048)}),
        ),
        (
            CONFIG | {"rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": 1.5, "truncate": False}},
            spec(rope={"scaling": YarnRopeScaling(4.0, 2048, 32.0, 1.0, False, 1.5)}, max_context=8192),
        ),
        (mistral(), spec(family="mistral")),  # the default window of 4096 is more than the context
        (mistral(sliding_window=64), spec(family="mistral", windows=(64,))),
        (mistral(sliding_window=None), spec(family="mistral")),
        (qwen2(), spec(family="qwen2", qkv_bias=True)),
        (
            qwen2(use_sliding_window=True, sliding_window=64, max_window_layers=1),
            spec(family="qwen2", qkv_bias=True, windows=(0, 64), layers=(0, 1, 1)),
        ),
        (
            qwen2(use_sliding_window=True, sliding_window=64, layer_types=["sliding_attention"] * 3),
            spec(family="qwen2", qkv_bias=True, windows=(64,)),
        ),
        (
            of_family("Qwen3ForCausalLM", "qwen3", head_dim=8, attention_bias=True),
            spec(family="qwen3", qk_norm=True, qkv_bias=True, attention_out_bias=True),
        ),
        (
            phi3(partial_rotary_factor=0.75, sliding_window=64),
            spec(family="phi3", windows=(64,), rope={"size": 6}),
        ),
        (
            phi3(rope_scaling=LONGROPE | {"attention_factor": 1.25}),
            spec(family="phi3", rope={"scaling": LongRopeScaling((1.0,) * 4, tuple(FACTORS), 256, 1.25)}),
        ),
        (
            phi3(rope_scaling=LONGROPE | {"type": "su", "factor": 1.0}),
            spec(family="phi3", rope={"scaling": LongRopeScaling((1.0,) * 4, tuple(FACTORS), 256, 1.0)}),
        ),
    ],
)
def test_variants_of_config(tmp_path: Path, config: dict[str, Any], expected: ModelSpec) -> None:
    got = read_config(tmp_path, config)
    assert got == expected
    assert msgspec.json.decode(msgspec.json.encode(got), type=ModelSpec) == got, "a plan crosses processes"


def test_gemma2(tmp_path: Path) -> None:
    got = read_config(tmp_path, without("hidden_act", "tie_word_embeddings") | gemma2(query_pre_attn_scalar=24))
    assert got == spec(
        family="gemma2",
        windows=(0, 64),
        layers=(1, 0, 1),
        activation="gelu_tanh",
        post_norms=True,
        embedding_scale=48**0.5,
        attention_scale=24**-0.5,
        attention_softcap=50.0,
        logits_softcap=30.0,
    )


def test_what_a_gemma3_file_of_the_hub_leaves_out(tmp_path: Path) -> None:
    """The first files of the models that also see state these keys of the text model, and no others."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    got = read_config(
        tmp_path, {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    )
    assert (got.vocab_size, got.num_heads, got.num_kv_heads, got.head_dim) == (262_208, 8, 4, 256)
    assert (got.max_context, got.tied_embeddings, got.attention_scale) == (131_072, True, 1 / 16)
    assert got.layer_kinds == (
        LayerKind(0, Rope(1_000_000.0, LinearRopeScaling(8.0), 256)),
        LayerKind(1024, Rope(10_000.0, NoRopeScaling(), 256)),
    )
    assert got.layers == tuple(0 if i % 6 == 5 else 1 for i in range(34))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_transformers_writes(tmp_path: Path, architecture: str) -> None:
    """A config of class defaults, written in full and written by its differences, reads the same; so do the defaults
    that a reader fills in."""
    config = getattr(transformers, architecture).config_class()
    config.architectures = [architecture]
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    full = read_model_spec(CheckpointRef(str(tmp_path), "safetensors"))
    config.save_pretrained(tmp_path)
    assert read_model_spec(CheckpointRef(str(tmp_path), "safetensors")) == full
    text = config.get_text_config()
    for key, value in DEFAULTS[full.family].items():
        if key not in ("sliding_window", "sliding_window_pattern"):  # transformers rewrites these
            assert getattr(text, key) == value, key


def test_longrope_is_chosen_by_the_longest_sequence(tmp_path: Path) -> None:
    read = read_config(tmp_path, phi3(rope_scaling=LONGROPE))
    chosen = [for_context(read, length).layer_kinds[0].rope.scaling.factors for length in (256, 257)]
    assert chosen == [(1.0,) * 4, tuple(FACTORS)]
    assert for_context(SPEC, 100) == SPEC


def test_a_context_that_the_model_cannot_have(tmp_path: Path) -> None:
    assert context_conflict(SPEC, 2048) == ""
    assert context_conflict(SPEC, 2049) == "--max-model-len 2049 is more than the model's context of 2048: lower it"
    dynamic = read_config(tmp_path, CONFIG | {"rope_scaling": {"type": "dynamic", "factor": 4.0}})
    assert context_conflict(dynamic, 2048) == ""
    assert "which is not implemented: use --max-model-len 2048" in context_conflict(dynamic, 2049)
