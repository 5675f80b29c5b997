"""Reading server-sent events in tests."""

from __future__ import annotations

import json
from typing import Any

DONE = "[DONE]"


def events(text: str) -> list[Any]:
    """The events of a whole stream: parsed JSON, and DONE as it is."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    datas = [block.removeprefix("data: ") for block in blocks]
    return [data if data == DONE else json.loads(data) for data in datas]


def chat_text(chunks: list[Any]) -> str:
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


def completion_text(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


def reasons(chunks: list[Any], index: int = 0) -> list[str]:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
