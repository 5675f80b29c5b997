"""What a plan finds out about the native kernels before it decides: whether they are there, how fast, how large."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from rich.console import Console

from surefoot.checkpoint.gguf import GGUFFile
from surefoot.config import hardware, planning, settings
from surefoot.config.engine_plan import EnginePlan
from surefoot.config.planning import plan_engine, stored_matrix_bytes
from surefoot.config.resolve import PlanError
from surefoot.native import threads
from surefoot.native.kernels import FORMATS, Kernels, Linear, WeightFormat
from tests.native_kernels import native_library
from tests.tiny import TinyLlama

NO_COMPILER = "the C compiler 'no-such-cc' is not there: change --c-compiler"


def plan(tiny: TinyLlama, **asked: Any) -> EnginePlan:
    return plan_engine(settings.load({"model": str(tiny.path), **asked}), Console(quiet=True))


def why(made: EnginePlan, setting: str) -> str:
    return next(reason.why for reason in made.reasons if reason.field == setting)


def never(*_: Any) -> Any:
    raise AssertionError("nothing is decided by this")


def test_without_a_compiler_torch_serves_and_says_so(tiny_llama: TinyLlama) -> None:
    made = plan(tiny_llama, c_compiler="no-such-cc")
    assert (made.attention_backend, made.native_library) == ("torch", "")
    assert why(made, "cpu_kernels") == f"the native ones cannot be used: {NO_COMPILER}"


def test_native_kernels_without_a_compiler(tiny_llama: TinyLlama) -> None:
    with pytest.raises(PlanError) as caught:
        plan(tiny_llama, c_compiler="no-such-cc", cpu_kernels="native")
    assert caught.value.conflicts == (f"--cpu-kernels native: {NO_COMPILER}",)


def test_torch_kernels_need_nothing_compiled(tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "ensure", never)
    assert plan(tiny_llama, cpu_kernels="torch").native_library == ""


def test_threads_are_measured_unless_asked_for(tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    library = str(native_library())
    monkeypatch.setattr(threads, "MAX_WAITING", math.inf)  # whatever else runs
    monkeypatch.setattr(hardware, "num_cpus", lambda: 3)
    made = plan(tiny_llama)
    assert made.native_library == library
    assert made.num_threads in (1, 2, 3)
    assert all(f"with {count}: " in why(made, "threads") for count in (1, 2, 3))
    monkeypatch.setattr(planning, "measure", lambda *_: [])
    assert plan(tiny_llama).num_threads == 3
    assert "busy" in why(plan(tiny_llama), "threads")
    monkeypatch.setattr(planning, "measure", never)
    assert plan(tiny_llama, threads=2).num_threads == 2
    monkeypatch.setattr(hardware, "num_cpus", lambda: 1)
    assert plan(tiny_llama).num_threads == 1


def test_stored_bytes_are_those_that_the_kernels_hold(tmp_path: Path) -> None:
    outputs, inputs = 64, 96
    types = gguf.GGMLQuantizationType
    held: dict[gguf.GGMLQuantizationType, WeightFormat] = {
        types.Q4_0: "w4",
        types.Q4_1: "w4",
        types.Q8_0: "w8",
        types.Q5_0: "w16",
        types.F32: "w16",
    }
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for type_ in held:
        matrix = gguf.quants.quantize(np.ones((outputs, inputs), np.float32), type_)
        writer.add_tensor(f"{type_.name}.weight", matrix, raw_dtype=type_)
    writer.add_tensor("norm.weight", np.ones(inputs, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    lib = Kernels(native_library(), threads=1).lib
    wanted = sum(lib.linear_bytes(Linear(FORMATS[format], inputs, outputs, None, None)) for format in held.values())
    assert stored_matrix_bytes(GGUFFile.open(tmp_path / "m.gguf")) == wanted
