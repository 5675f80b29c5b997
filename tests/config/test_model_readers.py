"""config.json and GGUF metadata give the same `ModelSpec`; whatever is not computed is refused by key and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from msgspec.structs import replace
from transformers import LlamaConfig

from surefoot.checkpoint.errors import CheckpointError, ModelSpecError
from surefoot.config.engine_plan import CheckpointRef
from surefoot.config.model_readers import read_model_spec
from surefoot.config.model_spec import (
    FactorsRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelSpec,
    NoRopeScaling,
)

SPEC = ModelSpec(
    family="llama",
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=0.5**17,  # exact in float32, as GGUF stores it
    rope_theta=500_000.0,
    rope_scaling=NoRopeScaling(),
    max_context=2048,
    tied_embeddings=False,
)
CONFIG = {
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


def read_config(directory: Path, config: dict[str, Any]) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(config))
    return read_model_spec(CheckpointRef(str(directory), "safetensors"))


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in CONFIG.items() if name != key}


def test_config(tmp_path: Path) -> None:
    assert read_config(tmp_path, CONFIG) == SPEC


@pytest.mark.parametrize(
    "config, changes",
    [
        (CONFIG | {"head_dim": 16}, {"head_dim": 16}),
        (CONFIG | {"head_dim": None}, {}),
        (CONFIG | {"tie_word_embeddings": True}, {"tied_embeddings": True}),
        (CONFIG | {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "use_cache": True}, {}),
        (without("num_key_value_heads"), {"num_kv_heads": 6}),
        (without("rope_theta"), {"rope_theta": 10_000.0}),
        (without("rope_theta") | {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, {"rope_theta": 7e4}),
        (CONFIG | {"rope_theta": 10_000}, {"rope_theta": 10_000.0}),
        (CONFIG | {"rope_scaling": {"type": "linear", "factor": 4.0}}, {"rope_scaling": LinearRopeScaling(4.0)}),
        (
            CONFIG | {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_scaling": Llama3RopeScaling(8.0, 1.0, 4.0, 8192)},
        ),
        (
            without("rope_theta") | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 3e5, **LLAMA3}},
            {"rope_theta": 3e5, "rope_scaling": Llama3RopeScaling(8.0, 1.0, 4.0, 8192)},
        ),
    ],
)
def test_variants_of_config(tmp_path: Path, config: dict[str, Any], changes: dict[str, Any]) -> None:
    assert read_config(tmp_path, config) == replace(SPEC, **changes)


def test_what_transformers_writes(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3}
    sizes = {key: CONFIG[key] for key in CONFIG if key not in ("rope_theta", "rope_scaling", "model_type")}
    LlamaConfig(**sizes, rope_parameters=rope).save_pretrained(tmp_path)
    spec = read_model_spec(CheckpointRef(str(tmp_path), "safetensors"))
    assert spec == replace(SPEC, rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 8192))


@pytest.mark.parametrize(
    "config, message",
    [
        (
            CONFIG | {"architectures": ["MistralForCausalLM"]},
            r"architectures = \['MistralForCausalLM'\] is not supported",
        ),
        (
            without("architectures") | {"model_type": "gemma"},
            "model_type = 'gemma' is not supported; supported is 'llama'",
        ),
        (CONFIG | {"attention_bias": True}, "attention_bias = True is not supported; supported is False"),
        (CONFIG | {"mlp_bias": True}, "mlp_bias = True"),
        (CONFIG | {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported is 'silu'"),
        (CONFIG | {"quantization_config": {"quant_method": "awq"}}, "quantization_config = {'quant_method': 'awq'}"),
        (
            CONFIG | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_type = 'yarn' .* 'linear' and 'llama3'",
        ),
        (CONFIG | {"rope_scaling": {"type": "linear"}}, "config.json, rope_scaling lacks 'factor'"),
        (CONFIG | {"rope_scaling": "linear"}, "rope_scaling = 'linear' should be an object or null"),
        (CONFIG | {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        (without("hidden_size"), "config.json lacks 'hidden_size'"),
        (CONFIG | {"num_hidden_layers": "3"}, "num_hidden_layers should be one int, it is '3'"),
        (CONFIG | {"vocab_size": True}, "vocab_size should be one int, it is True"),
        (CONFIG | {"num_hidden_layers": 0}, "the number of layers is 0, it should be positive"),
        (CONFIG | {"num_attention_heads": 0}, "not a multiple of its 0 attention heads"),
        (CONFIG | {"num_key_value_heads": 4}, "6 attention heads cannot share 4 key-value heads"),
        (
            CONFIG | {"rope_scaling": {"type": "linear", "factor": 0}},
            "a number that is not positive: LinearRopeScaling",
        ),
        (
            CONFIG | {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            "not positive: Llama3RopeScaling",
        ),
        (CONFIG | {"head_dim": 7}, "even head size, it is 7"),
        (CONFIG | {"hidden_size": 50}, "hidden size 50 is not a multiple of its 6 attention heads"),
    ],
)
def test_refused_configs(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelSpecError, match=message) as caught:
        read_config(tmp_path, config)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("text, message", [("{", "is not valid JSON"), ("[]", "holds list, not a JSON object")])
def test_damaged_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelSpecError, match=message):
        read_model_spec(CheckpointRef(str(tmp_path), "safetensors"))


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelSpecError, match=r"config\.json cannot be read: No such file"):
        read_model_spec(CheckpointRef(str(tmp_path), "safetensors"))


METADATA = {
    "llama.block_count": 3,
    "llama.context_length": 2048,
    "llama.embedding_length": 48,
    "llama.feed_forward_length": 80,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 0.5**17,
    "llama.rope.freq_base": 500_000.0,
    "llama.rope.dimension_count": 8,
}
TENSORS = {"token_embd.weight": np.zeros((96, 48), np.float32), "output.weight": np.zeros((96, 48), np.float32)}
FACTORS = np.array([1, 1, 2.5, 8], np.float32)


def read_gguf(
    directory: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray], arch: str = "llama"
) -> ModelSpec:
    path = directory / "model.gguf"
    writer = gguf.GGUFWriter(path, arch)
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in metadata.items():
        add[type(value)](key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_model_spec(CheckpointRef(str(path), "gguf"))


def without_metadata(key: str) -> dict[str, Any]:
    return {name: value for name, value in METADATA.items() if name != key}


def test_gguf(tmp_path: Path) -> None:
    assert read_gguf(tmp_path, METADATA, TENSORS) == SPEC


@pytest.mark.parametrize(
    "metadata, tensors, changes",
    [
        (METADATA, {"token_embd.weight": TENSORS["token_embd.weight"]}, {"tied_embeddings": True}),
        (without_metadata("llama.attention.head_count_kv"), TENSORS, {"num_kv_heads": 6}),
        (without_metadata("llama.rope.freq_base"), TENSORS, {"rope_theta": 10_000.0}),
        (
            METADATA
            | dict.fromkeys(
                ("llama.attention.key_length", "llama.attention.value_length", "llama.rope.dimension_count"), 16
            ),
            TENSORS,
            {"head_dim": 16},
        ),
        (
            METADATA | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            TENSORS,
            {"rope_scaling": LinearRopeScaling(4.0)},
        ),
        (
            METADATA,
            TENSORS | {"rope_freqs.weight": FACTORS},
            {"rope_scaling": FactorsRopeScaling((1.0, 1.0, 2.5, 8.0))},
        ),
    ],
)
def test_variants_of_gguf(
    tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray], changes: dict[str, Any]
) -> None:
    assert read_gguf(tmp_path, metadata, tensors) == replace(SPEC, **changes)


@pytest.mark.parametrize(
    "metadata, tensors, message",
    [
        (without_metadata("llama.block_count"), TENSORS, "lacks the metadata key 'llama.block_count'"),
        (
            METADATA | {"llama.attention.head_count": [6, 6, 4]},
            TENSORS,
            r"head_count should be one int, it is \[6, 6, 4\]",
        ),
        (METADATA | {"llama.expert_count": 8}, TENSORS, "llama.expert_count = 8 is not supported; supported is 0"),
        (METADATA | {"llama.rope.dimension_count": 4}, TENSORS, "llama.rope.dimension_count = 4 .* supported is 8"),
        (METADATA | {"llama.attention.value_length": 4}, TENSORS, "llama.attention.value_length = 4"),
        (METADATA | {"llama.rope.scaling.type": "yarn"}, TENSORS, "llama.rope.scaling.type = 'yarn' is not supported"),
        (
            METADATA | {"llama.rope.scaling.type": "linear"},
            TENSORS,
            "lacks the metadata key 'llama.rope.scaling.factor'",
        ),
        (METADATA, TENSORS | {"rope_freqs.weight": 0 * FACTORS}, "not positive: FactorsRopeScaling"),
        (METADATA, {}, "lacks the tensor 'token_embd.weight'"),
        (METADATA, TENSORS | {"blk.0.attn_q.bias": FACTORS}, "the tensor 'blk.0.attn_q.bias' is a bias"),
        (METADATA, TENSORS | {"rope_freqs.weight": FACTORS[:3].copy()}, r"should be F32\(4,\), it is F32\(3,\)"),
        (
            METADATA | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            TENSORS | {"rope_freqs.weight": FACTORS},
            "both linear rope scaling and 'rope_freqs.weight'",
        ),
    ],
)
def test_refused_ggufs(tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_gguf(tmp_path, metadata, tensors)
    assert str(tmp_path) in str(caught.value)


def test_another_architecture(tmp_path: Path) -> None:
    with pytest.raises(ModelSpecError, match=r"general\.architecture = 'qwen2' is not supported; supported is 'llama'"):
        read_gguf(tmp_path, METADATA, TENSORS, arch="qwen2")


def test_the_default_model(default_model_path: Path) -> None:
    assert read_model_spec(CheckpointRef(str(default_model_path), "gguf")) == ModelSpec(
        family="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        norm_eps=float(np.float32(1e-5)),
        rope_theta=100_000.0,
        rope_scaling=NoRopeScaling(),
        max_context=8192,
        tied_embeddings=True,
    )
