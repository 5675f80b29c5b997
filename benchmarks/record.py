"""Rows of results: one CSV file a benchmark in results/, each row with date, machine, versions and commit."""

from __future__ import annotations

import csv
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from surefoot.config.hardware import probe

RESULTS = Path(__file__).parent / "results"


def append(name: str, rows: Sequence[Mapping[str, object]], *libraries: str) -> None:
    """Appends `rows`, all of the same columns, to results/`name`, and prints them.

    libraries: further packages whose versions matter.
    """
    machine = probe()
    common = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{machine.num_cpus} x {machine.cpu_name}",
        "versions": ", ".join([f"Python {platform.python_version()}", *map(version, libraries)]),
        "commit": commit(),
    }
    with (RESULTS / name).open("a", newline="") as file:
        writer = csv.DictWriter(file, [*common, *rows[0]], lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        for row in rows:
            writer.writerow(common | dict(row))
            print("  ".join(f"{name} {value}" for name, value in row.items() if value != ""), flush=True)


def version(library: str) -> str:
    return f"{library} {metadata.version(library)}"


def commit() -> str:
    """Of the source that was measured: new rows of results do not make it dirty."""
    describe = ["git", "describe", "--always"]
    changed = ["git", "status", "--porcelain", "--untracked-files=no", "--", "src", "pyproject.toml"]
    root = RESULTS.parents[1]
    name = subprocess.run(describe, cwd=root, capture_output=True, text=True, check=False).stdout.strip()
    dirty = subprocess.run(changed, cwd=root, capture_output=True, text=True, check=False).stdout.strip()
    return (name or "unknown") + ("-dirty" if dirty else "")
