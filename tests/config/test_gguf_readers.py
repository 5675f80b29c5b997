"""GGUF metadata of every architecture gives the same `ModelSpec`; whatever is not computed is refused by key and
value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from surefoot.checkpoint.errors import CheckpointError
from surefoot.config.engine_plan import CheckpointRef
from surefoot.config.model_readers import read_model_spec
from surefoot.config.model_spec import (
    FactorsRopeScaling,
    LayerKind,
    LinearRopeScaling,
    LongRopeScaling,
    ModelSpec,
    NoRopeScaling,
    Rope,
    YarnRopeScaling,
)
from tests.config.specs import ROPE, SPEC, spec

METADATA: dict[str, Any] = {
    "block_count": 3,
    "context_length": 2048,
    "embedding_length": 48,
    "feed_forward_length": 80,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 0.5**17,
    "rope.freq_base": 500_000.0,
    "rope.dimension_count": 8,
}
EMBEDDING = {"token_embd.weight": np.zeros((96, 48), np.float32)}
TENSORS = EMBEDDING | {"output.weight": np.zeros((96, 48), np.float32)}
FACTORS = np.array([1, 1, 2.5, 8], np.float32)
LONGROPE = {"rope_factors_short.weight": np.ones(4, np.float32), "rope_factors_long.weight": FACTORS}
GEMMA2 = {
    "activation": "gelu_tanh",
    "post_norms": True,
    "embedding_scale": 48**0.5,
    "tied_embeddings": True,
    "attention_softcap": 50.0,
    "logits_softcap": 30.0,
}
GEMMA3 = GEMMA2 | {"attention_softcap": 0.0, "logits_softcap": 0.0, "qk_norm": True}


def bias(name: str) -> dict[str, np.ndarray]:
    return {f"blk.0.{name}.bias": np.zeros(8, np.float32)}


def read_gguf(
    directory: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray], arch: str = "llama"
) -> ModelSpec:
    """metadata: keys without the architecture's name."""
    path = directory / "model.gguf"
    writer = gguf.GGUFWriter(path, arch)
    add = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
        bool: writer.add_bool,
    }
    for key, value in metadata.items():
        add[type(value)](f"{arch}.{key}", value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_model_spec(CheckpointRef(str(path), "gguf"))


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in METADATA.items() if name != key}


def test_gguf(tmp_path: Path) -> None:
    assert read_gguf(tmp_path, METADATA, TENSORS) == SPEC


SIXTEEN = dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 16)
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 512}


