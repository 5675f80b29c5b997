"""Every family against transformers, on tiny random weights: every logit, from safetensors and from GGUF.

The prompt is longer than three windows, and `Sequences` poisons every page that a step has no business with.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.config.engine_plan import LinearKernel
from tests.models.sequences import SLOTS, Sequences, read_spec
from tests.tiny_families import FAMILIES, WINDOW, Tiny, write_tiny, write_tiny_gemma3_with_vision, write_tiny_gguf

TOLERANCE = {"rtol": 0, "atol": 1e-4}
PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(77)]
CHUNKS = [1, 7, 16, len(PROMPT)]
NO_WINDOW_IN_GGUF = ("qwen2", "qwen3")  # these files do not say which layers have one

assert len(PROMPT) > 3 * WINDOW


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "short_factor": [1.0 + 0.05 * i for i in range(6)],
    "long_factor": [1.5 + 0.9 * i for i in range(6)],
    "partial_rotary_factor": 0.75,
}


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(request.param, tmp_path_factory.mktemp(request.param))


def assert_all_logits(
    tiny: Tiny, chunks: list[int], kernels: tuple[LinearKernel, ...] = ("dense", "native"), **options: Any
) -> None:
    wanted = tiny.logits(PROMPT)
    for kernel in kernels:
        sequences = Sequences(tiny.path, kernels=kernel, **options)
        for chunk in chunks:
            torch.testing.assert_close(sequences.chunked(PROMPT, chunk), wanted, **TOLERANCE)


def test_safetensors(tiny: Tiny) -> None:
    assert_all_logits(tiny, CHUNKS)


def test_gguf(tiny: Tiny, tmp_path: Path) -> None:
    if tiny.family in NO_WINDOW_IN_GGUF:
        tiny = write_tiny(tiny.family, tmp_path, use_sliding_window=False)
    assert_all_logits(write_tiny_gguf(tiny, tmp_path / "tiny.gguf"), CHUNKS)


def test_greedy_tokens(tiny: Tiny) -> None:
    assert Sequences(tiny.path).greedy(PROMPT, 32) == tiny.greedy(PROMPT, 32)


@pytest.mark.parametrize("page_size", [3, 64])
def test_other_page_sizes(tiny: Tiny, page_size: int) -> None:
    assert_all_logits(tiny, [7, 40], page_size=page_size)


def test_steps_of_any_rows(tiny: Tiny) -> None:
    """Decode rows and prefill rows of several sequences in one step, each row at its own place: every logit is the one
    of the sequence alone."""
    rng = random.Random(7)
    texts = [[rng.randrange(300) for _ in range(rng.randrange(2, 120))] for _ in range(SLOTS)]
    wanted = [tiny.logits(text) for text in texts]
    sequences = Sequences(tiny.path)
    mixed_steps = 0
    while any(length < len(text) for length, text in zip(sequences.lengths, texts, strict=True)):
        decode, prefill, expected = [], [], []
        for slot, text in enumerate(texts):
            start, left = sequences.lengths[slot], len(text) - sequences.lengths[slot]
            if not left or rng.random() < 0.3:
                continue
            if start and rng.random() < 0.7:
                decode.append((slot, text[start]))
            else:
                prefill.append((slot, text[start : start + min(left, rng.randrange(1, 40))]))
        for slot, tokens in [(slot, [token]) for slot, token in decode] + prefill:
            start = sequences.lengths[slot]
            expected.append(wanted[slot][start : start + len(tokens)])
        if expected:
            torch.testing.assert_close(sequences.step(decode, prefill), torch.cat(expected), **TOLERANCE)
            mixed_steps += bool(decode and prefill)
    assert mixed_steps > 5


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_key_value_heads": 6}),
    ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("llama", {"head_dim": 10, "num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 35}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    ("llama", rope("linear", factor=4.0)),
    (
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    ("llama", rope("dynamic", factor=4.0)),
    ("llama", rope("yarn", **YARN)),
    ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=512, truncate=False, beta_fast=4)),
    ("llama", rope("yarn", **YARN, attention_factor=1.3)),
    ("llama", rope("yarn", **YARN, mscale=0.7, mscale_all_dim=1.2)),
    ("llama", rope("yarn", **YARN | {"factor": None})),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 16}),
    ("mistral", {"sliding_window": 5, "num_key_value_heads": 6}),
    ("mistral", {"sliding_window": 1}),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"] * 2, "tie_word_embeddings": True}),
    ("qwen2", {"use_sliding_window": False}),
    ("qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
    ("qwen3", {"max_window_layers": 0, "sliding_window": 7, **rope("yarn", **YARN)}),
    ("phi3", {"sliding_window": None, "partial_rotary_factor": 0.5}),
    ("phi3", {"partial_rotary_factor": 1.0, "num_key_value_heads": 6}),
    ("gemma2", {"query_pre_attn_scalar": 24, "sliding_window": 5}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma2", {"attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    ("gemma2", {"layer_types": ["full_attention"] * 4, "num_key_value_heads": 6}),
    ("gemma3", {"final_logit_softcapping": 5.0, "query_pre_attn_scalar": 24, "attention_bias": True}),
    ("gemma3", {"sliding_window": 33, "layer_types": ["full_attention", "sliding_attention"] * 3 + ["full_attention"]}),
    (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            }
        },
    ),
]


def name(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(value)


@pytest.mark.parametrize("family, changes", VARIANTS, ids=name)
def test_variants(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    assert_all_logits(write_tiny(family, tmp_path, **changes), [7])


GGUF_VARIANTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}, {}),
    ("llama", {"tie_word_embeddings": True, **rope("linear", factor=4.0)}, {}),
    ("mistral", {"sliding_window": None}, {}),
    ("qwen2", {"use_sliding_window": False, "tie_word_embeddings": True, **rope("yarn", **YARN)}, {}),
    ("qwen3", {"use_sliding_window": False, "attention_bias": True}, {}),
    (
        "qwen3",
        {"use_sliding_window": False, **rope("yarn", **YARN, beta_fast=16, attention_factor=1.5)},
        {
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.attn_factor": 1.5 / (0.1 * math.log(4) + 1),  # besides YaRN's own
        },
    ),
    ("phi3", {"sliding_window": None, "partial_rotary_factor": 0.5}, {}),
    ("gemma2", {"sliding_window": 5, "num_key_value_heads": 6}, {}),
    ("gemma3", {"final_logit_softcapping": 5.0}, {}),
    ("gemma3", {"num_hidden_layers": 4, "sliding_window_pattern": 2}, {"attention.sliding_window_pattern": 2}),
    (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            }
        },
        {},
    ),
]


@pytest.mark.parametrize("family, changes, metadata", GGUF_VARIANTS, ids=name)
def test_gguf_variants(tmp_path: Path, family: str, changes: dict[str, Any], metadata: dict[str, Any]) -> None:
    tiny = write_tiny(family, tmp_path, **changes)
    assert_all_logits(write_tiny_gguf(tiny, tmp_path / "tiny.gguf", metadata), [7])


def test_gguf_rope_factors_are_llama3_scaling(tmp_path: Path) -> None:
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    tiny = write_tiny("llama", tmp_path, **rope("llama3", factor=8.0, **bands))
    assert_all_logits(write_tiny_gguf(tiny, tmp_path / "tiny.gguf"), [7])


@pytest.mark.parametrize("original", [32, 256], ids=["long", "short"])
@pytest.mark.parametrize("format", ["safetensors", "gguf"])
def test_longrope_is_chosen_by_the_longest_sequence(tmp_path: Path, original: int, format: str) -> None:
    """The prompt is beyond the shorter original context and within the longer one; so is the server's maximum."""
    longrope = rope("longrope", **LONGROPE) | {"original_max_position_embeddings": original}
    tiny = write_tiny("phi3", tmp_path, **longrope)
    if format == "gguf":
        tiny = write_tiny_gguf(tiny, tmp_path / "tiny.gguf")
    assert_all_logits(tiny, [7, 77], max_model_len=256)


