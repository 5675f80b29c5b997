"""Compiles the C files of this folder into one shared library, once for each compiler and CPU, and keeps it.

A library is tested in a process of its own before it gets its final name: one that computes something wrong or ends
with an illegal instruction is never loaded by a server.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE

SOURCES = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
COMPILE_SECONDS = 300.0  # after which a compiler is taken to hang
TEST_SECONDS = 60.0  # likewise the test of a library, and what asks a compiler for its version
# No -ffast-math: NaN and infinity are what tells a broken row from the others.
FLAGS = ("-std=gnu17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread")


class NativeError(Exception):
    """Why the kernels cannot be used here, with the way out."""


def ensure(compiler: str, folder: Path, say: Callable[[str], None]) -> Path:
    """The library, compiled if `folder` has none that fits. Raises NativeError.

    compiler: a command, or empty for the first of COMPILERS that is there. say: is told when something takes seconds.
    """
    found = _find(compiler)
    command = [*found, *_target_flags(), *FLAGS]
    name = f"kernels-{_digest(found, command)}"
    for library in sorted(folder.glob(f"{name}-*.so")):
        if library.name == f"{name}-{_content_digest(library)}.so":  # else it was cut, by a full disk for example
            return library
    say("compiling the CPU kernels for this machine, once")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "kernels.so"
            _compile(command, made)
            _test(made)
            # At once: another process may be doing the same.
            return made.replace(folder / f"{name}-{_content_digest(made)}.so")
    except OSError as error:
        raise NativeError(f"{folder} cannot hold the compiled kernels: {error.strerror or error}") from error


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


def _digest(compiler: list[str], command: list[str]) -> str:
    """Of all that decides what the library is: sources, command, compiler, C library, CPU."""
    digest = hashlib.sha256()
    for path in sorted((*SOURCES.glob("*.c"), *SOURCES.glob("*.h"))):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(" ".join(command).encode())
    digest.update(_run(shlex.join(compiler), [*compiler, "--version"], TEST_SECONDS).encode())
    digest.update(" ".join(platform.libc_ver()).encode())
    digest.update(_cpu().encode())
    return digest.hexdigest()[:16]


def _content_digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()[:16]


def _cpu() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    lines = (line for line in info.splitlines() if line.startswith(("model name", "flags", "Features", "CPU part")))
    return "\n".join(sorted(set(lines)))


def _compile(command: list[str], to: Path) -> None:
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    _run(f"the C compiler {command[0]}", [*command, *sources, "-lm", "-o", str(to)], COMPILE_SECONDS)
    if not to.is_file():
        raise NativeError(f"the C compiler {command[0]} made no library")


def _test(library: Path) -> None:
    test = [sys.executable, "-P", "-m", "surefoot.native.self_test", str(library)]
    _run("the test of the compiled kernels", test, TEST_SECONDS)


def _run(what: str, command: list[str], seconds: float) -> str:
    """What the command prints. Raises NativeError with some lines of its complaint if it fails."""
    try:
        child = subprocess.Popen(
            command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True, errors="replace", process_group=0
        )
    except OSError as error:
        raise NativeError(f"{command[0]} cannot be run: {error.strerror}") from error
    with child:
        try:
            output, complaint = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise NativeError(f"{what} did not end within {seconds:.0f} s") from None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)  # a compiler has children of its own, which hold the pipes
    if child.returncode:
        lines = complaint.strip().splitlines()
        shown = " | ".join([line for line in lines if "error" in line][:2] or lines[-2:]) or "it does not say why"
        raise NativeError(f"{what} failed with {_status(child.returncode)}: {shown}")
    return output


def _status(code: int) -> str:
    return f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
