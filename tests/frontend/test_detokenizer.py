"""Text from tokens as they come equals text from all tokens at once, cut at the stop string that is complete first."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from surefoot.frontend.detokenizer import IncrementalDecoder, StopFinder
from surefoot.frontend.output import Output
from surefoot.frontend.sampling_params import SamplingParams, Vocabulary
from surefoot.protocol.messages import Finished, FinishReason

TEXTS = [
    "Hello, world! The quick brown fox.",
    "  two spaces,\n\nnew lines\tand tabs  ",
    "emoji 👩‍👩‍👧 and flags 🇫🇷, done",
    "日本語のテキスト、混ぜて english too",
    "naïve café — ü",
    "�real replacement � characters�",
]


def byte_level() -> tokenizers.Tokenizer:
    """Every byte is a token, so characters are split as badly as can be; some words and a special token besides."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "t"), ("Ġt", "he"), ("ð", "Ł"), ("æ", "Ĺ")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def sentencepiece_style() -> tokenizers.Tokenizer:
    """As Llama 2 has it: spaces are ▁, the first one is stripped, unknown characters are byte tokens."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"▁abcdefghijklmnopqrstuvwxyzHT,.!é日", "▁Hello", "▁the", "▁▁"]
    merges = [("▁", "▁")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


TOKENIZERS = {"byte-level": byte_level(), "sentencepiece": sentencepiece_style()}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return TOKENIZERS[request.param]


def encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    if "▁" in tokenizer.get_vocab():
        text = "▁" + text.replace(" ", "▁")
    return tokenizer.encode(text).ids


def chunks(generator: random.Random, ids: Sequence[int]) -> list[list[int]]:
    made, start = [], 0
    while start < len(ids):
        size = generator.choice((1, 1, 1, 2, 3, 7, 40))
        made.append(list(ids[start : start + size]))
        start += size
    return made


ENDED = Finished(1, FinishReason.LENGTH, 0, "")


def output(tokenizer: tokenizers.Tokenizer, stops: Sequence[str] = ()) -> Output:
    params = SamplingParams(stop=stops)
    return Output(params.to_request(1, [0], Vocabulary(1000, ()), 1000, 0), params, tokenizer)


def streamed(stream: Output, parts: Sequence[Sequence[int]]) -> str:
    text = "".join(stream.push(part, (), None).text for part in parts)
    return text + stream.push((), (), ENDED).text


def cut(text: str, stops: Sequence[str]) -> str:
    """The naive reference: read character by character until a stop string is complete; the longest one wins."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_whole_text(tokenizer, text):
    ids = encode(tokenizer, text)
    assert tokenizer.decode(ids) == text
    generator = random.Random(1)
    for _ in range(20):
        assert streamed(output(tokenizer), chunks(generator, ids)) == text


def test_no_piece_shows_part_of_a_character(tokenizer):
    stream = output(tokenizer)
    pieces = [stream.push([token], (), None).text for token in encode(tokenizer, "a 👩‍👩‍👧 日本 é")]
    assert "".join(pieces) == "a 👩‍👩‍👧 日本 é"
    assert not any("�" in piece for piece in pieces)


def test_random_bytes_equal_the_whole_decoding():
    """Mostly invalid UTF-8, with special tokens: what a random model gives."""
    tokenizer = TOKENIZERS["byte-level"]
    generator = random.Random(2)
    for _ in range(300):
        ids = [generator.randrange(tokenizer.get_vocab_size()) for _ in range(generator.randrange(1, 120))]
        assert streamed(output(tokenizer), chunks(generator, ids)) == tokenizer.decode(ids)


def test_random_words_and_specials_equal_the_whole_decoding():
    """Valid SentencePiece output: words, spaces, whole characters in bytes, and special tokens anywhere."""
    tokenizer = TOKENIZERS["sentencepiece"]
    generator = random.Random(3)
    units = [[token] for token in range(258, tokenizer.get_vocab_size())] + [[1]] * 8
    units += [[byte + 2 for byte in character.encode()] for character in "€😀ñ語"]
    for _ in range(300):
        ids = [token for _ in range(generator.randrange(1, 100)) for token in generator.choice(units)]
        assert streamed(output(tokenizer), chunks(generator, ids)) == tokenizer.decode(ids)


