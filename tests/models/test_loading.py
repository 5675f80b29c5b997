"""Checkpoints as files: shards, copies, old names, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from surefoot.models.registry import NAMINGS, weight_rules
from surefoot.models.weights import WeightNamesError
from surefoot.runner.weight_loader import CheckpointWeights, DummyTensors
from tests.models.sequences import Sequences, read_spec
from tests.tiny_families import FAMILIES, write_tiny

PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(40)]
Tensors = dict[str, torch.Tensor]


def edit(directory: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_every_family_that_is_written_has_names() -> None:
    assert set(FAMILIES) == set(NAMINGS)


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    tiny = write_tiny("gemma3", tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    got = Sequences(tmp_path).chunked(PROMPT, 40)
    torch.testing.assert_close(got, tiny.logits(PROMPT), rtol=0, atol=1e-4)


def test_frequencies_of_old_files_are_left_alone(tmp_path: Path) -> None:
    tiny = write_tiny("mistral", tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.3.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    torch.testing.assert_close(Sequences(tmp_path).chunked(PROMPT, 40), tiny.logits(PROMPT), rtol=0, atol=1e-4)


def test_a_head_beside_the_embedding_that_it_is_tied_to(tmp_path: Path) -> None:
    """An equal copy is left alone. With another one, transformers would not tie them: the user has to say so."""
    tiny = write_tiny("gemma2", tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    torch.testing.assert_close(Sequences(tmp_path).chunked(PROMPT, 40), tiny.logits(PROMPT), rtol=0, atol=1e-4)
    edit(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(WeightNamesError, match=r"lm_head.weight differs .* set tie_word_embeddings to false"):
        Sequences(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(300, 48)}))
    with pytest.raises(WeightNamesError, match=r"wrong shape: lm_head.weight is \[300, 48\]"):
        Sequences(tmp_path)


def test_a_tensor_under_two_names(tmp_path: Path) -> None:
    write_tiny("gemma3", tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"language_model.model.norm.weight": torch.ones(48)}))
    with pytest.raises(WeightNamesError, match=r"under another name too: .*model\.norm\.weight"):
        Sequences(tmp_path)


def test_wrong_tensors_are_all_named(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.k_proj.bias"]
        tensors["model.layers.0.self_attn.o_proj.bias"] = torch.ones(96)
        tensors["lm_head.weight"] = torch.ones(301, 47)

    write_tiny("qwen2", tmp_path)
    edit(tmp_path, change)
    with pytest.raises(WeightNamesError) as caught:
        Sequences(tmp_path)
    message = str(caught.value)
    assert "4 tensors" in message
    for line in (
        "missing: model.norm.weight [96]",
        "missing: model.layers.1.self_attn.k_proj.bias [32]",
        "unused: model.layers.0.self_attn.o_proj.bias [96]",
        "wrong shape: lm_head.weight is [301, 47], the config says [301, 96]",
    ):
        assert line in message


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_follow_the_seed_alone(tmp_path: Path, family: str) -> None:
    """They are what the rules ask for: norms that scale by one, whatever the file would store, and no biases."""
    write_tiny(family, tmp_path)
    rules = weight_rules(read_spec(tmp_path), "safetensors")

    def take(parameter: str, seed: int) -> torch.Tensor:
        return CheckpointWeights(DummyTensors(rules, seed), rules, lambda *_: None).take(parameter)

    assert torch.equal(take("layers.1.qkv", 1), take("layers.1.qkv", 1))
    assert not torch.equal(take("layers.1.qkv", 1), take("layers.1.qkv", 2))
    assert not torch.equal(take("layers.1.qkv", 1), take("layers.2.qkv", 1))
    assert 0.01 < take("embedding", 1).std() < 0.03
    assert torch.equal(take("norm", 1), torch.ones_like(take("norm", 1)))
    if family == "qwen2":
        assert not take("layers.1.qkv_bias", 1).any()
