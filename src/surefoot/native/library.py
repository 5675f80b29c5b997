"""Compiles the C files of this folder into one shared library, once for each compiler and CPU, and keeps it.

A library is tested in a process of its own before it gets its final name: one that computes something wrong or ends
with an illegal instruction is never loaded by a server.
"""

from __future__ import annotations

import hashlib
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

SOURCES = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
COMPILE_SECONDS = 300.0  # after which a compiler is taken to hang
TEST_SECONDS = 60.0
# No -ffast-math: NaN and infinity are what tells a broken row from the others.
FLAGS = ("-std=gnu17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread", "-lm")


class NativeError(Exception):
    """Why the kernels cannot be used here, with the way out."""


def ensure(compiler: str, folder: Path, say: Callable[[str], None]) -> Path:
    """The library, compiled if `folder` has none that fits. Raises NativeError.

    compiler: a command, or empty for the first of COMPILERS that is there. say: is told when something takes seconds.
    """
    command = [*_find(compiler), *_target_flags(), *FLAGS]
    library = folder / f"kernels-{_digest(command)}.so"
    if library.is_file():
        return library
    say("compiling the CPU kernels for this machine, once")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "kernels.so"
            _compile(command, made)
            _test(made)
            made.replace(library)  # at once: another process may be doing the same
    except OSError as error:
        raise NativeError(f"{folder} cannot hold the compiled kernels: {error.strerror or error}") from error
    return library


def _find(compiler: str) -> list[str]:
    if compiler:
        command = shlex.split(compiler)
        if not command or shutil.which(command[0]) is None:
            raise NativeError(f"the C compiler {compiler!r} is not there: change --c-compiler")
        return command
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise NativeError("there is no C compiler (on Debian and Ubuntu: apt install gcc)")


def _target_flags() -> list[str]:
    """For the CPU of this machine. Symbols are bound within the library, whatever others are loaded."""
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    return [native] if sys.platform == "darwin" else [native, "-Wl,-Bsymbolic"]


def _digest(command: list[str]) -> str:
    """Of all that decides what the library is: sources, command, compiler, CPU."""
    digest = hashlib.sha256()
    for path in sorted((*SOURCES.glob("*.c"), *SOURCES.glob("*.h"))):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(" ".join(command).encode())
    digest.update(_run([command[0], "--version"], TEST_SECONDS).encode())
    digest.update(_cpu().encode())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    lines = (line for line in info.splitlines() if line.startswith(("model name", "flags", "Features", "CPU part")))
    return "\n".join(sorted(set(lines)))


def _compile(command: list[str], to: Path) -> None:
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    _run([command[0], *sources, *command[1:], "-o", str(to)], COMPILE_SECONDS)
    if not to.is_file():
        raise NativeError(f"{command[0]} made no library")


def _test(library: Path) -> None:
    _run([sys.executable, "-P", "-m", "surefoot.native.self_test", str(library)], TEST_SECONDS)


def _run(command: list[str], seconds: float) -> str:
    """What the command prints. Raises NativeError with some lines of its complaint if it fails."""
    shown = f"{Path(command[0]).name} {command[-1]}"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise NativeError(f"{shown} did not end within {seconds:.0f} s") from None
    except OSError as error:
        raise NativeError(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        complaint = " | ".join([line for line in lines if "error" in line][:2] or lines[-2:])
        raise NativeError(f"{shown} failed with {_status(done.returncode)}: {complaint}")
    return done.stdout


def _status(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
