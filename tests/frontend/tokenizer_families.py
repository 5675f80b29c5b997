"""A small tokenizer of every family: as Hugging Face's class has it, and read from a GGUF file.

The metadata are what llama.cpp's converter writes for that family.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import tokenizers
from gguf import TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    CodeGenTokenizer,
    CohereTokenizer,
    GemmaTokenizer,
    GPT2Tokenizer,
    GPTNeoXTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    T5Tokenizer,
)
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from surefoot.config.engine_plan import CheckpointRef
from surefoot.frontend.tokenizer import Tokenizer, load_tokenizer
from tests.frontend.sentencepiece_models import (
    GEMMA_USER_DEFINED,
    precompiled_charsmap,
    sentencepiece_metadata,
    sentencepiece_model,
)
from tests.frontend.tokenizer_cases import CORPUS, TEXTS

CONTROL = ["<bos>", "<|end|>", "<end_of_turn>"]
FAMILY_TEXTS = [
    *TEXTS,
    "1 12 123 1234 12345 1234567 ١٢٣٤ Ⅻ ½",
    "a b  c   d    e      f\tg\t\th\n\ni \n j  \n\n\n k",
    "HTTPServer getHTTPResponse iPhone McDonald's WE'LL ǅungla ʰword",
    "https://a.b/c//d/\n#!/bin/sh\n{x}/\r\n!!!\n\n",
    "東京都で、ラーメンを食べた。한국어 텍스트",
    "العَرَبِيَّة كتاب ١٢ שלום",
    "e\u0301 n\u0303o cafe\u0301s a\u0308\u0323 हिन्दी ไทย",
    "👩‍👩‍👧‍👦🏳️‍🌈 👍🏽 🇫🇷",
    "<|end|>a<|end|> b <|end|>\n c<bos>",
    "<end_of_turn>\nmodel\n<tool>  x <tool>y",
    "_under_score *bold* ~x~ $5 +1 a=b <=> €£ “quoted” — dash",
    "word" * 40,
    "\u00a0nbsp\u3000wide\u2028line",
]


class Family(NamedTuple):
    reference: tokenizers.Tokenizer
    found: Tokenizer
    metadata: dict[str, Any]
    keeps_text: bool  # decoding the ids of a text without special tokens gives the text
    texts: list[str] = FAMILY_TEXTS


def load_gguf(metadata: dict[str, Any], architecture: str = "llama") -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            str: writer.add_string,
            list: writer.add_array,
            bytes: writer.add_array,
        }
        for key, value in metadata.items():
            add[type(value)](f"tokenizer.{key}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return load_tokenizer(CheckpointRef(str(path), "gguf"))


# ---- Byte-level BPE --------------------------------------------------------------------------------------------------


@cache
def byte_level_model() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges. Its tokens know no words, so that the ids of a text show how it was split.

    The last merges are left out: there are tokens that only a tokenizer finds that takes whole words first.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[^\n]{1,12}\n*"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*CORPUS[:3], *FAMILY_TEXTS * 3], trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"][:-500]]


def split_by(*patterns: str, ignore_merges: bool = False, composes: bool = False) -> Callable[..., Any]:
    def make(vocab: dict[str, int], merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
        backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
        if composes:
            backend.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        backend.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=backend)

    return make


def individual_digits(vocab: dict[str, int], merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    reference = GPT2Tokenizer(vocab=vocab, merges=merges)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return reference


DEEPSEEK_V3 = (  # of its tokenizer.json
    "\\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
TIKTOKEN = TikTokenConverter().pattern
LLAMA3 = split_by(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"], ignore_merges=True)
BYTE_LEVEL: dict[str, Callable[..., Any]] = {
    "gpt-2": GPT2Tokenizer,
    "phi-2": CodeGenTokenizer,
    "olmo": GPTNeoXTokenizer,
    "smollm": individual_digits,
    "starcoder": individual_digits,
    "command-r": CohereTokenizer,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "dbrx": split_by(GGUF_PRE_TOKENIZER_SPLITS["dbrx"]),
    "glm4": split_by(TIKTOKEN),
    "chatglm-bpe": split_by(TIKTOKEN),
    "qwen2": Qwen2Tokenizer,
    "deepseek-r1-qwen": split_by(GGUF_PRE_TOKENIZER_SPLITS["deepseek-r1-qwen"], composes=True),
    "qwen35": Qwen3_5Tokenizer,
    "tekken": split_by(GGUF_PRE_TOKENIZER_SPLITS["tekken"], ignore_merges=True),
    "gpt-4o": split_by(GGUF_PRE_TOKENIZER_SPLITS["gpt-4o"]),
    "llama4": split_by(GGUF_PRE_TOKENIZER_SPLITS["llama4"]),
    "deepseek-v3": split_by(*DEEPSEEK_V3),
}
COMPOSING = {"olmo", "command-r", "qwen2", "deepseek-r1-qwen", "qwen35"}


def byte_level_metadata(words: str) -> dict[str, Any]:
    vocab, merges = byte_level_model()
    tokens = [*vocab, "<tool>", "[PAD0]", "[PAD1]"]
    kinds = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(vocab) - 3)
    return {
        "ggml.model": "gpt2",
        "ggml.pre": words,
        "ggml.tokens": tokens,
        "ggml.token_type": [int(k) for k in [*kinds, TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.UNUSED]],
        "ggml.merges": [" ".join(pair) for pair in merges],
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 1,
        "ggml.add_bos_token": True,
    }


def byte_level_family(words: str) -> Family:
    vocab, merges = byte_level_model()
    reference = BYTE_LEVEL[words](vocab=vocab | {"<tool>": len(vocab)}, merges=merges).backend_tokenizer
    add_tokens(reference, CONTROL, ["<tool>"])
    metadata = byte_level_metadata(words)
    return Family(reference, load_gguf(metadata), metadata, words not in COMPOSING)


def add_tokens(reference: tokenizers.Tokenizer, special: list[str], user_defined: list[str]) -> None:
    reference.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    reference.add_tokens([AddedToken(token, normalized=False) for token in user_defined])


# ---- SentencePiece ---------------------------------------------------------------------------------------------------


def add_gguf_tokens(metadata: dict[str, Any], texts: list[str], kind: TokenType) -> None:
    """As the converter adds those of added_tokens.json: with a score that never wins."""
    metadata["ggml.tokens"] += texts
    metadata["ggml.scores"] += [-1000.0] * len(texts)
    metadata["ggml.token_type"] += [int(kind)] * len(texts)


def bpe_model(metadata: dict[str, Any]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges as Hugging Face's converter derives them: the earlier a token, the better."""
    vocab = {token: i for i, token in enumerate(metadata["ggml.tokens"])}
    kinds = metadata["ggml.token_type"]
    ranked = []
    for token in (token for token, id_ in vocab.items() if kinds[id_] in (TokenType.NORMAL, TokenType.USER_DEFINED)):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        ranked += [(vocab[token], vocab[a], vocab[b], a, b) for a, b in cuts if a in vocab and b in vocab]
    return vocab, [(left, right) for *_, left, right in sorted(ranked)]


