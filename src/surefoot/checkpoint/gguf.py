"""Reader for GGUF files, version 2 and 3, little-endian: header, metadata and tensor directory.

`GGUFFile.open(path)` parses everything but the weights, which stay in the file: `raw(name)` is a view of its mapping.

    file:   header | metadata: count x (key, type, value) | directory: count x (name, dims, type, offset) | data
    string: u64 length, UTF-8 bytes          array: u32 element type, u64 count, elements

A damaged file gives a `CheckpointError` with the offset. No count of the file is believed: it is first compared
with the bytes that are left, so that a few flipped bits cannot ask for gigabytes.
"""

from __future__ import annotations

import math
import mmap
import struct
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from surefoot.checkpoint.errors import CheckpointError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

MetadataValue = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]
T = TypeVar("T", int, float, bool, str)


class GGMLType(IntEnum):
    """Number formats of tensors that surefoot computes with."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30

    @property
    def block_elements(self) -> int:
        """Consecutive elements of a row that share their scales."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        return _BLOCKS[self][1]


_BLOCKS = {  # (elements, bytes)
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.BF16: (1, 2),
    GGMLType.Q4_0: (32, 2 + 16),
    GGMLType.Q4_1: (32, 2 + 2 + 16),
    GGMLType.Q5_0: (32, 2 + 4 + 16),
    GGMLType.Q5_1: (32, 2 + 2 + 4 + 16),
    GGMLType.Q8_0: (32, 2 + 32),
    GGMLType.Q2_K: (256, 16 + 64 + 2 + 2),
    GGMLType.Q3_K: (256, 32 + 64 + 12 + 2),
    GGMLType.Q4_K: (256, 2 + 2 + 12 + 128),
    GGMLType.Q5_K: (256, 2 + 2 + 12 + 32 + 128),
    GGMLType.Q6_K: (256, 128 + 64 + 16 + 2),
}

# Only for messages: a user knows "IQ4_NL", not "type 20".
_OTHER_TYPE_NAMES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}


class GGUFTensor(Struct, frozen=True):
    name: str
    shape: tuple[int, ...]  # slowest dimension first: (out, in) for a matrix
    type: GGMLType
    offset: int  # bytes from the start of the file
    nbytes: int


class GGUFFile:
    """An open GGUF file. The mapping lives as long as this object or any view that `raw` gave."""

    def __init__(
        self, path: Path, metadata: dict[str, MetadataValue], tensors: dict[str, GGUFTensor], data: mmap.mmap
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._data = data

    @classmethod
    def open(cls, path: Path | str) -> GGUFFile:
        """Parses header, metadata and tensor directory. Raises CheckpointError if any of it is unusable."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                magic = file.read(len(MAGIC))
                if magic != MAGIC:
                    raise CheckpointError(f"{path} is not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        metadata, tensors = _Parser(path, data).parse()
        return cls(path, metadata, tensors, data)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, a read-only view of the file. Raises CheckpointError for an unknown name."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        tensor = self.tensors[name]
        return np.frombuffer(self._data, np.uint8, tensor.nbytes, tensor.offset)

    def value(self, key: str, kind: type[T]) -> T:
        """A metadata value that must be there. Raises CheckpointError if it is missing or of another type."""
        if key not in self.metadata:
            raise CheckpointError(f"{self.path} lacks the metadata key {key!r}")
        value = self.metadata[key]
        # bool is an int to Python, and not to GGUF
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{self.path}: {key} should be one {kind.__name__}, it is {_shortened(value)}")
        return value

    def value_or(self, key: str, default: T) -> T:
        """A metadata value of the default's type, or the default if the key is missing."""
        return self.value(key, type(default)) if key in self.metadata else default

    def array(self, key: str, kind: type[T]) -> list[T]:
        """A metadata array that must be there. Raises CheckpointError if it is missing or of another type."""
        if key not in self.metadata:
            raise CheckpointError(f"{self.path} lacks the metadata key {key!r}")
        values = self.metadata[key]
        # The elements of a GGUF array share one type, so the first one tells.
        if not isinstance(values, list) or (values and type(values[0]) is not kind):
            raise CheckpointError(
                f"{self.path}: {key} should be an array of {kind.__name__}, it is {_shortened(values)}"
            )
        return values  # type: ignore[return-value]


class _ValueType(IntEnum):
    UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)


_SCALARS = {
    _ValueType.UINT8: "<u1",
    _ValueType.INT8: "<i1",
    _ValueType.UINT16: "<u2",
    _ValueType.INT16: "<i2",
    _ValueType.UINT32: "<u4",
    _ValueType.INT32: "<i4",
    _ValueType.FLOAT32: "<f4",
    _ValueType.BOOL: "?",
    _ValueType.UINT64: "<u8",
    _ValueType.INT64: "<i8",
    _ValueType.FLOAT64: "<f8",
}


