"""What clients ask: sessions of one turn or more, with lengths, texts and perhaps arrival times."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

from msgspec import Struct

FIRST_ID = 1000  # below are the special tokens of most vocabularies
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

    def describe(self) -> str: ...

    def sessions(self, count: int, rng: random.Random) -> Iterator[Session]:
        """`count` of them, or as many as there are."""


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

    def __init__(self, maker: Maker, input: Length, output: Length) -> None:
        self._maker, self._input, self._output = maker, input, output

    def describe(self) -> str:
        return f"random prompts of {self._input} tokens, answers of {self._output}"

    def sessions(self, count: int, rng: random.Random) -> Iterator[Session]:
        for _ in range(count):
            yield Session((Turn(self._maker.make(self._input.draw(rng), rng), self._output.draw(rng)),))


class PrefixWorkload:
    """Each prompt begins with one of a few prefixes."""

    name = "prefix"

    def __init__(self, maker: Maker, prefixes: int, prefix_length: int, input: Length, output: Length) -> None:
        self._maker, self._input, self._output = maker, input, output
        self._prefixes = prefixes
        self.shared_tokens = prefix_length

    def describe(self) -> str:
        return (
            f"{self._prefixes} shared prefix{'es' if self._prefixes > 1 else ''} of {self.shared_tokens} tokens, "
            f"then {self._input} of a prompt's own, answers of {self._output}"
        )

    def sessions(self, count: int, rng: random.Random) -> Iterator[Session]:
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
        earlier = (turns.low + turns.high) / 2 - 1
        self.shared_tokens = int(earlier / 2 * (input.low + input.high + output.low + output.high) / 2)

    def describe(self) -> str:
        return (
            f"conversations of {self._turns} turns, each with {self._input} new tokens and an answer of {self._output}"
        )

    def sessions(self, count: int, rng: random.Random) -> Iterator[Session]:
        for _ in range(count):
            turns = range(self._turns.draw(rng))
            yield Session(
                tuple(Turn(self._maker.make(self._input.draw(rng), rng), self._output.draw(rng)) for _ in turns)
            )


class ShareGPTWorkload:
    """First questions of a file of conversations: [{"conversations": [{"from": "human", "value": ...}, ...]}, ...].

    An answer is as long as the file's, at four characters a token.
    """

    name = "sharegpt"
    shared_tokens = 0

    def __init__(self, path: Path, longest: int) -> None:
        self._path = path
        self._turns = []
        for entry in _read_json(path):
            texts = _texts(entry)
            if len(texts) >= 2 and texts[0]:
                self._turns.append(Turn(texts[0][: 4 * longest], min(longest, max(4, len(texts[1]) // 4))))
        if not self._turns:
            raise WorkloadError(f'{path} holds no conversation: it is to be a list of {{"conversations": [...]}}')

    def describe(self) -> str:
        return f"questions of {self._path.name}, which has {len(self._turns)}"

    def sessions(self, count: int, rng: random.Random) -> Iterator[Session]:
        if count > len(self._turns):
            raise WorkloadError(f"{self._path} has {len(self._turns)} questions, {count} are wanted: lower --requests")
        for turn in rng.sample(self._turns, count):
            yield Session((turn,))


class TraceWorkload:
    """A trace replayed: lines of {"timestamp": ms, "input_length": n, "output_length": n} as Mooncake's, or with
    "prompt" (a text or token ids) instead of a length."""

    name = "trace"
    shared_tokens = 0

    def __init__(self, path: Path, maker: Maker, speed: float) -> None:
        self._path, self._maker, self._speed = path, maker, speed
        self._lines = [_trace_line(path, number, line) for number, line in enumerate(_read_lines(path), 1)]
        if not self._lines:
            raise WorkloadError(f"{path} is empty")
        self._lines.sort(key=lambda line: line.seconds)

    def describe(self) -> str:
        return f"{self._path.name}, {len(self._lines)} requests, at {self._speed:g} times its speed"

    def sessions(self, count: int, rng: random.Random) -> Iterator[Session]:
        began = self._lines[0].seconds
        for line in self._lines[:count]:
            content = line.prompt or self._maker.make(line.input_length, rng)
            yield Session((Turn(content, line.output_length),), (line.seconds - began) / self._speed)


class _TraceLine(Struct, frozen=True):
    seconds: float
    prompt: Content
    input_length: int
    output_length: int


def _trace_line(path: Path, number: int, line: str) -> _TraceLine:
    try:
        entry = json.loads(line)
        prompt = entry.get("prompt", "")
        return _TraceLine(
            seconds=float(entry["timestamp"]) / 1000,
            prompt=prompt if isinstance(prompt, str) else tuple(map(int, prompt)),
            input_length=0 if prompt else int(entry["input_length"]),
            output_length=int(entry["output_length"]),
        )
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
