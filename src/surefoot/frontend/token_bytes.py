"""The bytes that one token stands for, read off the decoder of a `tokenizers` tokenizer.

A decoder makes text of a whole list of tokens. What it does to each of them is one of these:

    byte-level     every character of a token stands for a byte
    SentencePiece  "▁" is a space, and with byte fallback "<0x41>" is the byte 0x41
"""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte: itself if it is printable and no space, else the next one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


class TokenBytes:
    """Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        steps = _steps(json.loads(backend.decoder.__getstate__())) if backend.decoder else []
        names = {step["type"] for step in steps}
        self._backend = backend
        self._special = {id_: t.content for id_, t in backend.get_added_tokens_decoder().items() if t.special}
        self._byte_level = "ByteLevel" in names
        self._byte_fallback = "ByteFallback" in names
        self._sentencepiece = "Metaspace" in names or any(
            step["type"] == "Replace" and step["pattern"] == {"String": "▁"} for step in steps
        )

    def __call__(self, token_id: int) -> bytes:
        """Empty for an id that the tokenizer does not have."""
        if token_id in self._special:
            return self._special[token_id].encode()
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            # Added tokens may have characters outside the alphabet: they stand for themselves.
            return bytes(map(_ALPHABET.__getitem__, token)) if _ALPHABET.keys() >= set(token) else token.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        if self._sentencepiece:
            return token.replace("▁", " ").encode()
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text.encode()


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """A decoder's description as a flat list: sequences may be nested."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]