def llama_family() -> Family:
    metadata = sentencepiece_metadata(sentencepiece_model("llama")[0])
    add_gguf_tokens(metadata, CONTROL, TokenType.CONTROL)
    add_gguf_tokens(metadata, ["<tool>"], TokenType.USER_DEFINED)
    add_gguf_tokens(metadata, ["[PAD0]", "[PAD1]"], TokenType.UNUSED)
    vocab, merges = bpe_model(metadata)
    reference = LlamaTokenizer(vocab=vocab, merges=merges, legacy=True).backend_tokenizer
    prefixed_like_tokenizer_json(reference)
    add_tokens(reference, CONTROL, ["<tool>"])
    return Family(reference, load_gguf(metadata), metadata, True)


def prefixed_like_tokenizer_json(reference: tokenizers.Tokenizer) -> None:
    """As in the files of Llama 2, Mistral and Phi 3: LlamaTokenizer's own way gives no second space to " a"."""
    reference.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    reference.pre_tokenizer = None


def phi3_family() -> Family:
    metadata = sentencepiece_metadata(sentencepiece_model("llama")[0])
    phi = ["<|end|>", "<|user|>", "<|assistant|>"]
    add_gguf_tokens(metadata, ["<|endoftext|>", *phi], TokenType.CONTROL)
    vocab, merges = bpe_model(metadata)
    reference = LlamaTokenizer(vocab=vocab, merges=merges).backend_tokenizer
    prefixed_like_tokenizer_json(reference)
    add_tokens(reference, ["<|endoftext|>"], [])
    stripping = [AddedToken(token, special=True, normalized=False, rstrip=True) for token in [*phi, "</s>"]]
    reference.add_special_tokens(stripping)
    return Family(reference, load_gguf(metadata, "phi3"), metadata, False)


