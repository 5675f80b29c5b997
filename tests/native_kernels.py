"""The native kernels, compiled once for all tests; tests that need them are skipped where there is no C compiler."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from surefoot.config.planning import NATIVE_FOLDER
from surefoot.native.library import NativeError, ensure


@functools.lru_cache(maxsize=1)
def native_library() -> Path:
    try:
        return ensure("", NATIVE_FOLDER, lambda _: None)
    except NativeError as error:
        if "no C compiler" in str(error):
            pytest.skip(str(error))
        raise
