"""What GGUF metadata say about a tokenizer is honoured; what cannot be is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf import TokenType
from transformers import PreTrainedTokenizerFast

from surefoot.checkpoint.errors import CheckpointError, TokenizerError
from tests.frontend.sentencepiece_models import sentencepiece_metadata, sentencepiece_model
from tests.frontend.tokenizer_cases import CORPUS, MESSAGES, TEMPLATE, TEXTS, load_directory, train_byte_level
from tests.frontend.tokenizer_families import family, load_gguf

BROKEN_CHARSMAP = {"ggml.precompiled_charsmap": b"\xff\xff\xff\x7fabc"}


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


def test_added_tokens_of_gguf() -> None:
    backend = train_byte_level()
    metadata = byte_level_metadata(backend, "gpt-2")
    metadata["ggml.tokens"] += ["<tool>", "<|eot_id|>", "</s>"]
    metadata["ggml.token_type"] += [int(TokenType.USER_DEFINED), int(TokenType.CONTROL), int(TokenType.NORMAL)]
    metadata |= {"ggml.add_eos_token": True, "ggml.eom_token_id": 7, "chat_template": TEMPLATE}
    found = load_gguf(metadata)
    tool, end_of_turn, not_control = range(backend.get_vocab_size(), backend.get_vocab_size() + 3)
    assert found.encode("<tool><|eot_id|>", add_special_tokens=True) == [0, tool, end_of_turn, 1]
    assert found.decode([0, tool, end_of_turn, 1]) == "<tool>"
    assert found.eos_ids == (1, 7, end_of_turn)
    assert not_control not in found.encode("</s>", add_special_tokens=False)
    assert found.apply_chat_template(MESSAGES) == "<bos>[user]hi<|end|>"


@pytest.mark.parametrize(
    "words, adds_bos", [("gpt-2", False), ("smollm", False), ("qwen2", False), ("llama-bpe", True), ("tekken", True)]
)
def test_what_a_converter_leaves_unsaid(words: str, adds_bos: bool) -> None:
    metadata = byte_level_metadata(train_byte_level(), words)
    del metadata["ggml.add_bos_token"]
    assert (load_gguf(metadata).encode("x", add_special_tokens=True)[0] == 0) == adds_bos


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"ggml.model": "bert"},
            "tokenizer.ggml.model = 'bert' is not supported; supported are 'gpt2', 'llama' and 't5'",
        ),
        (
            {"ggml.pre": "viking"},
            "tokenizer.ggml.pre = 'viking' is not supported; supported are gpt-2, phi-2",
        ),
        ({"ggml.pre": "default"}, "does not say how its tokenizer splits text"),
        ({"ggml.token_type": [1, 1]}, "tokens but 2 entries in tokenizer.ggml.token_type"),
        ({"ggml.merges": ["ab"]}, "'ab' in tokenizer.ggml.merges is not a pair"),
        ({"ggml.merges": ["文 字"]}, "vocabulary and merges do not fit together"),
        ({"ggml.eos_token_id": 70_000}, "eos_token_id = 70000 is not one of the 700 tokens"),
        ({"ggml.eos_token_id": "2"}, "eos_token_id should be one int, it is '2'"),
        ({"ggml.tokens": ["same"] * 700}, "has the token 'same' twice"),
        ({"chat_template": "{{"}, "chat template is not valid"),
        ({"chat_template": 7}, "chat_template = 7 is not a text"),
        ({"chat_template": ["{{ 1 }}"]}, "is not a text"),
        ({"ggml.model": "t5", "ggml.scores": [0.0] * 700}, "needs normal tokens and an unknown_token_id"),
        (
            {"ggml.model": "t5", "ggml.scores": [0.0] * 700, "ggml.unknown_token_id": 0, **BROKEN_CHARSMAP},
            "precompiled_charsmap cannot be read",
        ),
    ],
)
def test_refused_ggufs(changes: dict[str, Any], message: str) -> None:
    metadata = byte_level_metadata(train_byte_level(), "gpt-2") | changes
    with pytest.raises(CheckpointError, match=message) as caught:
        load_gguf(metadata)
    assert "tokenizer.gguf" in str(caught.value)


def test_bos_without_an_id() -> None:
    metadata = byte_level_metadata(train_byte_level(), "gpt-2")
    del metadata["ggml.bos_token_id"]
    with pytest.raises(TokenizerError, match="add_bos_token is set, but bos_token_id is missing"):
        load_gguf(metadata)


# ---- SentencePiece ---------------------------------------------------------------------------------------------------


def test_sentencepiece_on_much_text() -> None:
    model, found = sentencepiece_model("llama")[0], load_gguf(sentencepiece_metadata(sentencepiece_model("llama")[0]))
    for text in CORPUS[0].split("\n\n")[:60]:
        ids = model.Encode(text)
        assert found.encode(text, add_special_tokens=False) == ids, text
        assert found.encode(text, add_special_tokens=True) == [model.bos_id(), *ids]
        assert found.decode(ids) == text
    assert any(model.IsByte(id_) for id_ in found.encode("🙃", add_special_tokens=False))
    assert found.encode("<s></s>", add_special_tokens=False) == [1, 2]


def test_sentencepiece_without_space_prefix() -> None:
    metadata = sentencepiece_metadata(sentencepiece_model("llama")[0])
    with_prefix, found = load_gguf(metadata), load_gguf(metadata | {"ggml.add_space_prefix": False})
    for text in filter(None, TEXTS[:10]):
        assert found.encode(" " + text, add_special_tokens=False) == with_prefix.encode(text, add_special_tokens=False)
        assert found.decode(found.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("name", ["llama", "unigram-bytes"])
def test_extra_white_space(name: str) -> None:
    metadata = family(name).metadata
    kept, removed = load_gguf(metadata), load_gguf(metadata | {"ggml.remove_extra_whitespaces": True})
    for text, shorter in (("  a  b ", "a b"), (" ", ""), ("a\n \nb", "a\n \nb")):
        assert kept.decode(kept.encode(text, add_special_tokens=False)) == text
        assert removed.encode(text, False) == removed.encode(shorter, False) == kept.encode(shorter, False)


@pytest.mark.parametrize("spelling", ["▁▁▁", "   "])
def test_both_spellings_of_user_defined_spaces(spelling: str) -> None:
    """Older converters leave them as the model has them."""
    metadata = dict(family("gemma").metadata)
    metadata["ggml.tokens"] = [spelling if token == "   " else token for token in metadata["ggml.tokens"]]
    found, id_ = load_gguf(metadata), metadata["ggml.tokens"].index(spelling)
    assert id_ in found.encode("a   b", add_special_tokens=False)
    assert (found.decode([id_]), found.token_bytes(id_)) == ("   ", b"   ")


def test_white_space_after_special_tokens_of_phi3() -> None:
    found, phi = family("phi3").found, family("phi3").metadata
    other = load_gguf(phi, architecture="llama")
    prompt = "<|user|>\nHi<|end|>\n<|assistant|>\n"
    user, end, assistant = (phi["ggml.tokens"].index(token) for token in ("<|user|>", "<|end|>", "<|assistant|>"))
    hi = found.encode("Hi", add_special_tokens=False)
    assert found.encode(prompt, add_special_tokens=False) == [user, *hi, end, assistant]
    assert len(other.encode(prompt, add_special_tokens=False)) > len(hi) + 3
    assert len(found.encode("<|endoftext|>\n", add_special_tokens=False)) > 1


def test_sentencepiece_scores_must_be_complete() -> None:
    with pytest.raises(TokenizerError, match=r"900 tokens but 1 entries in tokenizer\.ggml\.scores"):
        load_gguf(sentencepiece_metadata(sentencepiece_model("llama")[0]) | {"ggml.scores": [0.5]})


def test_sentencepiece_directory_equals_transformers(tmp_path: Path) -> None:
    backend = family("llama").reference
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    found = load_directory(tmp_path)
    for text in [*TEXTS, "a</s> b</s>c"]:
        ids = reference.encode(text)
        assert found.encode(text, add_special_tokens=True) == ids
        assert b"".join(map(found.token_bytes, ids)).decode().removeprefix(" ") == reference.decode(ids)
        for cut in range(len(ids) + 1):
            assert found.decode(ids[:cut]) == reference.decode(
                ids[:cut], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
