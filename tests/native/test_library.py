"""Compiling on first use: what is kept, and everything that may go wrong."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.native import library
from surefoot.native.library import NativeError, ensure
from tests.native_kernels import native_library


def silent(_: str) -> None: ...


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """One quick source instead of the kernels, whose test always passes."""
    native_library()  # skips where there is no compiler; of the true sources, since it is made once for all tests
    sources = tmp_path / "sources"
    sources.mkdir()
    monkeypatch.setattr(library, "SOURCES", sources)
    monkeypatch.setattr(library, "_test", silent)

    def write(text: str) -> None:
        (sources / "a.c").write_text(text)

    write("int one(void) { return 1; }\n")
    return write


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_compiled_once(small: Callable[[str], None], tmp_path: Path) -> None:
    said: list[str] = []
    first = ensure("", tmp_path / "cache", said.append)
    assert ensure("", tmp_path / "cache", said.append) == first
    assert len(said) == 1
    small("int two(void) { return 2; }\n")
    assert ensure("", tmp_path / "cache", said.append) != first
    assert len(said) == 2
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".so", ".so"]


def test_another_compiler_makes_its_own(small: Callable[[str], None], tmp_path: Path) -> None:
    other = script(tmp_path / "mycc", 'exec cc "$@"')
    assert ensure("", tmp_path / "cache", silent) != ensure(other, tmp_path / "cache", silent)


def test_a_command_with_arguments(small: Callable[[str], None], tmp_path: Path) -> None:
    """`ccache gcc`, say."""
    assert ctypes.CDLL(str(ensure("env LC_ALL=C cc -O1", tmp_path / "cache", silent))).one() == 1


@pytest.mark.parametrize("size", [0, 1000])
def test_a_cut_file_is_not_loaded(small: Callable[[str], None], tmp_path: Path, size: int) -> None:
    library = ensure("", tmp_path / "cache", silent)
    os.truncate(library, size)
    said: list[str] = []
    assert ctypes.CDLL(str(ensure("", tmp_path / "cache", said.append))).one() == 1
    assert len(said) == 1


def test_two_at_once(small: Callable[[str], None], tmp_path: Path) -> None:
    made: list[Path] = []
    threads = [threading.Thread(target=lambda: made.append(ensure("", tmp_path, silent))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert len(set(made)) == 1


def test_what_cannot_be_compiled_is_shown(small: Callable[[str], None], tmp_path: Path) -> None:
    small("int one(void) { return oen; }\n")
    with pytest.raises(NativeError, match=r"exit code 1: .*oen"):
        ensure("", tmp_path / "cache", silent)
    assert not list((tmp_path / "cache").iterdir())


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(NativeError, match=r"there is no C compiler .*apt install gcc"):
        ensure("", tmp_path, silent)
    with pytest.raises(NativeError, match="'mycc -m64' is not there: change --c-compiler"):
        ensure("mycc -m64", tmp_path, silent)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("exit 3", "failed with exit code 3"),
        ("exit 0", "made no library"),
        ("kill -9 $$", "failed with signal 9"),
        ("[ $1 = --version ] || sleep 60", "did not end within 1 s"),  # sleep is a child that holds the pipes
        ("[ $1 = --version ] || head -c 200 /dev/urandom >&2; exit 1", "failed with exit code 1"),
    ],
    ids=["fails", "makes-nothing", "killed", "hangs", "not-utf8"],
)
def test_broken_compilers(
    small: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, complaint: str
) -> None:
    monkeypatch.setattr(library, "COMPILE_SECONDS", 1.0)
    with pytest.raises(NativeError, match=complaint):
        ensure(script(tmp_path / "cc", text), tmp_path / "cache", silent)


def test_a_folder_that_cannot_be_made(small: Callable[[str], None], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NativeError, match="file/cache cannot hold the compiled kernels: Not a directory"):
        ensure("", tmp_path / "file" / "cache", silent)


def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_bytes(b"neither a script nor a binary\n")
    compiler.chmod(0o755)
    with pytest.raises(NativeError, match=r"cc cannot be run: Exec format error"):
        ensure(str(compiler), tmp_path / "cache", silent)


def test_a_library_that_crashes_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native_library()
    sources = tmp_path / "sources"
    shutil.copytree(library.SOURCES, sources, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    broken = (
        (sources / "pool.c")
        .read_text()
        .replace("struct pool *pool = calloc", "__builtin_trap();\n    struct pool *pool = calloc")
    )
    (sources / "pool.c").write_text(broken)
    monkeypatch.setattr(library, "SOURCES", sources)
    with pytest.raises(NativeError, match=r"the test of the compiled kernels failed with signal \d+ \("):
        ensure("", tmp_path / "cache", silent)
    assert not list((tmp_path / "cache").iterdir())