@pytest.mark.parametrize(
    "metadata, tensors, expected",
    [
        (METADATA, EMBEDDING, spec(tied_embeddings=True)),
        (without("attention.head_count_kv"), TENSORS, spec(num_kv_heads=6)),
        (without("rope.freq_base"), TENSORS, spec(rope={"theta": 10_000.0})),
        (METADATA | SIXTEEN, TENSORS, spec(rope={"size": 16}, head_dim=16, attention_scale=0.25)),
        (METADATA | {"attention.scale": 8**-0.5}, TENSORS, SPEC),
        (METADATA | {"attention.sliding_window": 64}, TENSORS, spec(windows=(64,))),
        (METADATA | {"attention.sliding_window": 4096}, TENSORS, SPEC),
        (METADATA, TENSORS | bias("attn_q"), spec(qkv_bias=True)),
        (METADATA, TENSORS | bias("attn_output"), spec(attention_out_bias=True)),
        (METADATA, TENSORS | bias("ffn_down"), spec(mlp_bias=True)),
        (
            METADATA | {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            TENSORS,
            spec(rope={"scaling": LinearRopeScaling(4.0)}),
        ),
        (METADATA | {"rope.scaling.factor": 4.0}, TENSORS, spec(rope={"scaling": LinearRopeScaling(4.0)})),
        (METADATA | {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, TENSORS, SPEC),
        (
            METADATA,
            TENSORS | {"rope_freqs.weight": FACTORS},
            spec(rope={"scaling": FactorsRopeScaling((1.0, 1.0, 2.5, 8.0), 1.0)}),
        ),
        (
            METADATA | YARN | {"rope.scaling.attn_factor": 0.5, "rope.scaling.yarn_beta_fast": 16.0},
            TENSORS,
            spec(rope={"scaling": YarnRopeScaling(4.0, 512, 16.0, 1.0, True, pytest.approx(0.569315, abs=1e-6))}),
        ),
        (
            METADATA | YARN | {"rope.scaling.yarn_attn_factor": 1.138629, "rope.scaling.yarn_ext_factor": 1.0},
            TENSORS,
            spec(rope={"scaling": YarnRopeScaling(4.0, 512, 32.0, 1.0, True, pytest.approx(1.138629, abs=1e-6))}),
        ),
    ],
)
def test_variants_of_llama(
    tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray], expected: ModelSpec
) -> None:
    assert read_gguf(tmp_path, metadata, tensors) == expected


@pytest.mark.parametrize(
    "arch, metadata, tensors, expected",
    [
        ("qwen2", METADATA, TENSORS | bias("attn_q"), spec(family="qwen2", qkv_bias=True)),
        ("qwen2", METADATA | {"attention.sliding_window": 2048}, TENSORS, spec(family="qwen2")),
        ("qwen3", METADATA, EMBEDDING, spec(family="qwen3", qk_norm=True, tied_embeddings=True)),
        (
            "phi3",
            METADATA | {"attention.sliding_window": 64, "rope.dimension_count": 6},
            TENSORS,
            spec(family="phi3", windows=(64,), rope={"size": 6}),
        ),
        (
            "phi3",
            METADATA | {"rope.scaling.original_context_length": 256, "rope.scaling.attn_factor": 1.25},
            TENSORS | LONGROPE,
            spec(
                family="phi3",
                rope={"scaling": LongRopeScaling((1.0,) * 4, (1.0, 1.0, 2.5, 8.0), 256, 1.25)},
            ),
        ),
        (
            "gemma2",
            without("rope.freq_base") | {"attention.sliding_window": 64},
            EMBEDDING,
            spec(family="gemma2", rope={"theta": 10_000.0}, windows=(0, 64), layers=(1, 0, 1), **GEMMA2),
        ),
        (
            "gemma2",
            METADATA | {"context_length": 8192, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 6.0},
            EMBEDDING,
            spec(
                family="gemma2",
                max_context=8192,
                windows=(0, 4096),
                layers=(1, 0, 1),
                **GEMMA2 | {"attention_softcap": 5.0, "logits_softcap": 6.0},
            ),
        ),
        (  # the largest one
            "gemma2",
            METADATA | SIXTEEN | {"block_count": 46},
            EMBEDDING,
            spec(
                family="gemma2",
                layers=(0,) * 46,
                rope={"size": 16},
                head_dim=16,
                attention_scale=8**-0.5,
                **GEMMA2,
            ),
        ),
        ("gemma3", METADATA, EMBEDDING, spec(family="gemma3", **GEMMA3)),
    ],
)
def test_other_architectures(
    tmp_path: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, np.ndarray], expected: ModelSpec
) -> None:
    assert read_gguf(tmp_path, metadata, tensors, arch) == expected


@pytest.mark.parametrize("slides", [{}, {"attention.sliding_window_pattern": 6}, [True] * 5 + [False, True]])
def test_gemma3(tmp_path: Path, slides: Any) -> None:
    """Local layers turn by their own theta, and without the scaling."""
    if isinstance(slides, list):
        slides = {"attention.sliding_window_pattern": slides}
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 20_000.0}
    metadata = METADATA | {"block_count": 7, "attention.sliding_window": 64} | scaled | slides
    got = read_gguf(tmp_path, metadata, EMBEDDING, "gemma3")
    assert got.layers == (1, 1, 1, 1, 1, 0, 1)
    assert got.layer_kinds == (
        LayerKind(0, Rope(ROPE.theta, LinearRopeScaling(8.0), 8)),
        LayerKind(64, Rope(20_000.0, NoRopeScaling(), 8)),
    )