def test_longrope_of_another_family(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)], "factor": 6.0}
    assert_all_logits(
        write_tiny("llama", tmp_path, **rope("longrope", **factors, original_max_position_embeddings=32)), [7]
    )


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_gemma3_that_also_sees(tmp_path: Path, prefix: str) -> None:
    """Files of older and newer versions name the text model differently."""
    from safetensors.torch import load_file, save_file

    tiny = write_tiny_gemma3_with_vision(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert any(name.startswith("vision_tower.") for name in tensors)
    save_file({name.replace("language_model.model.", prefix): tensor for name, tensor in tensors.items()}, file)
    assert_all_logits(tiny, [7])


@pytest.mark.parametrize("family", ["gemma2", "qwen2", "phi3"])
def test_fp16_weights_are_fp16_weights(tmp_path: Path, family: str) -> None:
    """The fast paths equal transformers with the same rounded matrices, to the same tolerance."""
    tiny = write_tiny(family, tmp_path)
    with torch.no_grad():
        for parameter in tiny.model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.half())
    assert_all_logits(tiny, [7, 77], kernels=("fp16_packed", "native"), weight_dtype="float16")


def test_layers_that_attend_alike_share_pages(tmp_path: Path) -> None:
    """The kind that sees most comes first; a window that holds the whole context is none."""
    spec = read_spec(write_tiny("gemma3", tmp_path).path)
    assert [kind.window for kind in spec.layer_kinds] == [0, WINDOW]
    assert spec.layers == (1, 1, 1, 1, 1, 0, 1)
    spec = read_spec(write_tiny("gemma2", tmp_path, sliding_window=512).path)
    assert [kind.window for kind in spec.layer_kinds] == [0]
