"""What a Hugging Face directory of safetensors files holds, read from the headers alone: no weights, no torch.

file: u64 length of the header | header: JSON, name -> {dtype, shape, data_offsets} | data
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from surefoot.checkpoint.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library

DTYPE_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}

_Natural = Annotated[int, Meta(ge=0)]


class _Entry(Struct, frozen=True):
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[_Natural, ...]
    data_offsets: tuple[_Natural, _Natural]  # first byte and the one after the last, within the data


class TensorInfo(Struct, frozen=True):
    shape: tuple[int, ...]
    dtype: str  # key of DTYPE_BYTES
    file: str  # path of the file that holds it


def shards(directory: Path | str) -> tuple[Path, ...]:
    """The weight files of a checkpoint, sorted. Raises CheckpointError naming those that are missing."""
    directory = Path(directory)
    if (directory / SINGLE_FILE).is_file():
        return (directory / SINGLE_FILE,)
    if not (directory / INDEX_FILE).is_file():
        raise CheckpointError(f"{directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
    names = indexed_files(directory)
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} of the {len(names)} files that {INDEX_FILE} names: {', '.join(missing)}"
        )
    return tuple(directory / name for name in names)


def indexed_files(directory: Path) -> list[str]:
    """The files that the index of a checkpoint in several files names, sorted."""
    return sorted(set(_weight_map(directory).values()))


def tensor_infos(directory: Path | str) -> dict[str, TensorInfo]:
    """Name -> shape, dtype and file of every tensor of a checkpoint. Raises CheckpointError if a file is damaged."""
    infos: dict[str, TensorInfo] = {}
    files = shards(directory)
    for path in files:
        for name, info in read_header(path).items():
            if name in infos:
                raise CheckpointError(f"tensor {name!r} is both in {infos[name].file} and in {path}")
            infos[name] = info
    if files[0].name != SINGLE_FILE:
        absent = sorted(set(_weight_map(Path(directory))) - set(infos))
        if absent:
            raise CheckpointError(
                f"{directory}: {INDEX_FILE} names tensors that no file holds, the first is {absent[0]!r}"
            )
    return infos


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path} is truncated or not a safetensors file: {size} bytes, of which {length} should be header"
            )
        header = _parse_json(path, file.read(length))
    header.pop("__metadata__", None)
    data_bytes = size - 8 - length
    infos = {name: _tensor_info(path, name, entry, data_bytes) for name, entry in header.items()}
    _check_tiling(path, [tuple(entry["data_offsets"]) for entry in header.values()], data_bytes)
    return infos


def _tensor_info(path: Path, name: str, raw_entry: Any, data_bytes: int) -> TensorInfo:
    """Checks one entry of a header against the size of the data behind it."""
    try:
        entry = msgspec.convert(raw_entry, _Entry)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: the entry of tensor {name!r} is malformed ({error}): {raw_entry!r}") from error
    dtype, shape, (begin, end) = entry.dtype, entry.shape, entry.data_offsets
    if dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {dtype!r}; known are {', '.join(DTYPE_BYTES)}")
    if end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise CheckpointError(f"{path}: tensor {name!r}, {dtype}{list(shape)}, cannot lie in bytes {begin} to {end}")
    if end > data_bytes:
        raise CheckpointError(
            f"{path} is truncated: tensor {name!r} ends at byte {end} of {data_bytes} bytes of data; download it again"
        )
    return TensorInfo(shape, dtype, str(path))


def _check_tiling(path: Path, offsets: list[tuple[int, int]], data_bytes: int) -> None:
    """The safetensors library opens only files whose tensors fill the data without gap or overlap."""
    position = 0
    for begin, end in sorted(offsets):
        if begin != position:
            raise CheckpointError(f"{path} is damaged: one tensor ends at byte {position}, the next begins at {begin}")
        position = end
    if position != data_bytes:
        raise CheckpointError(f"{path} is damaged: its tensors end at byte {position} of {data_bytes} bytes of data")


def _weight_map(directory: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index."""
    path = directory / INDEX_FILE
    weight_map = _parse_json(path, path.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map")
    for file in weight_map.values():
        # An index is foreign data: it may only name files beside it.
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{path} names {file!r}, which is not a file of that directory")
    return weight_map


def _parse_json(path: Path, text: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the JSON is damaged ({error}); download it again") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(parsed).__name__}")
    return parsed
