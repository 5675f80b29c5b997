"""Tokenizers built from GGUF metadata give the ids of the libraries that trained them: tokenizers, sentencepiece."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers
from gguf import TokenType
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from surefoot.checkpoint.errors import CheckpointError, TokenizerError
from surefoot.checkpoint.gguf import GGUFFile
from surefoot.config.engine_plan import CheckpointRef
from surefoot.frontend.gguf_tokenizer import read_backend
from surefoot.frontend.tokenizer import Tokenizer, load_tokenizer
from tests.frontend.tokenizer_cases import CORPUS, MESSAGES, TEMPLATE, TEXTS, WORDS, load_directory, train_byte_level


def assert_equal_to(reference: tokenizers.Tokenizer, found: Tokenizer) -> None:
    for text in TEXTS:
        for special in (False, True):
            ids = reference.encode(text, add_special_tokens=special).ids
            assert found.encode(text, add_special_tokens=special) == ids, text
            assert found.decode(ids, skip_special_tokens=special) == reference.decode(ids, skip_special_tokens=special)


def load_gguf(directory: Path, metadata: dict[str, Any]) -> Tokenizer:
    path = directory / "tokenizer.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        add[type(value)](f"tokenizer.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return load_tokenizer(CheckpointRef(str(path), "gguf"))


def byte_level_metadata(backend: tokenizers.Tokenizer, words: str) -> dict[str, Any]:
    model = json.loads(backend.to_str())["model"]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": words,
        "ggml.tokens": list(model["vocab"]),
        "ggml.token_type": [int(TokenType.CONTROL)] * 2 + [int(TokenType.NORMAL)] * (len(model["vocab"]) - 2),
        "ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 1,
        "ggml.add_bos_token": True,
    }


@pytest.mark.parametrize("words", WORDS)
def test_byte_level_gguf(tmp_path: Path, words: str) -> None:
    backend = train_byte_level("gpt-2")  # its numbers are tokens, so that digits show how they were split
    backend.pre_tokenizer = WORDS[words]
    found = load_gguf(tmp_path, byte_level_metadata(backend, words))
    assert found.vocab_size == backend.get_vocab_size()
    assert found.eos_ids == (1,)
    assert_equal_to(backend, found)


@pytest.mark.parametrize("words, ignore_merges", [("gpt-2", False), ("llama-bpe", True)])
def test_whole_words_of_llama_3(tmp_path: Path, words: str, ignore_merges: bool) -> None:
    """Without its last merges, a vocabulary has words that only Llama 3's tokenizer finds."""
    backend = train_byte_level(words)
    metadata = byte_level_metadata(backend, words)
    metadata["ggml.merges"] = metadata["ggml.merges"][:-100]
    merges = [tuple(line.split(" ")) for line in metadata["ggml.merges"]]
    backend.model = models.BPE(backend.get_vocab(), merges, ignore_merges=ignore_merges)
    assert_equal_to(backend, load_gguf(tmp_path, metadata))


def test_added_tokens_of_gguf(tmp_path: Path) -> None:
    backend = train_byte_level()
    metadata = byte_level_metadata(backend, "gpt-2")
    metadata["ggml.tokens"] += ["<tool>", "<|eot_id|>", "</s>"]
    metadata["ggml.token_type"] += [int(TokenType.USER_DEFINED), int(TokenType.CONTROL), int(TokenType.NORMAL)]
    metadata |= {"ggml.add_eos_token": True, "ggml.eom_token_id": 7, "chat_template": TEMPLATE}
    found = load_gguf(tmp_path, metadata)
    tool, end_of_turn, not_control = range(backend.get_vocab_size(), backend.get_vocab_size() + 3)
    assert found.encode("<tool><|eot_id|>", add_special_tokens=True) == [0, tool, end_of_turn, 1]
    assert found.decode([0, tool, end_of_turn, 1]) == "<tool>"
    assert found.eos_ids == (1, 7, end_of_turn)
    assert not_control not in found.encode("</s>", add_special_tokens=False)
    assert found.apply_chat_template(MESSAGES) == "<bos>[user]hi<|end|>"


