"""Typed one-way channels between two processes: msgspec over ZeroMQ.

The receiver binds, the sender connects; either may start first. A channel does not tell of the other side's death:
the supervisor does, and gives both sides the address of a new one (`control.Connect`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

LINGER_MS = 1000  # in which the last messages may still leave

T = TypeVar("T")


class Sender(Generic[T]):
    """Sends each batch of messages as one frame. Never blocks: the queue is bounded by the scheduler's own bounds."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, messages: Sequence[T]) -> None:
        self._socket.send(self._encoder.encode(messages))

    def close(self, linger: bool = True) -> None:
        """linger: whether messages that have not left may still do so. Not if their receiver is dead."""
        self._socket.close(None if linger else 0)


class Receiver(Generic[T]):
    """Receives in a thread of its own or in the engine's loop."""

    def __init__(self, address: str, message_type: Any) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._decoder: msgspec.msgpack.Decoder[list[T]] = msgspec.msgpack.Decoder(list[message_type])

    def drain(self, timeout: float) -> list[T]:
        """All messages that are there; waits up to `timeout` seconds for the first (0: not at all)."""
        messages: list[T] = []
        if timeout and not self._socket.poll(int(timeout * 1000)):
            return messages
        while True:
            try:
                messages += self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return messages

    def close(self) -> None:
        self._socket.close(linger=0)


class AsyncReceiver(Generic[T]):
    """Receives in an asyncio loop."""

    def __init__(self, address: str, message_type: Any) -> None:
        self._socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._decoder: msgspec.msgpack.Decoder[list[T]] = msgspec.msgpack.Decoder(list[message_type])

    async def receive(self) -> list[T]:
        """The next batch of messages."""
        return self._decoder.decode(await self._socket.recv())

    def close(self) -> None:
        self._socket.close(linger=0)
