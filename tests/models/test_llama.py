"""The Llama family against transformers, on tiny random weights: every logit, from safetensors and from GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from surefoot.models.weights import WeightNamesError
from tests.runner.steps import chunked_logits, greedy, make_runner
from tests.tiny import TinyLlama, write_tiny_llama

TOLERANCE = {"rtol": 0, "atol": 1e-4}
PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(77)]
PAGES = [11, 3, 7, 0, 5, 9, 2, 14]

CONFIGS: dict[str, dict[str, Any]] = {
    "grouped-query": {},
    "multi-head": {"num_key_value_heads": 6},
    "one-kv-head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "odd-head": {"head_dim": 10, "num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 35},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    tiny = write_tiny_llama(tmp_path, **changes)
    got = chunked_logits(make_runner(tmp_path), PROMPT, 1, PAGES)
    torch.testing.assert_close(got, tiny.logits(PROMPT), **TOLERANCE)


@pytest.mark.parametrize("chunk", [7, 16, 77], ids=["odd", "page", "whole"])
def test_logits_of_chunks_are_those_of_transformers(tiny_llama: TinyLlama, chunk: int) -> None:
    got = chunked_logits(make_runner(tiny_llama.path), PROMPT, chunk, PAGES)
    ends = [min(start + chunk, len(PROMPT)) - 1 for start in range(0, len(PROMPT), chunk)]
    torch.testing.assert_close(got, tiny_llama.logits(PROMPT)[ends], **TOLERANCE)


def test_packed_fp16_weights_are_fp16_weights(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    """The fast path equals transformers with the same rounded matrices, to the same tolerance."""
    rounded = write_tiny_llama(tmp_path)
    with torch.no_grad():
        for name, parameter in rounded.model.named_parameters():
            if "norm" not in name:
                parameter.copy_(parameter.half())
    runner = make_runner(tiny_llama.path, weight_dtype="float16")
    got = chunked_logits(runner, PROMPT, 20, PAGES)
    torch.testing.assert_close(got, rounded.logits(PROMPT)[[19, 39, 59, 76]], **TOLERANCE)


def test_greedy_tokens_are_those_of_transformers(tiny_llama: TinyLlama) -> None:
    got = greedy(make_runner(tiny_llama.path), PROMPT, 24, PAGES)
    assert got == tiny_llama.greedy(PROMPT, 24)


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    tiny = write_tiny_llama(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    got = chunked_logits(make_runner(tmp_path), PROMPT, 77, PAGES)
    torch.testing.assert_close(got, tiny.logits(PROMPT)[-1:], **TOLERANCE)


def write_gguf(tiny: TinyLlama, path: Path, rope_factors: list[float] | None = None) -> None:
    """As llama.cpp's converter does: its names, and q and k with interleaved rotary pairs."""
    config = tiny.model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_context_length(config.max_position_embeddings)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in tiny.model.state_dict().items():
        weight = parameter.numpy()
        for part, count in heads.items():
            if part in name:
                weight = weight.reshape(count, 2, config.head_dim // 2, -1).swapaxes(1, 2).reshape(weight.shape)
        found = names.get_name(name, try_suffixes=(".weight",))
        assert found is not None
        writer.add_tensor(found, np.ascontiguousarray(weight))
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_logits_are_those_of_transformers(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    write_gguf(tiny_llama, tmp_path / "tiny.gguf")
    got = chunked_logits(make_runner(tmp_path / "tiny.gguf"), PROMPT, 77, PAGES)
    torch.testing.assert_close(got, tiny_llama.logits(PROMPT)[-1:], **TOLERANCE)


def test_gguf_rope_factors_are_llama3_scaling(tmp_path: Path) -> None:
    tiny = write_tiny_llama(tmp_path, **CONFIGS["llama3-rope"])
    plain = 500000.0 ** -(np.arange(0, 16, 2) / 16)
    scaled = tiny.model.model.rotary_emb.inv_freq.numpy()
    write_gguf(tiny, tmp_path / "tiny.gguf", list(plain / scaled))
    got = chunked_logits(make_runner(tmp_path / "tiny.gguf"), PROMPT, 77, PAGES)
    torch.testing.assert_close(got, tiny.logits(PROMPT)[-1:], **TOLERANCE)


def test_wrong_tensors_are_all_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_tiny_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    tensors["lm_head.weight"] = torch.ones(301, 47)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightNamesError) as caught:
        make_runner(tmp_path)
    message = str(caught.value)
    assert "4 tensors" in message
    for line in (
        "missing: model.norm.weight [48]",
        "missing: model.layers.1.mlp.up_proj.weight [80, 48]",
        "unused: model.layers.0.self_attn.q_norm.weight [16]",
        "wrong shape: lm_head.weight is [301, 47], the config says [301, 48]",
    ):
        assert line in message


def test_dummy_weights_follow_the_seed_alone(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()

    def logits(seed: int) -> torch.Tensor:
        return chunked_logits(make_runner(tmp_path, load_format="dummy", seed=seed), PROMPT, 77, PAGES)

    assert torch.equal(logits(1), logits(1))
    assert not torch.allclose(logits(1), logits(2))
