"""Tiny random checkpoints, written as a user would have them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

CORPUS = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs", "0123456789"] * 4

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyModel:
    path: Path  # a directory, or a .gguf file
    model: Any  # of transformers: fp32, on the CPU

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """What transformers computes: [tokens, vocab]."""
        with torch.inference_mode():
            return self.model(torch.tensor([token_ids])).logits[0].float()

    def greedy(self, token_ids: list[int], count: int) -> list[int]:
        out = list(token_ids)
        for _ in range(count):
            out.append(int(self.logits(out)[-1].argmax()))
        return out[len(token_ids) :]


class TinyLlama(TinyModel):
    """Of the plainest family, for tests that are about no family."""


def write_tokenizer(directory: Path) -> Tokenizer:
    """A byte-level BPE of a few hundred tokens, with the files that a Hugging Face directory has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=301,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def write_tiny_llama(directory: Path, max_shard_size: str = "5GB", **changes: Any) -> TinyLlama:
    """`changes` override the config. Weights are large enough for logits that differ clearly between tokens."""
    tokenizer = write_tokenizer(directory)
    settings: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.15,
        "eos_token_id": 2,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(1234)
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes))).float().eval()
    with torch.no_grad():  # norms that are not all ones, as trained ones
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return TinyLlama(directory, model)
