"""What a user calls a model is found, or the message says what was found instead and what to give."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from surefoot.checkpoint.errors import CheckpointError
from surefoot.checkpoint.locate import HubModel, locate
from surefoot.config import settings
from surefoot.config.planning import plan_engine


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


@pytest.mark.parametrize(
    "model, expected",
    [
        ("org/Name-1.5B", HubModel("org/Name-1.5B", "", "")),
        ("org/Name-GGUF:Q4_K_M", HubModel("org/Name-GGUF", "", "Q4_K_M")),
        ("org/Name-GGUF/sub/m.Q8_0.gguf", HubModel("org/Name-GGUF", "sub/m.Q8_0.gguf", "")),
    ],
)
def test_names_on_the_hub(model: str, expected: HubModel) -> None:
    assert HubModel.parse(model) == expected


@pytest.mark.parametrize(
    "model",
    ["name", "./org/name", "/org/name", "~/org/name", "models/m.gguf", "models/model.safetensors", "a/b/c", "a/b:", ""],
)
def test_what_can_only_be_a_path(model: str) -> None:
    assert HubModel.parse(model) is None


@pytest.mark.parametrize(
    "model, meant",
    [
        ("https://huggingface.co/org/name", "org/name"),
        ("hf.co/org/name:Q4_K_M", "org/name:Q4_K_M"),
        ("https://huggingface.co/org/name/tree/v1", "org/name with --revision v1"),
        ("https://huggingface.co/org/name/resolve/main/m.gguf?download=true", "org/name/m.gguf with --revision main"),
        (" org/name ", "org/name"),
        ("org/name/", "org/name"),
        ("org/name@v1", "org/name with --revision v1"),
    ],
)
def test_what_is_nearly_a_name_on_the_hub(model: str, meant: str) -> None:
    assert HubModel.parse(model) is None
    with pytest.raises(CheckpointError, match=f"is not here: did you mean {meant}, a model of the Hugging Face hub"):
        locate(model)


@pytest.mark.parametrize("model", ["./org/name", "https://example.com/org/name", "a/b/c", "name@v1", "org/absent.gguf"])
def test_what_is_not_nearly_a_name_on_the_hub(model: str) -> None:
    with pytest.raises(CheckpointError, match="there is no file or directory"):
        locate(model)


def test_a_revision_of_what_is_here_is_refused(tmp_path: Path) -> None:
    directory_with(tmp_path, "config.json")
    with pytest.raises(CheckpointError, match="--revision v1 means nothing for"):
        plan_engine(settings.load({"model": str(tmp_path), "revision": "v1"}), Console(quiet=True))
