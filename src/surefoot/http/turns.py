"""Long work of one request beside short work of all others: the event loop is everybody's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

INLINE_SIZE = 4_096  # what is longer is worked on in a thread: other clients' tokens go on meanwhile
LONG_SIZE = 65_536  # of what is longer, one is worked on at a time: it takes memory, and a thread from the others

T = TypeVar("T")


async def in_turn(size: int, work: Callable[[], T]) -> T:
    """The result of `work` on so many characters or tokens: here if they are few, else in a thread."""
    if size > INLINE_SIZE:
        return await asyncio.to_thread(work)
    await asyncio.sleep(0)  # other clients' turn, in a request of many prompts
    return work()


class OneLongAtATime:
    """Like `in_turn`, but of long work there is one in a thread, and the others wait."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(1)

    async def in_turn(self, size: int, work: Callable[[], T]) -> T:
        if size <= LONG_SIZE:
            return await in_turn(size, work)
        async with self._free:
            return await asyncio.to_thread(work)