def gemma_family() -> Family:
    metadata = sentencepiece_metadata(sentencepiece_model("gemma")[0]) | {"ggml.add_space_prefix": False}
    for token in (*GEMMA_USER_DEFINED, "<end_of_turn>"):
        metadata["ggml.token_type"][metadata["ggml.tokens"].index(token)] = int(TokenType.USER_DEFINED)
    vocab, merges = bpe_model(metadata)
    reference = GemmaTokenizer(vocab=vocab, merges=merges).backend_tokenizer
    add_tokens(reference, ["<end_of_turn>"], GEMMA_USER_DEFINED)
    metadata["ggml.tokens"] = [token.replace("▁", " ") if token in GEMMA_USER_DEFINED else token for token in vocab]
    # The longest token of spaces has 31. Of longer runs, SentencePiece takes that one first, as surefoot does, and
    # Hugging Face joins powers of two.
    texts = [text for text in FAMILY_TEXTS if " " * 32 not in text]
    return Family(reference, load_gguf(metadata, "gemma2"), metadata, True, texts)


def t5_family() -> Family:
    model, file = sentencepiece_model("t5")
    charsmap = precompiled_charsmap(file)
    metadata = sentencepiece_metadata(model) | {
        "ggml.model": "t5",
        "ggml.add_space_prefix": True,
        "ggml.remove_extra_whitespaces": True,
        "ggml.precompiled_charsmap": charsmap,
    }
    pieces = list(zip(metadata["ggml.tokens"], metadata["ggml.scores"], strict=True))
    reference = T5Tokenizer(vocab=pieces, extra_ids=0, _spm_precompiled_charsmap=charsmap).backend_tokenizer
    add_gguf_tokens(metadata, ["<tool>"], TokenType.USER_DEFINED)
    add_tokens(reference, [], ["<tool>"])
    add_gguf_tokens(metadata, ["[PAD0]", "[PAD1]"], TokenType.UNUSED)
    return Family(reference, load_gguf(metadata, "t5"), metadata, False)


def unigram_bytes_family() -> Family:
    """No class of Hugging Face's has it, but its library does."""
    metadata = sentencepiece_metadata(sentencepiece_model("unigram-bytes")[0]) | {"ggml.model": "t5"}
    pieces = list(zip(metadata["ggml.tokens"], metadata["ggml.scores"], strict=True))
    worst = min(score for _, score in pieces)
    pieces = [(token, worst if token.startswith("<") else score) for token, score in pieces]
    reference = tokenizers.Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    reference.normalizer = normalizers.Replace(" ", "▁")
    reference.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    add_tokens(reference, ["<unk>", "<s>", "</s>"], [])
    return Family(reference, load_gguf(metadata), metadata, True)


SENTENCEPIECE_FAMILIES: dict[str, Callable[[], Family]] = {
    "llama": llama_family,
    "phi3": phi3_family,
    "gemma": gemma_family,
    "t5": t5_family,
    "unigram-bytes": unigram_bytes_family,
}
NAMES = [*BYTE_LEVEL, *SENTENCEPIECE_FAMILIES]


@cache
def family(name: str) -> Family:
    return byte_level_family(name) if name in BYTE_LEVEL else SENTENCEPIECE_FAMILIES[name]()
