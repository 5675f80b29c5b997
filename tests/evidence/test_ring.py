"""The flight recorder's ring: what is read back, and what survives."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from surefoot.evidence.ring import RingError, RingWriter, read_ring


def test_the_newest_records_are_kept_whole(tmp_path: Path) -> None:
    """Random sizes over many turns of the ring; after each append, what is read is a suffix of what was written."""
    rng = random.Random(5)
    ring = RingWriter(tmp_path / "ring", capacity=1000)
    written: list[bytes] = []
    for number in range(400):
        written.append(number.to_bytes(4, "little") + rng.randbytes(rng.randrange(0, 300)))
        ring.append(written[-1])
        kept = list(read_ring(tmp_path / "ring"))
        assert kept == written[-len(kept) :]
        following = 8 + len(written[-len(kept) - 1]) if len(kept) < len(written) else 0
        used = sum(8 + len(payload) for payload in kept)
        assert used <= 1000
        assert not following or used + following > 1000, "a record was dropped that had room"


def test_a_record_that_never_fits_is_refused(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "ring", capacity=100)
    ring.append(bytes(92))
    with pytest.raises(ValueError, match="93 bytes does not fit a ring of 100"):
        ring.append(bytes(93))
    assert list(read_ring(tmp_path / "ring")) == [bytes(92)]


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda data: data[:20], "is not a flight recorder's ring"),
        (lambda data: b"XXXXXXXX" + data[8:], "is not a flight recorder's ring"),
        (lambda data: data[:-1], "its header says"),
        (lambda data: data[:45] + b"\xff" + data[46:], "wrong checksum"),
        (lambda data: data[:32] + b"\xff\xff\xff\x7f" + data[36:], "runs past the end"),
    ],
    ids=["short", "magic", "truncated", "payload", "length"],
)
def test_damage_is_named(tmp_path: Path, damage: object, message: str) -> None:
    RingWriter(tmp_path / "ring", capacity=100).append(b"a step plan")
    assert callable(damage)
    (tmp_path / "ring").write_bytes(damage((tmp_path / "ring").read_bytes()))
    with pytest.raises(RingError, match=message):
        list(read_ring(tmp_path / "ring"))


def test_records_survive_sigkill(tmp_path: Path) -> None:
    code = f"""
import itertools, pathlib
from surefoot.evidence.ring import RingWriter
ring = RingWriter(pathlib.Path({str(tmp_path / "ring")!r}), 4096)
for number in itertools.count():
    ring.append(number.to_bytes(8, "little") * (1 + number % 9))
    if number == 1000:
        print("going", flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"going\n"
    time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    numbers = [int.from_bytes(payload[:8], "little") for payload in read_ring(tmp_path / "ring")]
    assert len(numbers) > 30
    assert numbers[0] > 900
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
