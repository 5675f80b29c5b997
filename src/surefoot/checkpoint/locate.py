"""From what a user calls a model to files: a GGUF file, or a Hugging Face directory with config.json."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from surefoot.checkpoint.errors import CheckpointError

CheckpointFormat = Literal["gguf", "safetensors"]

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_PICKLED_WEIGHTS = ("*.bin", "*.pt", "*.pth")


def locate(model: str) -> tuple[Path, CheckpointFormat]:
    """The absolute path of a checkpoint, and what it is.

    Raises CheckpointError, which says what was found instead. A directory without any weights passes: dummy weights
    need only its config.json.
    """
    path = Path(model).expanduser().absolute()
    if path.is_dir():
        return _check_directory(path), "safetensors"
    if path.is_file():
        return _check_file(path), "gguf"
    if _HUB_ID.fullmatch(model):
        directory = model.rpartition("/")[2]
        raise CheckpointError(
            f"{model!r} is not a path here. If it is a model of the Hugging Face hub: downloads from there are not "
            f"supported yet. If it is of the Llama family, run `hf download {model} --local-dir {directory}`, then "
            f"give `{directory}` as the model."
        )
    raise CheckpointError(f"there is no file or directory {path}; give a .gguf file or a directory with config.json")


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
    pickled = sorted(file.name for pattern in _PICKLED_WEIGHTS for file in path.glob(pattern))
    if pickled and not any(path.glob("*.safetensors*")):
        raise CheckpointError(
            f"{path} has weights in PyTorch's pickle format only ({pickled[0]}), which can run code when it is "
            "loaded, and is not read. Convert them: load the model with transformers and call "
            "`save_pretrained(directory)`."
        )
    return path
