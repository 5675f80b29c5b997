"""SentencePiece models of the kinds that language models have, trained on the corpus of the tests."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
from gguf import TokenType

from tests.frontend.tokenizer_cases import CORPUS

LLAMA2 = {
    "model_type": "bpe",
    "vocab_size": 900,
    "character_coverage": 0.98,
    "byte_fallback": True,
    "split_digits": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
}
GEMMA_USER_DEFINED = ["▁" * n for n in range(2, 32)] + ["\n" * n for n in range(1, 9)] + ["<start_of_turn>", "<tool>"]
SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "llama": LLAMA2,
    "gemma": LLAMA2
    | {
        "add_dummy_prefix": False,
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "pad_piece": "<pad>",
        "eos_piece": "<eos>",
        "bos_piece": "<bos>",
        "user_defined_symbols": [*GEMMA_USER_DEFINED, "<end_of_turn>"],
    },
    "t5": {
        "model_type": "unigram",
        "vocab_size": 700,
        "pad_id": 0,
        "eos_id": 1,
        "unk_id": 2,
        "bos_id": -1,
        "hard_vocab_limit": False,
    },
    "unigram-bytes": {
        "model_type": "unigram",
        "vocab_size": 900,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "hard_vocab_limit": False,
    },
}


@cache
def sentencepiece_model(name: str) -> tuple[sentencepiece.SentencePieceProcessor, bytes]:
    """A model, and its file's bytes."""
    with tempfile.TemporaryDirectory() as directory:
        prefix = str(Path(directory) / "m")
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=iter("\n".join(CORPUS).splitlines()),
            model_prefix=prefix,
            minloglevel=2,
            **SENTENCEPIECE[name],
        )
        return sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model"), Path(f"{prefix}.model").read_bytes()


def sentencepiece_metadata(model: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    def kind(id_: int) -> TokenType:
        if model.IsUnknown(id_):
            return TokenType.UNKNOWN
        if model.IsControl(id_):
            return TokenType.CONTROL
        return TokenType.BYTE if model.IsByte(id_) else TokenType.NORMAL

    ids = range(model.GetPieceSize())
    special = {"bos": model.bos_id(), "eos": model.eos_id(), "unknown": model.unk_id(), "padding": model.pad_id()}
    return {
        "ggml.model": "llama",
        "ggml.tokens": [model.IdToPiece(i) for i in ids],
        "ggml.scores": [model.GetScore(i) for i in ids],
        "ggml.token_type": [int(kind(i)) for i in ids],
    } | {f"ggml.{name}_token_id": id_ for name, id_ in special.items() if id_ >= 0}


def precompiled_charsmap(model_file: bytes) -> bytes:
    """Field 2 of field 3 of the protocol buffer."""
    return protobuf_field(protobuf_field(model_file, 3), 2)


def protobuf_field(message: bytes, wanted: int) -> bytes:
    """The first such field that is a string of bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            value |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                return value

    while True:
        number, wire_type = divmod(varint(), 8)
        if wire_type == 0:
            varint()
            continue
        length = {1: 8, 5: 4}.get(wire_type) or varint()
        at += length
        if number == wanted:
            return message[at - length : at]
