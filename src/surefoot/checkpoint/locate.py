"""From what a user calls a model to files: a GGUF file, or a Hugging Face directory with config.json.

What is not here may be a model of the Hugging Face hub, by its name there: checkpoint.hub fetches it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from msgspec import Struct

from surefoot.checkpoint.errors import CheckpointError

CheckpointFormat = Literal["gguf", "safetensors"]

_HUB_MODEL = re.compile(
    r"(?P<repo>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?::(?P<quant>[\w.-]+)|/(?P<file>.+\.gguf))?", re.ASCII
)
_NEARLY_HUB_MODEL = re.compile(  # an address, say, or with spaces around it
    r"\s*(https?://)?((www\.)?(huggingface|hf)\.co/)?(?P<name>[^@\s?]+?)"
    r"(@(?P<at>[^\s@]+)|/(tree|blob|resolve)/(?P<revision>[^/\s]+)(?P<file>/[^\s?]+)?)?/?(\?\S*)?\s*"
)
_FILE_ENDINGS = (".gguf", ".safetensors", ".json", ".bin")
_PICKLED_WEIGHTS = (".bin", ".pt", ".pth")


class HubModel(Struct, frozen=True):
    """A model of the Hugging Face hub, as it is called on the command line."""

    repo: str  # organisation/name
    file: str  # GGUF file in it; empty: not named
    quant: str  # Q4_K_M, say: the GGUF file whose name ends so; empty: not named

    @classmethod
    def parse(cls, model: str) -> HubModel | None:
        """Reads organisation/name, organisation/name:Q4_K_M and organisation/name/file.gguf; None is anything else."""
        match = _HUB_MODEL.fullmatch(model)
        if match is None or match["repo"].endswith(_FILE_ENDINGS):
            return None
        return cls(match["repo"], match["file"] or "", match["quant"] or "")


def locate(model: str) -> tuple[Path, CheckpointFormat]:
    """The absolute path of a checkpoint that is here, and what it is.

    Raises CheckpointError, which says what was found instead. A directory without any weights passes: dummy weights
    need only its config.json.
    """
    path = Path(model).expanduser().absolute()
    if path.is_dir():
        return _check_directory(path), "safetensors"
    if path.is_file():
        return _check_file(path), "gguf"
    if meant := _meant(model):
        raise CheckpointError(f"{model!r} is not here: did you mean {meant}, a model of the Hugging Face hub?")
    raise CheckpointError(
        f"there is no file or directory {path}: give a .gguf file, a directory with config.json, or a model of the "
        "Hugging Face hub as organisation/name"
    )


def _meant(model: str) -> str:
    """The hub's name of what is nearly one, with its revision; empty if it is not."""
    match = _NEARLY_HUB_MODEL.fullmatch(model)
    name = match["name"] + (match["file"] or "") if match else ""
    if match is None or HubModel.parse(name) is None:
        return ""
    revision = match["at"] or match["revision"]
    return f"{name} with --revision {revision}" if revision else name


def has_pickled_weights(names: Iterable[str]) -> bool:
    return any(name.endswith(_PICKLED_WEIGHTS) for name in names)


def _check_file(path: Path) -> Path:
    if path.suffix == ".gguf":
        return path
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise CheckpointError(f"{path} is one file of a checkpoint: give its directory, {path.parent}")
    raise CheckpointError(f"{path} is not a .gguf file; give one, or a directory with config.json")


def _check_directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        found = sorted(file.name for file in path.glob("*.gguf"))
        if found:
            raise CheckpointError(f"{path} has no config.json but GGUF files: give one of them ({', '.join(found)})")
        raise CheckpointError(f"{path} has no config.json: it is not the directory of a Hugging Face model")
    pickled = sorted(file.name for file in path.iterdir() if has_pickled_weights([file.name]))
    if pickled and not any(path.glob("*.safetensors*")):
        raise CheckpointError(
            f"{path} has weights in PyTorch's pickle format only ({pickled[0]}), which can run code when it is "
            "loaded, and is not read. Convert them: load the model with transformers and call "
            "`save_pretrained(directory)`."
        )
    return path
