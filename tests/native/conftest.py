"""The kernels as this machine compiles them, and for older CPUs: every vector width of the sources is tested."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from surefoot.config.hardware import probe
from surefoot.native import library
from surefoot.native.kernels import Kernels
from tests.native_kernels import native_library

OLDER = {"avx2": ("-mavx2", "-mfma", "-mf16c"), "x86-64": ("-march=x86-64",)}


@pytest.fixture(params=["native", *OLDER], scope="session")
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    path: Path = native_library()
    if request.param != "native":
        if platform.machine() != "x86_64" or (request.param == "avx2" and "avx2" not in probe().cpu_features):
            pytest.skip("not for this CPU")
        path = tmp_path_factory.mktemp("kernels") / "kernels.so"
        library._compile([*library._find(""), *OLDER[request.param], *library.FLAGS], path)
    return Kernels(path, threads=3)