@pytest.mark.parametrize(
    "metadata, tensors, message",
    [
        (without("block_count"), TENSORS, "lacks the metadata key 'llama.block_count'"),
        (METADATA | {"attention.head_count": [6, 6, 4]}, TENSORS, r"head_count should be one int, it is \[6, 6, 4\]"),
        (METADATA | {"expert_count": 8}, TENSORS, "llama.expert_count = 8 is not supported; supported is 0"),
        (METADATA | {"rope.dimension_count": 4}, TENSORS, "llama.rope.dimension_count = 4 .* supported is 8"),
        (METADATA | {"attention.value_length": 4}, TENSORS, "llama.attention.value_length = 4"),
        (METADATA | {"attention.causal": False}, TENSORS, "llama.attention.causal = False"),
        (METADATA | {"rope.scaling.type": "ntk"}, TENSORS, "rope.scaling.type = 'ntk' is not supported"),
        (METADATA | {"rope.scaling.type": "linear"}, TENSORS, "lacks the metadata key 'llama.rope.scaling.factor'"),
        (METADATA | {"rope.scale_linear": 4.0}, TENSORS, "rope.scale_linear = 4.0 is not supported"),
        (METADATA | {"rope.scaling.attn_factor": 1.25}, TENSORS, "rope.scaling.attn_factor = 1.25 is not supported"),
        (METADATA | YARN | {"rope.scaling.yarn_log_multiplier": 0.5}, TENSORS, "yarn_log_multiplier = 0.5"),
        (METADATA | YARN | {"rope.scaling.yarn_ext_factor": 0.5}, TENSORS, "yarn_ext_factor = 0.5"),
        (METADATA | YARN | {"rope.scaling.yarn_attn_factor": 1.0}, TENSORS, "yarn_attn_factor = 1.0 .* 1.1386"),
        (METADATA | {"rope.scaling.type": "longrope"}, TENSORS, "lacks the tensor 'rope_factors_short.weight'"),
        (METADATA, TENSORS | {"rope_freqs.weight": 0 * FACTORS}, "not positive.*FactorsRopeScaling"),
        (METADATA, {}, "lacks the tensor 'token_embd.weight'"),
        (METADATA, {"token_embd.weight": FACTORS}, r"'token_embd.weight' should be a matrix, its shape is \(4,\)"),
        (METADATA, TENSORS | {"rope_freqs.weight": FACTORS[:3].copy()}, r"should be F32\(4,\), it is F32\(3,\)"),
        (
            METADATA | {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            TENSORS | {"rope_freqs.weight": FACTORS},
            "both linear rope scaling and 'rope_freqs.weight'",
        ),
        (METADATA | {"block_count": 2**32 - 1}, TENSORS, "number of layers is 4294967295, it should be 1 to 4096"),
        (METADATA | {"attention.head_count": 0}, TENSORS, "not a multiple of its 0 attention heads"),
        (METADATA | {"embedding_length": 10**9, "attention.key_length": 8}, TENSORS, "the hidden size is 1000000000"),
        (METADATA | {"rope.freq_base": float("inf")}, TENSORS, "the rope theta is inf"),
        (METADATA | {"attention.scale": 0.5}, TENSORS, "attention.scale = 0.5 is not supported; supported is 0.35"),
    ],
)
def test_refused_ggufs(tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_gguf(tmp_path, metadata, tensors)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "arch, changes, message",
    [
        ("mamba", {}, r"general.architecture = 'mamba' is not supported; supported are llama, qwen2, .*gemma3"),
        ("qwen2", {"attention.sliding_window": 64}, "sliding_window = 64 .* does not say for which layers"),
        ("gemma3", {"attention.sliding_window_pattern": [True] * 4, "attention.sliding_window": 9}, "4 entries for 3"),
        ("gemma3", {"attention.sliding_window_pattern": 0, "attention.sliding_window": 9}, "= 0 should be positive"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "soft cap of attention is -1.0"),
        ("gemma2", {"rope.freq_base_swa": 500.0}, "freq_base_swa = 500.0 is not supported"),
        ("gemma3", {"attn_logit_softcapping": 2.0}, "attn_logit_softcapping = 2.0 is not supported"),
    ],
)
def test_refused_architectures(tmp_path: Path, arch: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_gguf(tmp_path, METADATA | changes, TENSORS, arch)


def test_the_default_model(default_model_path: Path) -> None:
    assert read_model_spec(CheckpointRef(str(default_model_path), "gguf")) == spec(
        rope={"theta": 100_000.0, "size": 64},
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        layers=(0,) * 30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        norm_eps=float(np.float32(1e-5)),
        max_context=8192,
        tied_embeddings=True,
        attention_scale=1 / 8,
    )
