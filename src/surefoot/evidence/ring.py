"""The flight recorder's ring: a file of fixed size that is mapped into memory, so that it survives SIGKILL.

Layout, little-endian: 8 bytes magic, u64 capacity, u64 tail, u64 head, then `capacity` bytes of records. Tail and head
are logical offsets that only grow; a byte at offset o lies at o % capacity. A record is u32 length, u32 CRC-32 of its
payload, payload. The writer moves the tail before it overwrites old records, and the head after the new one is whole:
whatever instant the process dies at, the records from tail to head are intact.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

MAGIC = b"SFRING01"
_HEADER = struct.Struct("<8sQQQ")
_TAIL = struct.Struct("<Q")
_TAIL_AT, _HEAD_AT = 16, 24
_RECORD = struct.Struct("<II")


class RingError(ValueError):
    """The file is not a ring, or is damaged."""


class RingWriter:
    """Appends records; the oldest make room. One writer per file."""

    def __init__(self, path: Path, capacity: int) -> None:
        """Creates `path` anew. capacity: bytes for records."""
        self._capacity = capacity
        with path.open("w+b") as file:
            # Not a sparse file: a disk that fills up later would end this process at a write (SIGBUS).
            os.posix_fallocate(file.fileno(), 0, _HEADER.size + capacity)
            self._map = mmap.mmap(file.fileno(), _HEADER.size + capacity)
        self._map[: _HEADER.size] = _HEADER.pack(MAGIC, capacity, 0, 0)
        self._tail = self._head = 0

    def append(self, payload: bytes) -> None:
        """ValueError if the payload can never fit."""
        size = _RECORD.size + len(payload)
        if size > self._capacity:
            raise ValueError(f"a record of {len(payload)} bytes does not fit a ring of {self._capacity}")
        while self._head + size - self._tail > self._capacity:
            length, _ = _RECORD.unpack(_read(self._map, self._capacity, self._tail, _RECORD.size))
            self._tail += _RECORD.size + length
        self._map[_TAIL_AT : _TAIL_AT + 8] = _TAIL.pack(self._tail)
        self._write(self._head, _RECORD.pack(len(payload), zlib.crc32(payload)) + payload)
        self._head += size
        self._map[_HEAD_AT : _HEAD_AT + 8] = _TAIL.pack(self._head)

    def close(self) -> None:
        self._map.close()

    def _write(self, offset: int, data: bytes) -> None:
        at = offset % self._capacity
        first = min(len(data), self._capacity - at)
        self._map[_HEADER.size + at : _HEADER.size + at + first] = data[:first]
        self._map[_HEADER.size : _HEADER.size + len(data) - first] = data[first:]


def read_ring(path: Path) -> Iterator[bytes]:
    """The payloads from the oldest to the newest. RingError names what is wrong with the file."""
    data = path.read_bytes()
    if len(data) < _HEADER.size or data[:8] != MAGIC:
        raise RingError(f"{path} is not a flight recorder's ring")
    _, capacity, tail, head = _HEADER.unpack(data[: _HEADER.size])
    if len(data) != _HEADER.size + capacity:
        raise RingError(f"{path} has {len(data)} bytes, its header says {_HEADER.size + capacity}")
    while tail < head:
        length, checksum = _RECORD.unpack(_read(data, capacity, tail, _RECORD.size))
        if tail + _RECORD.size + length > head:
            raise RingError(f"{path}: the record at {tail} runs past the end at {head}")
        payload = _read(data, capacity, tail + _RECORD.size, length)
        if zlib.crc32(payload) != checksum:
            raise RingError(f"{path}: the record at {tail} has a wrong checksum")
        yield payload
        tail += _RECORD.size + length


def _read(data: bytes | mmap.mmap, capacity: int, offset: int, size: int) -> bytes:
    at = offset % capacity
    first = min(size, capacity - at)
    return data[_HEADER.size + at : _HEADER.size + at + first] + data[_HEADER.size : _HEADER.size + size - first]