@pytest.mark.parametrize("words, adds_bos", [("gpt-2", False), ("smollm", False), ("llama-bpe", True)])
def test_what_a_converter_leaves_unsaid(tmp_path: Path, words: str, adds_bos: bool) -> None:
    metadata = byte_level_metadata(train_byte_level(words), words)
    del metadata["ggml.add_bos_token"]
    assert (load_gguf(tmp_path, metadata).encode("x", add_special_tokens=True)[0] == 0) == adds_bos


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"ggml.model": "bert"}, "tokenizer.ggml.model = 'bert' is not supported; supported are 'gpt2' and 'llama'"),
        (
            {"ggml.pre": "tekken"},
            "tokenizer.ggml.pre = 'tekken' is not supported; supported are gpt-2, default, smollm",
        ),
        ({"ggml.token_type": [1, 1]}, "tokens but 2 entries in tokenizer.ggml.token_type"),
        ({"ggml.merges": ["ab"]}, "'ab' in tokenizer.ggml.merges is not a pair"),
        ({"ggml.merges": ["文 字"]}, "vocabulary and merges do not fit together"),
        ({"ggml.eos_token_id": 70_000}, "eos_token_id = 70000 is not one of the 700 tokens"),
        ({"ggml.eos_token_id": "2"}, "eos_token_id should be one int, it is '2'"),
        ({"ggml.tokens": ["same"] * 700}, "has the token 'same' twice"),
        ({"chat_template": "{{"}, "chat template is not valid"),
    ],
)
def test_refused_ggufs(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    metadata = byte_level_metadata(train_byte_level(), "gpt-2") | changes
    with pytest.raises(CheckpointError, match=message) as caught:
        load_gguf(tmp_path, metadata)
    assert str(tmp_path) in str(caught.value)


def test_bos_without_an_id(tmp_path: Path) -> None:
    metadata = byte_level_metadata(train_byte_level(), "gpt-2")
    del metadata["ggml.bos_token_id"]
    with pytest.raises(TokenizerError, match="add_bos_token is set, but bos_token_id is missing"):
        load_gguf(tmp_path, metadata)


# ---- SentencePiece ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    """Trained as Llama 2's: BPE, identity normalisation, every digit alone, unknown characters as bytes."""
    directory = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter("\n".join(CORPUS).splitlines()),
        model_prefix=str(directory / "m"),
        model_type="bpe",
        vocab_size=900,
        character_coverage=0.98,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(directory / "m.model"))


def sentencepiece_metadata(model: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    def kind(id_: int) -> TokenType:
        if model.IsUnknown(id_):
            return TokenType.UNKNOWN
        if model.IsControl(id_):
            return TokenType.CONTROL
        return TokenType.BYTE if model.IsByte(id_) else TokenType.NORMAL

    ids = range(model.GetPieceSize())
    return {
        "ggml.model": "llama",
        "ggml.tokens": [model.IdToPiece(i) for i in ids],
        "ggml.scores": [model.GetScore(i) for i in ids],
        "ggml.token_type": [int(kind(i)) for i in ids],
        "ggml.bos_token_id": model.bos_id(),
        "ggml.eos_token_id": model.eos_id(),
        "ggml.unknown_token_id": model.unk_id(),
    }


def test_sentencepiece_gguf(tmp_path: Path, sentencepiece_model: sentencepiece.SentencePieceProcessor) -> None:
    found = load_gguf(tmp_path, sentencepiece_metadata(sentencepiece_model))
    assert found.eos_ids == (sentencepiece_model.eos_id(),)
    for text in [*TEXTS, *CORPUS[0].split("\n\n")[:60]]:
        ids = sentencepiece_model.Encode(text)
        assert found.encode(text, add_special_tokens=False) == ids, text
        assert found.encode(text, add_special_tokens=True) == [sentencepiece_model.bos_id(), *ids]
        assert found.decode(ids) == text
    assert any(sentencepiece_model.IsByte(i) for i in found.encode("🙃", add_special_tokens=False))
    assert found.encode("<s></s>", add_special_tokens=False) == [1, 2]


def test_sentencepiece_gguf_without_space_prefix(
    tmp_path: Path, sentencepiece_model: sentencepiece.SentencePieceProcessor
) -> None:
    with_prefix = load_gguf(tmp_path, sentencepiece_metadata(sentencepiece_model))
    metadata = sentencepiece_metadata(sentencepiece_model) | {"ggml.add_space_prefix": False}
    found = load_gguf(tmp_path, metadata)
    for text in filter(None, TEXTS[:10]):
        assert found.encode(" " + text, add_special_tokens=False) == with_prefix.encode(text, add_special_tokens=False)
        assert found.decode(found.encode(text, add_special_tokens=False)) == text


def test_sentencepiece_scores_must_be_complete(
    tmp_path: Path, sentencepiece_model: sentencepiece.SentencePieceProcessor
) -> None:
    with pytest.raises(TokenizerError, match=r"900 tokens but 1 entries in tokenizer\.ggml\.scores"):
        load_gguf(tmp_path, sentencepiece_metadata(sentencepiece_model) | {"ggml.scores": [0.5]})


def test_sentencepiece_directory_equals_transformers(
    tmp_path: Path, sentencepiece_model: sentencepiece.SentencePieceProcessor
) -> None:
    load_gguf(tmp_path, sentencepiece_metadata(sentencepiece_model))
    backend = read_backend(GGUFFile.open(tmp_path / "tokenizer.gguf"))
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    found = load_directory(tmp_path)
    for text in [*TEXTS, "a</s> b</s>c"]:
        ids = reference.encode(text)
        assert found.encode(text, add_special_tokens=True) == ids
        for cut in range(len(ids) + 1):
            assert found.decode(ids[:cut]) == reference.decode(
                ids[:cut], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