class _Parser:
    """Reads a mapping front to back; `self._position` is where the next item starts."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._position = len(MAGIC)

    def parse(self) -> tuple[dict[str, MetadataValue], dict[str, GGUFTensor]]:
        self._check_version(self._number("<I"))
        num_tensors, num_values = self._number("<Q"), self._number("<Q")
        metadata: dict[str, MetadataValue] = {}
        for _ in range(num_values):
            start = self._position
            (key,) = self._strings(1)
            if key in metadata:
                raise self._error(f"a second metadata key {key!r}", start)
            metadata[key] = self._value()
        if metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{self._path} is one of {metadata['split.count']} parts of a split model, which is not supported: "
                "join them with `llama-gguf-split --merge`"
            )
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self._path}: general.alignment is {_shortened(alignment)}, not a positive integer")
        return metadata, self._directory(num_tensors, alignment)

    def _check_version(self, version: int) -> None:
        if version in SUPPORTED_VERSIONS:
            return
        if int.from_bytes(version.to_bytes(4, "little"), "big") in SUPPORTED_VERSIONS:
            raise CheckpointError(f"{self._path} is a big-endian GGUF file; only little-endian ones are supported")
        raise CheckpointError(f"{self._path} is GGUF version {version}; supported are {SUPPORTED_VERSIONS}")

    def _value(self) -> MetadataValue:
        start = self._position
        kind = self._value_type()
        if kind is _ValueType.STRING:
            return self._strings(1)[0]
        if kind is not _ValueType.ARRAY:
            return self._scalars(kind, 1)[0]
        element, count = self._value_type(), self._number("<Q")
        if element is _ValueType.ARRAY:
            raise self._error("an array of arrays, which is not supported", start)
        return self._strings(count) if element is _ValueType.STRING else self._scalars(element, count)

    def _value_type(self) -> _ValueType:
        start, code = self._position, self._number("<I")
        if code >= len(_ValueType):
            raise self._error(f"an unknown metadata type {code}", start)
        return _ValueType(code)

    def _number(self, layout: str) -> int:
        start = self._position
        self._position += struct.calcsize(layout)
        self._check_end(start)
        number: int
        (number,) = struct.unpack_from(layout, self._data, start)
        return number

    def _scalars(self, kind: _ValueType, count: int) -> list[int] | list[float] | list[bool]:
        start, dtype = self._position, np.dtype(_SCALARS[kind])
        self._position += dtype.itemsize * count
        self._check_end(start)
        values: list[int] | list[float] | list[bool] = np.frombuffer(self._data, dtype, count, start).tolist()
        return values

    def _strings(self, count: int) -> list[str]:
        """The hot loop: a vocabulary and its merges are 100,000 strings."""
        data, end, position = self._data, len(self._data), self._position
        read_length = struct.Struct("<Q").unpack_from
        strings = []
        try:
            for _ in range(count):
                (length,) = read_length(data, position)
                start, position = position + 8, position + 8 + length
                if position > end:
                    raise self._error(f"a string of {length} bytes reaches past the end of the file", start - 8)
                strings.append(data[start:position].decode())
        except struct.error:
            raise self._error(f"the file ends inside {count} strings", position) from None
        except UnicodeDecodeError:
            raise self._error("a string is not UTF-8", start) from None
        self._position = position
        return strings

    def _directory(self, count: int, alignment: int) -> dict[str, GGUFTensor]:
        entries = []
        for _ in range(count):
            (name,) = self._strings(1)
            entries.append((name, *self._tensor_layout(name), self._number("<Q")))
        # Offsets of the directory count from the first aligned byte after it.
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_, offset in entries:
            nbytes = math.prod(shape) // type_.block_elements * type_.block_bytes
            if name in tensors:
                raise CheckpointError(f"{self._path} has two tensors {name!r}")
            if data_start + offset + nbytes > len(self._data):
                raise CheckpointError(
                    f"{self._path} is truncated: tensor {name!r} needs bytes {data_start + offset} to "
                    f"{data_start + offset + nbytes}, the file has {len(self._data)}; download it again"
                )
            tensors[name] = GGUFTensor(name, shape, type_, data_start + offset, nbytes)
        return tensors

    def _tensor_layout(self, name: str) -> tuple[tuple[int, ...], GGMLType]:
        """(shape, type) of a directory entry."""
        start, num_dimensions = self._position, self._number("<I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(f"tensor {name!r} has {num_dimensions} dimensions, the limit is {MAX_DIMENSIONS}", start)
        # GGUF lists the fastest dimension first.
        shape = tuple(int(n) for n in reversed(self._scalars(_ValueType.UINT64, num_dimensions)))
        start, code = self._position, self._number("<I")
        if code not in _BLOCKS:
            found = _OTHER_TYPE_NAMES.get(code, f"number {code}")
            supported = ", ".join(type_.name for type_ in GGMLType)
            raise self._error(f"tensor {name!r} has type {found}; supported are {supported}", start)
        type_ = GGMLType(code)
        if 0 in shape or shape[-1] % type_.block_elements:
            raise self._error(f"tensor {name!r} of type {type_.name} cannot have the shape {shape}", start)
        return shape, type_

    def _check_end(self, start: int) -> None:
        if self._position > len(self._data):
            missing = self._position - len(self._data)
            raise self._error(f"the file ends {missing} bytes too early; download it again", start)

    def _error(self, what: str, offset: int) -> CheckpointError:
        return CheckpointError(f"{self._path}, byte {offset}: {what}")


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
