"""One sequence as its reader sees it: tokens come in, text and the tokens' logprobs go out.

The rules of an output are here and nowhere else: where a stop string cuts it, what is held back, which tokens count,
when it is complete, and how it ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from surefoot.frontend.detokenizer import Decoder, IncrementalDecoder, StopFinder
from surefoot.frontend.sampling_params import SamplingParams
from surefoot.protocol.messages import NO_LOGPROBS, Finished, FinishReason, GenerateRequest, Logprobs


@dataclass(frozen=True, slots=True)
class Score:
    """Natural logarithms of probabilities at one place, of the model's own distribution."""

    logprob: float  # of the token that stands there
    top: tuple[tuple[int, float], ...]  # the most probable tokens' ids and theirs, best first


NO_SCORE = Score(math.nan, ())  # of the first token of a prompt, before which nothing stands


@dataclass(frozen=True, slots=True)
class ScoredToken:
    id: int
    score: Score
    offset: int  # characters of text before it


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of an output: some text, and the scored tokens whose text begins in it."""

    text: str
    tokens: tuple[ScoredToken, ...]  # empty if no logprobs were asked for


class Output:
    """The pieces' texts and tokens add up to the same, however the tokens came.

    Every token that counts is scored once, the one that completes a stop string and a stop id too. Those without text
    of their own come with the next text, or with the last piece.
    """

    def __init__(self, request: GenerateRequest, params: SamplingParams, tokenizer: Decoder) -> None:
        """`request` is what `params.to_request` gave."""
        self.request = request
        self.token_ids: list[int] = []  # up to and including the one that ended it
        self._is_hidden = params.max_tokens == 0
        self._shows_ends = params.include_stop_str_in_output
        self._stops = tuple(params.stop)
        self._decoder = IncrementalDecoder(tokenizer if params.skip_special_tokens else Verbatim(tokenizer))
        self._finder = StopFinder(self._stops)
        self._decoded = 0  # characters, those that are held back too
        self._shown = 0  # characters
        self._pending: deque[ScoredToken] = deque()  # those whose text has not begun to be shown

    @property
    def is_first_sibling(self) -> bool:
        """Of the sequences of one prompt; one without siblings is."""
        return self.request.id == self.request.group_id

    @property
    def stopped(self) -> bool:
        """A stop string was found: nothing more will come, whatever is pushed."""
        return self._finder.found

    def push(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs], finished: Finished | None) -> Piece:
        """What is new. `logprobs`: of these tokens, if they were asked for. `finished`: no more tokens will come."""
        if self.stopped or self._is_hidden:
            return Piece("", ())
        scored = list(scores(logprobs)) if self.request.logprobs != NO_LOGPROBS else []
        text = "".join(self._texts(token_ids, scored, finished))
        self._shown += len(text)
        is_last = self.stopped or finished is not None
        tokens = []
        while self._pending and (is_last or self._pending[0].offset < self._shown):
            token = self._pending.popleft()
            tokens.append(replace(token, offset=min(token.offset, self._shown)))  # a stop string's end with the text
        return Piece(text, tuple(tokens))

    def is_complete(self, finished: Finished) -> bool:
        """Whether there is an answer: the engine may have failed, or aborted it though no stop string was found."""
        return self.stopped or finished.reason in (FinishReason.STOP, FinishReason.LENGTH)

    def finish_reason(self, finished: Finished) -> Literal["stop", "length"]:
        """Of a complete output."""
        is_stop = self.stopped or (finished.reason is FinishReason.STOP and not self._is_hidden)
        return "stop" if is_stop else "length"

    def _texts(self, token_ids: Sequence[int], scored: list[Score], finished: Finished | None) -> Iterator[str]:
        has_stop_id = finished is not None and finished.reason is FinishReason.STOP
        rendered = len(token_ids) - (has_stop_id and not self._shows_ends)
        for position, token in enumerate(token_ids):
            self.token_ids.append(token)
            if self.request.logprobs != NO_LOGPROBS:
                self._pending.append(ScoredToken(token, scored[position], self._decoded))
            if position < rendered:
                yield self._find(self._decoder.push(token))
                if self.stopped:
                    return
        if finished is not None:
            yield self._find(self._decoder.flush())
            if not self.stopped:
                yield self._finder.held

    def _find(self, text: str) -> str:
        """The text that may be shown once `text` is decoded."""
        self._decoded += len(text)
        held = self._finder.held
        shown = self._finder.push(text)
        if self.stopped and self._shows_ends:
            rest = (held + text)[len(shown) :]
            shown += min((stop for stop in self._stops if rest.startswith(stop)), key=len)
        return shown


def scores(logprobs: Iterable[Logprobs]) -> Iterator[Score]:
    """One for each position, in order."""
    for part in logprobs:
        for chosen, ids, values in zip(part.chosen, part.top_ids, part.top_logprobs, strict=True):
            yield Score(chosen, tuple(zip(ids, values, strict=True)))


class Verbatim:
    """Decodes special tokens as they are written."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
