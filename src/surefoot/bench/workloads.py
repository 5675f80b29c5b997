"""What clients ask: sessions of one turn or more, with lengths, texts and perhaps arrival times."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

from msgspec import Struct

FIRST_ID = 1000  # below are the special tokens of most vocabularies
CHARACTERS = 4  # of a token, about
LONGEST_ANSWER = 1024  # tokens
BLOCK = 512  # tokens that a hash id of Mooncake's traces stands for
# Of which prompts in words are made: each is one token, or two, of most vocabularies.
# fmt: off
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother",
    "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business",
    "issue",
)
# fmt: on

Content = tuple[int, ...] | str
PromptKind = Literal["ids", "words"]


class WorkloadError(ValueError):
    """A file or a number that no load can be made of, with the way out."""


class Length(Struct, frozen=True):
    """Tokens: evenly from `low` to `high`."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Length:
        """From `128` or `64-256`."""
        low, _, high = text.partition("-")
        try:
            length = cls(int(low), int(high or low))
        except ValueError:
            raise WorkloadError(f"{text!r} is no length: write 128, or 64-256") from None
        if not 1 <= length.low <= length.high:
            raise WorkloadError(f"{text!r} is no length: it goes from {length.low} to {length.high}")
        return length

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


class Turn(Struct, frozen=True):
    content: Content
    output_tokens: int


class Session(Struct, frozen=True):
    """Turns that follow each other: each sends all that was said before, the server's answers included."""

    turns: tuple[Turn, ...]
    arrives: float = -1.0  # seconds after the first one; -1: whenever a client is free


class Workload(Protocol):
    name: str
    shared_tokens: int  # of a prompt, on average, that other prompts of the run have too
    shared_share: float  # of all prompt tokens

    def describe(self) -> str: ...

    def sessions(self, count: int, rng: random.Random, used: int = 0) -> Iterator[Session]:
        """Exactly `count` of them; raises WorkloadError if there are fewer. used: how many are not to come again, for
        workloads that have a limited number."""


