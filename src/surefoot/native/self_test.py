"""`python -m surefoot.native.self_test LIBRARY`: whether a library that was just compiled computes what it should here.

Exit code 1 with a line on stderr if not; an instruction that the CPU lacks ends the process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from surefoot.native.kernels import Kernels, WeightFormat

INPUTS, OUTPUTS = 96, 80
ROWS = (1, 3, 5, 40)  # few rows, more, and enough for a matrix unit
TOLERANCE = 1e-4


def main(path: Path) -> int:
    kernels = Kernels(path, threads=2)
    rng = np.random.default_rng(0)
    formats: dict[WeightFormat, type[np.floating]] = {"w16": np.float16, "w32": np.float32}
    for format, dtype in formats.items():
        matrix = rng.standard_normal((OUTPUTS, INPUTS)).astype(dtype)
        weight = kernels.pack(format, matrix, INPUTS)
        for rows in ROWS:
            x = rng.standard_normal((rows, INPUTS), dtype=np.float32)
            y = np.empty((rows, OUTPUTS), np.float32)
            kernels.lib.linear(kernels.pool, weight.struct, x.ctypes.data, rows, y.ctypes.data, 0)
            right = x.astype(np.float64) @ matrix.astype(np.float64).T
            error = float(np.abs(y - right).max() / np.abs(right).max())
            if not error < TOLERANCE:
                print(f"a product of {rows} rows with {format} weights is wrong by {error:.1e}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
