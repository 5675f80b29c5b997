"""Tokenizers read from GGUF metadata equal Hugging Face's tokenizer of the family, and SentencePiece's own."""

from __future__ import annotations

import itertools
import random

import pytest
from gguf import TokenType

from surefoot.frontend.detokenizer import IncrementalDecoder
from surefoot.frontend.gguf_words import PRE_TOKENIZERS
from tests.frontend.sentencepiece_models import sentencepiece_model
from tests.frontend.tokenizer_families import (
    BYTE_LEVEL,
    CONTROL,
    FAMILY_TEXTS,
    NAMES,
    Family,
    family,
)


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> Family:
    return family(request.param)


def has_tokens(text: str) -> bool:
    return any(token in text for token in (*CONTROL, "<tool>"))


def test_every_supported_name_is_tested() -> None:
    assert BYTE_LEVEL.keys() == PRE_TOKENIZERS.keys()


def test_ids_equal_hugging_face(case: Family) -> None:
    for text in case.texts:
        expected = case.reference.encode(text, add_special_tokens=False).ids
        assert case.found.encode(text, add_special_tokens=False) == expected, text


def test_decoded_text_equals_hugging_face(case: Family) -> None:
    for text in case.texts:
        ids = case.reference.encode(text, add_special_tokens=False).ids
        for skip in (False, True):
            for cut in range(len(ids) + 1):
                assert case.found.decode(ids[:cut], skip) == case.reference.decode(ids[:cut], skip_special_tokens=skip)
        if case.keeps_text and not has_tokens(text):
            assert case.found.decode(ids, skip_special_tokens=False) == text


def sentencepiece_ids(name: str, text: str) -> list[int]:
    ids: list[int] = sentencepiece_model(name)[0].Encode(text)
    return ids


@pytest.mark.parametrize("name", ["llama", "gemma", "t5", "unigram-bytes"])
def test_ids_equal_sentencepiece(name: str) -> None:
    """Where the text has no special tokens, which SentencePiece does not look for."""
    for text in FAMILY_TEXTS:
        if not has_tokens(text):
            assert family(name).found.encode(text, add_special_tokens=False) == sentencepiece_ids(name, text), text


def test_the_texts_tell_all_ways_of_splitting_apart() -> None:
    """A wrong pattern would be found by the tests above."""
    same = [{"gpt-2", "default", "phi-2"}, {"smollm", "starcoder"}, {"llama-bpe", "llama3", "llama-v3"}]
    same += [{"dbrx", "glm4", "chatglm-bpe"}, {"qwen2", "deepseek-r1-qwen"}, {"gpt-4o", "llama4"}]
    for a, b in itertools.combinations(BYTE_LEVEL, 2):
        ids = [[family(name).found.encode(text, add_special_tokens=False) for text in FAMILY_TEXTS] for name in (a, b)]
        assert (ids[0] == ids[1]) == any({a, b} <= names for names in same), (a, b)


def test_what_surrounds_a_text(case: Family) -> None:
    """The metadata of the byte-level ones say so; for SentencePiece these are the defaults."""
    special = {name: case.metadata.get(f"ggml.{name}_token_id") for name in ("bos", "eos")}
    before, after = ([], [special["eos"]]) if case.metadata["ggml.model"] == "t5" else ([special["bos"]], [])
    for text in ("", "a b", "<|end|>"):
        ids = case.found.encode(text, add_special_tokens=False)
        assert case.found.encode(text, add_special_tokens=True) == [*before, *ids, *after]


def test_what_ends_a_text(case: Family) -> None:
    kinds, tokens = case.metadata["ggml.token_type"], case.metadata["ggml.tokens"]
    ends = {"<|end|>", "<end_of_turn>", "<|endoftext|>"}.intersection(tokens)
    assert case.found.eos_ids == tuple(
        sorted({tokens.index(end) for end in ends} | {case.metadata["ggml.eos_token_id"]})
    )
    for end in ends:
        assert case.found.decode([tokens.index(end)]) == ""
        assert case.found.encode(end, add_special_tokens=False)[-1] == tokens.index(end)
    assert len(tokens) - case.found.vocab_size == kinds.count(TokenType.UNUSED)


def test_the_bytes_of_tokens_add_up_to_the_text(case: Family) -> None:
    found = case.found
    for text in FAMILY_TEXTS:
        ids = found.encode(text, add_special_tokens=False)
        joined = b"".join(map(found.token_bytes, ids)).decode()
        prefix = " " if case.metadata.get("ggml.add_space_prefix", case.metadata["ggml.model"] == "llama") else ""
        assert joined.removeprefix(prefix) == found.decode(ids, skip_special_tokens=False)
        if case.keeps_text and not has_tokens(text):
            assert joined == (prefix + text if text else "")


def test_every_token_has_bytes(case: Family) -> None:
    """And its text is what it decodes to after others; unused and absent tokens have none."""
    found, tokens, kinds = case.found, case.metadata["ggml.tokens"], case.metadata["ggml.token_type"]
    after = found.encode("a", add_special_tokens=False)
    head = found.decode(after, skip_special_tokens=False)
    for id_, kind in enumerate(kinds):
        if kind == TokenType.UNUSED:
            assert (found.token_bytes(id_), found.token_text(id_)) == (b"", "")
        elif kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            assert (found.token_bytes(id_), found.token_text(id_)) == (tokens[id_].encode(), tokens[id_])
        else:
            assert found.token_bytes(id_)
            assert head + found.token_text(id_) == found.decode([*after, id_], skip_special_tokens=False)
    assert (found.token_bytes(10**6), found.token_text(10**6)) == (b"", "")


def streamed(case: Family, ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(case.found)
    return [*(decoder.push(token) for token in ids), decoder.flush()]


def test_streamed_text_is_the_decoded_text(case: Family) -> None:
    for text in FAMILY_TEXTS:
        ids = case.found.encode(text, add_special_tokens=True)
        pieces = streamed(case, ids)
        assert "".join(pieces) == case.found.decode(ids)
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", [*BYTE_LEVEL, "t5"])
def test_streamed_random_tokens(name: str) -> None:
    case, generator = family(name), random.Random(0)
    for _ in range(200):
        ids = [generator.randrange(case.found.vocab_size + 3) for _ in range(generator.randrange(1, 80))]
        assert "".join(streamed(case, ids)) == case.found.decode(ids)


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma", "unigram-bytes"])
def test_streamed_random_tokens_with_whole_characters(name: str) -> None:
    """A run of byte tokens that turns out to be invalid is rewritten as a whole: the documented exception."""
    case, generator = family(name), random.Random(0)
    tokens = case.metadata["ggml.tokens"]
    byte_ids = {i: tokens.index(f"<0x{i:02X}>") for i in range(256)}
    units = [[id_] for id_ in range(case.found.vocab_size + 3) if id_ not in byte_ids.values()]
    units += [[byte_ids[byte] for byte in character.encode()] for character in "a\né語\ufffd😀" * 20]
    for _ in range(200):
        ids = [id_ for _ in range(generator.randrange(1, 60)) for id_ in generator.choice(units)]
        assert "".join(streamed(case, ids)) == case.found.decode(ids)
