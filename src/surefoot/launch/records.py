"""The folder in which a run keeps its flight recorder's rings, one for each engine that it started."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

KEPT_RECORDS = 8  # folders of earlier runs
KEPT_RINGS = 8  # of one run


@contextlib.contextmanager
def new_record_dir(parent: Path) -> Iterator[Path]:
    """A folder for this run, locked while the server runs.

    Of the folders of servers that have ended, all but the newest KEPT_RECORDS are deleted. Raises OSError with the
    way out.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=time.strftime("run-%Y%m%d-%H%M%S-"), dir=parent))
    except OSError as error:
        raise OSError(f"cannot write to {parent}: {error.strerror}. Choose another folder with --record-dir") from error
    with (made / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        by_age = sorted(parent.glob("run-*"), key=lambda folder: folder.stat().st_mtime_ns)
        for old in by_age[: -KEPT_RECORDS - 1]:
            with contextlib.suppress(OSError), (old / "lock").open("w") as other:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if its server still runs
                shutil.rmtree(old)
        yield made


def new_ring(record_dir: Path, engine: int) -> Path:
    """The file for a run's engine of that number. Those of its predecessors are kept, but for the oldest."""
    with contextlib.suppress(OSError):  # the engine says why it cannot write
        record_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have cleaned up
        (record_dir / f"steps-{engine - KEPT_RINGS}.ring").unlink(missing_ok=True)
    return record_dir / f"steps-{engine}.ring"
