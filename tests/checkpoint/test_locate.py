"""What a user calls a model is found, or the message says what was found instead and what to give."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.checkpoint.errors import CheckpointError
from surefoot.checkpoint.locate import locate


def directory_with(tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_gguf_file(tmp_path: Path) -> None:
    path = directory_with(tmp_path, "m.gguf") / "m.gguf"
    assert locate(str(path)) == (path, "gguf")


@pytest.mark.parametrize("names", [("config.json",), ("config.json", "model.safetensors", "pytorch_model.bin")])
def test_directory(tmp_path: Path, names: tuple[str, ...]) -> None:
    assert locate(str(directory_with(tmp_path, *names))) == (tmp_path, "safetensors")


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory_with(tmp_path, "m.gguf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("m.gguf") == locate("~/m.gguf") == (tmp_path / "m.gguf", "gguf")


@pytest.mark.parametrize(
    "names, model, message",
    [
        ((), "", "has no config.json: it is not the directory"),
        (("a.gguf", "b.gguf"), "", r"GGUF files: give one of them \(a\.gguf, b\.gguf\)"),
        (("config.json", "pytorch_model.bin"), "", r"pickle format only \(pytorch_model\.bin\).*save_pretrained"),
        (("config.json", "model.safetensors"), "config.json", "is one file of a checkpoint: give its directory"),
        (("config.json", "model.safetensors"), "model.safetensors", "is one file of a checkpoint"),
        (("notes.txt",), "notes.txt", "is not a .gguf file"),
        ((), "absent.gguf", "there is no file or directory"),
    ],
)
def test_refusals_say_what_to_give(tmp_path: Path, names: tuple[str, ...], model: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        locate(str(directory_with(tmp_path, *names) / model))
    assert str(tmp_path) in str(caught.value)


def test_hub_ids_are_recognised() -> None:
    with pytest.raises(
        CheckpointError,
        match=r"of the Llama family, run `hf download org/Name-1\.5B --local-dir Name-1",
    ):
        locate("org/Name-1.5B")
