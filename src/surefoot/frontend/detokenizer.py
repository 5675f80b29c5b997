"""Token ids to text, as they come.

IncrementalDecoder   ids -> text; holds back what is not yet a whole character
StopFinder           text -> text; holds back what may become a stop string, ends at the first one
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not (yet) a character
WINDOW = 8  # tokens after which the decoding window is shortened
GARBAGE_WINDOW = 4 * WINDOW  # a window this long that still ends in U+FFFD holds bytes that will never be text


class Decoder(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalDecoder:
    """The pieces add up to `tokenizer.decode(all ids)`, at a bounded cost per token.

    Only a window of the latest tokens is decoded. It begins with a token whose text is out already: decoders strip
    the space of the first token, which here belongs to text that was rendered before. One exception to the equality:
    SentencePiece's byte fallback rewrites a whole run of byte tokens as U+FFFD when the run turns out to be invalid;
    characters of the run that are out by then cannot be taken back.
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._rendered = 0  # characters of the window's text that are out
        self._limit = WINDOW  # window length at which to try to shorten it

    def push(self, token: int) -> str:
        """The text that later tokens cannot change."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        is_open = text.endswith(REPLACEMENT)
        is_garbage = is_open and len(self._window) > GARBAGE_WINDOW
        end = len(text)
        if is_garbage:
            end -= 3  # the most that an open character has shown of itself
        elif is_open:
            # Byte fallback writes U+FFFD for each byte of an open character, and of the characters before it.
            end = len(text.rstrip(REPLACEMENT))
        new = text[self._rendered : end]
        self._rendered += len(new)
        if len(self._window) >= self._limit and (is_garbage or not is_open):
            self._shorten(text)
        return new

    def flush(self) -> str:
        """What was held back: no more tokens come."""
        return self._tokenizer.decode(self._window)[self._rendered :]

    def _shorten(self, text: str) -> None:
        """Keeps the shortest tail that begins with rendered text and decodes alone as it does in place.

        For " the quick" with " the qu" rendered, "ick" will not do: none of it is rendered. " quick" decodes to "quick"
        where the space of the first token is stripped; that is the end of the text, and "qu" of it is rendered.
        """
        decode = self._tokenizer.decode
        for start in range(len(self._window) - 1, 0, -1):
            tail = decode(self._window[start:])
            rendered = self._rendered - (len(text) - len(tail))
            if rendered < 1 or not text.endswith(tail):
                continue
            # A tail that begins with U+FFFD may begin inside a character; then the two parts do not add up.
            if tail[0] != REPLACEMENT or decode(self._window[:start]) + tail == text:
                self._window, self._rendered = self._window[start:], rendered
                break
        else:
            self._window = [token for token in self._window if not self._is_special(token)]
        self._limit = max(WINDOW, 2 * len(self._window))

    def _is_special(self, token: int) -> bool:
        """Whether decoding leaves the token out: it changes nothing in the window."""
        decode = self._tokenizer.decode
        return not decode([token]) and bool(decode([token], skip_special_tokens=False))


class StopFinder:
    """Cuts the text before the stop string that is complete first; of several that end there, the longest.

    The result does not depend on how the text was chunked.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._first_characters = {stop[0] for stop in stops}
        self._longest = max(map(len, stops), default=0)
        self.held = ""  # may become a stop string; text like any other if nothing more comes
        self.found = False

    def push(self, text: str) -> str:
        """The text that is certainly before a stop string."""
        if not self._stops:
            return text
        text = self.held + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            self.found, self.held = True, ""
            return text[: min(matches)[1]]
        end = self._possible_start(text)
        self.held = text[end:]
        return text[:end]

    def _possible_start(self, text: str) -> int:
        """Where the longest suffix begins that a stop string may begin with; the length of `text` if none does."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_characters:
                suffix = text[start:]
                if any(stop.startswith(suffix) for stop in self._stops):
                    return start
        return len(text)
