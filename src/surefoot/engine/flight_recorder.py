"""What the engine did last, on disk before it is done: step plans before launch, results after."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from surefoot.evidence.ring import RingWriter, read_ring
from surefoot.protocol.step_plan import StepDone, StepFailed, StepPlan

RING_BYTES = 16 << 20  # hundreds of decode steps of 512 rows, thousands of small ones


class PlanRecord(msgspec.Struct, frozen=True, tag="plan"):
    at: float  # seconds since the epoch
    plan: StepPlan


class ResultRecord(msgspec.Struct, frozen=True, tag="result"):
    at: float
    result: StepDone | StepFailed


Record = PlanRecord | ResultRecord


class FlightRecorder:
    def __init__(self, path: Path, capacity: int = RING_BYTES) -> None:
        self._ring = RingWriter(path, capacity)
        self._encoder = msgspec.msgpack.Encoder()

    def record(self, entry: Record) -> None:
        self._ring.append(self._encoder.encode(entry))

    def close(self) -> None:
        self._ring.close()


def read_records(path: Path) -> Iterator[Record]:
    """Oldest first. RingError if the file is damaged."""
    decoder = msgspec.msgpack.Decoder(Record)
    return (decoder.decode(payload) for payload in read_ring(path))