def test_an_unfinished_character_is_rendered_at_the_end(tokenizer):
    ids = encode(tokenizer, "ab 👩")[:-1]
    stream = output(tokenizer)
    text = "".join(stream.push([token], (), None).text for token in ids[:-1])
    assert text == "ab "
    assert text + stream.push(ids[-1:], (), ENDED).text == tokenizer.decode(ids)


@pytest.mark.parametrize("token", ["word", "garbage", "special"])
def test_the_cost_of_a_token_is_bounded(tokenizer, token):
    """Also for text that never gets whole, and for tokens without text."""
    name = {"word": "h", "garbage": "ÿ" if "ÿ" in tokenizer.get_vocab() else "<0xFF>"}.get(token)
    special = "<s>" if "<s>" in tokenizer.get_vocab() else "<|end|>"
    repeated = tokenizer.token_to_id(name or special)
    decoded = 0

    class Counting:
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            nonlocal decoded
            decoded += len(ids)
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    decoder = IncrementalDecoder(Counting())
    for token_id in [*encode(tokenizer, "a"), *[repeated] * 2000]:
        decoder.push(token_id)
    assert decoded / 2000 < 60


@pytest.mark.parametrize(
    "text, stops, expected",
    [
        ("one END two", ("END",), "one "),
        ("END", ("END",), ""),
        ("one EN two", ("END",), "one EN two"),
        ("one EN", ("END",), "one EN"),
        ("aaab", ("aab",), "a"),
        ("ababac", ("abac",), "ab"),
        ("x abcd", ("abcd", "bc"), "x a"),
        ("x abc", ("abc", "bc"), "x "),
        ("日本語です", ("語",), "日本"),
        ("hi 👩‍👩‍👧 there", ("👧",), "hi 👩‍👩‍"),
        ("line\n\nnext", ("\n\n", "\n"), "line"),
        ("hello the end", (" the",), "hello"),
    ],
)
def test_stop_strings(tokenizer, text, stops, expected):
    ids = encode(tokenizer, text)
    for size in (1, 2, 3, len(ids)):
        stream = output(tokenizer, stops)
        parts = [ids[start : start + size] for start in range(0, len(ids), size)]
        assert streamed(stream, parts) == expected == cut(text, stops)
        assert stream.stopped == (expected != text)


def test_nothing_is_shown_that_may_begin_a_stop_string():
    stream = output(TOKENIZERS["byte-level"], ("STOP",))
    pieces = [stream.push([token], (), None).text for token in encode(TOKENIZERS["byte-level"], "aSTSTOPb")]
    assert pieces == ["a", "", "", "ST", "", "", "", ""]
    assert stream.stopped
    assert len(stream.token_ids) == len("aSTSTOP")


def test_fuzz_against_the_naive_reference(tokenizer):
    generator = random.Random(4)
    for _ in range(400):
        text = "".join(generator.choice("aab bé日😀") for _ in range(generator.randrange(1, 40)))
        stops = tuple(
            "".join(generator.choice("aab bé日😀") for _ in range(generator.randrange(1, 5)))
            for _ in range(generator.randrange(0, 4))
        )
        ids = encode(tokenizer, text)
        stream = output(tokenizer, stops)
        assert streamed(stream, chunks(generator, ids)) == cut(text, stops), (text, stops)
        heads = (tokenizer.decode(ids[:count]) for count in range(len(ids)))
        needed = next((count for count, head in enumerate(heads) if cut(head, stops) != head), len(ids))
        assert len(stream.token_ids) == needed, (text, stops)


def test_chunks_do_not_change_what_a_stop_finder_gives():
    generator = random.Random(5)
    for _ in range(500):
        text = "".join(generator.choice("abc") for _ in range(30))
        stops = tuple({"".join(generator.choice("abc") for _ in range(generator.randrange(1, 6))) for _ in range(3)})
        finder = StopFinder(stops)
        given = ""
        for part in chunks(generator, [ord(character) for character in text]):
            if not finder.found:
                given += finder.push("".join(map(chr, part)))
        assert given + finder.held == cut(text, stops)


def test_a_stop_id_is_counted_but_not_rendered():
    tokenizer = TOKENIZERS["byte-level"]
    ids = encode(tokenizer, "hello!")
    for stops in ((), ("zzz",), ("!",)):
        stream = output(tokenizer, stops)
        stop_id = Finished(1, FinishReason.STOP, 0, "")
        text = stream.push(ids[:-1], (), None).text + stream.push(ids[-1:], (), stop_id).text
        assert (text, len(stream.token_ids), stream.stopped) == ("hello", len(ids), False)