class Maker:
    """Makes prompts of a length."""

    def __init__(self, kind: PromptKind, vocab_size: int) -> None:
        self._kind = kind
        self._vocab_size = vocab_size

    def make(self, length: int, rng: random.Random) -> Content:
        if self._kind == "ids":
            first = min(FIRST_ID, self._vocab_size // 2)
            return tuple(rng.randrange(first, self._vocab_size) for _ in range(length))
        return " ".join(rng.choice(WORDS) for _ in range(length))

    def join(self, first: Content, second: Content) -> Content:
        if isinstance(first, tuple) and isinstance(second, tuple):
            return first + second
        return f"{first} {second}"


class RandomWorkload:
    """Prompts that share nothing."""

    name = "random"
    shared_tokens = 0
    shared_share = 0.0

    def __init__(self, maker: Maker, input: Length, output: Length) -> None:
        self._maker, self._input, self._output = maker, input, output

    def describe(self) -> str:
        return f"random prompts of {self._input} tokens, answers of {self._output}"

    def sessions(self, count: int, rng: random.Random, used: int = 0) -> Iterator[Session]:
        for _ in range(count):
            yield Session((Turn(self._maker.make(self._input.draw(rng), rng), self._output.draw(rng)),))


class PrefixWorkload:
    """Each prompt begins with one of a few prefixes."""

    name = "prefix"

    def __init__(self, maker: Maker, prefixes: int, prefix_length: int, input: Length, output: Length) -> None:
        self._maker, self._input, self._output = maker, input, output
        self._prefixes = prefixes
        self.shared_tokens = prefix_length
        self.shared_share = prefix_length / (prefix_length + input.mean)

    def describe(self) -> str:
        return (
            f"{self._prefixes} shared prefix{'es' if self._prefixes > 1 else ''} of {self.shared_tokens} tokens, "
            f"then {self._input} of a prompt's own, answers of {self._output}"
        )

    def sessions(self, count: int, rng: random.Random, used: int = 0) -> Iterator[Session]:
        prefixes = [self._maker.make(self.shared_tokens, rng) for _ in range(self._prefixes)]
        for index in range(count):
            own = self._maker.make(self._input.draw(rng), rng)
            prompt = self._maker.join(prefixes[index % self._prefixes], own)
            yield Session((Turn(prompt, self._output.draw(rng)),))


class ConversationWorkload:
    """Conversations of several turns."""

    name = "conversations"

    def __init__(self, maker: Maker, turns: Length, input: Length, output: Length) -> None:
        self._maker, self._turns, self._input, self._output = maker, turns, input, output
        earlier = (turns.mean - 1) / 2 * (input.mean + output.mean)
        self.shared_tokens = int(earlier)
        self.shared_share = earlier / (earlier + input.mean)

    def describe(self) -> str:
        return (
            f"conversations of {self._turns} turns, each with {self._input} new tokens and an answer of {self._output}"
        )

    def sessions(self, count: int, rng: random.Random, used: int = 0) -> Iterator[Session]:
        for _ in range(count):
            turns = range(self._turns.draw(rng))
            yield Session(
                tuple(Turn(self._maker.make(self._input.draw(rng), rng), self._output.draw(rng)) for _ in turns)
            )


class ShareGPTWorkload:
    """First questions of a file of conversations: [{"conversations": [{"from": "human", "value": ...}, ...]}, ...].

    An answer is as long as the file's, at four characters a token, unless `output` says. Longer questions than
    `longest` tokens are left out, and so are questions that are there twice.
    """

    name = "sharegpt"
    shared_tokens = 0
    shared_share = 0.0

    def __init__(self, path: Path, longest: int, output: Length | None, seed: int) -> None:
        self._path, self._longest, self._output = path, longest, output
        turns: dict[str, Turn] = {}
        for entry in _read_json(path):
            texts = _texts(entry)
            if len(texts) >= 2 and 0 < len(texts[0]) <= CHARACTERS * longest:
                answer = min(LONGEST_ANSWER, max(4, len(texts[1]) // CHARACTERS))
                turns.setdefault(texts[0], Turn(texts[0], answer))
        if not turns:
            raise WorkloadError(
                f"{path} holds no question of at most {longest} tokens: "
                'it is to be a list of {"conversations": [{"value": ...}, {"value": ...}]}'
            )
        self._turns = list(turns.values())
        random.Random(seed).shuffle(self._turns)

    def describe(self) -> str:
        answers = f"of {self._output}" if self._output else f"as long as its own, {LONGEST_ANSWER} at most"
        return (
            f"questions of {self._path.name}, {len(self._turns)} different ones of at most {self._longest} tokens; "
            f"answers {answers}"
        )

    def sessions(self, count: int, rng: random.Random, used: int = 0) -> Iterator[Session]:
        self.require(used + count)
        for turn in self._turns[used : used + count]:
            yield Session((Turn(turn.content, self._output.draw(rng) if self._output else turn.output_tokens),))

    def require(self, count: int) -> None:
        """Raises WorkloadError if there are fewer questions."""
        if count > len(self._turns):
            raise WorkloadError(
                f"{self._path} has {len(self._turns)} questions, and {count} are wanted that no other run has sent: "
                "lower --requests, --repeat or --warm-up, or send them again with --prompts same"
            )


class TraceWorkload:
    """A trace replayed: lines of {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]} as
    Mooncake's, or with "arrival_time" in seconds, or with "prompt" (a text or token ids) instead of a length.

    Prompts share what their hash ids say: each id stands for the next 512 tokens.
    """

    name = "trace"

    def __init__(self, path: Path, maker: Maker, speed: float) -> None:
        if not speed > 0:
            raise WorkloadError(f"--speed {speed:g} is no speed: 1 is the trace's own, 2 twice as fast")
        self._path, self._maker, self._speed = path, maker, speed
        self._lines = [_trace_line(path, number, line) for number, line in enumerate(_read_lines(path), 1)]
        if not self._lines:
            raise WorkloadError(f"{path} is empty")
        self._lines.sort(key=lambda line: line.seconds)
        shared = _shared_blocks(self._lines) * BLOCK
        self.shared_tokens = shared // len(self._lines)
        self.shared_share = shared / sum(line.input_length or len(line.prompt) for line in self._lines)

    def describe(self) -> str:
        return f"{self._path.name}, {len(self._lines)} requests, at {self._speed:g} times its speed"

    def sessions(self, count: int, rng: random.Random, used: int = 0) -> Iterator[Session]:
        if count > len(self._lines):
            raise WorkloadError(f"{self._path} has {len(self._lines)} requests, {count} are wanted: lower --requests")
        began, blocks = self._lines[0].seconds, rng.random()
        for line in self._lines[:count]:
            content = line.prompt or self._made(line, blocks, rng)
            yield Session((Turn(content, line.output_length),), (line.seconds - began) / self._speed)

    def __len__(self) -> int:
        return len(self._lines)

    def _made(self, line: _TraceLine, blocks: float, rng: random.Random) -> Content:
        content: Content = ()
        left = line.input_length
        for block in line.blocks:
            if left < BLOCK:
                break
            part = self._maker.make(BLOCK, random.Random(f"{blocks}/{block}"))
            content = self._maker.join(content, part) if content else part
            left -= BLOCK
        if left or not content:
            rest = self._maker.make(left, rng)
            content = self._maker.join(content, rest) if content else rest
        return content


class _TraceLine(Struct, frozen=True):
    seconds: float
    prompt: Content
    input_length: int
    output_length: int
    blocks: tuple[int, ...]


def _shared_blocks(lines: list[_TraceLine]) -> int:
    """Whole blocks with which a line begins and that an earlier line had."""
    seen: set[int] = set()
    shared = 0
    for line in lines:
        whole = line.blocks[: line.input_length // BLOCK]
        shared += len(list(itertools.takewhile(seen.__contains__, whole)))
        seen.update(whole)
    return shared


def _trace_line(path: Path, number: int, line: str) -> _TraceLine:
    try:
        entry = json.loads(line)
        prompt = entry.get("prompt", "")
        read = _TraceLine(
            seconds=float(entry["arrival_time"] if "arrival_time" in entry else float(entry["timestamp"]) / 1000),
            prompt=prompt if isinstance(prompt, str) else tuple(map(int, prompt)),
            input_length=0 if prompt else int(entry["input_length"]),
            output_length=int(entry["output_length"]),
            blocks=tuple(map(int, entry.get("hash_ids", ()))),
        )
        if (not prompt and read.input_length < 1) or read.output_length < 1:
            raise ValueError("a length is below 1")
        return read
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WorkloadError(
            f'{path}, line {number}: {error!r}; a line is {{"timestamp": ms, "input_length": n, "output_length": n}}'
        ) from None


def _texts(entry: Any) -> list[str]:
    try:
        return [str(message["value"]) for message in entry["conversations"]]
    except (KeyError, TypeError):
        return []


def _read_json(path: Path) -> list[Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise WorkloadError(f"{path} is no JSON: {error}") from error
    return content if isinstance(content, list) else []


def _read_lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}") from error
