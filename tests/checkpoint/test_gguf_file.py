"""GGUF files written by the `gguf` package are read back; damaged ones are refused without harm."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from surefoot.checkpoint.errors import CheckpointError
from surefoot.checkpoint.gguf import GGMLType, GGUFFile

RANDOM = np.random.default_rng(0)
MATRIX = RANDOM.standard_normal((3, 64), np.float32)


def write(path: Path, fill: Callable[[gguf.GGUFWriter], None]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def fill_everything(writer: gguf.GGUFWriter) -> None:
    for bits, number in ((8, 200), (16, 60_000), (32, 4_000_000_000), (64, 2**63)):
        getattr(writer, f"add_uint{bits}")(f"u{bits}", number)
        getattr(writer, f"add_int{bits}")(f"i{bits}", -(number // 3))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 文字 🦙\n")
    writer.add_array("strings", ["a", "", "Ġword", "▁x"])
    writer.add_array("integers", [3, -1, 7])
    writer.add_array("floats", [0.5, -2.25])
    writer.add_array("bools", [True, False])
    writer.add_tensor("f32", MATRIX)
    writer.add_tensor("f16", MATRIX.astype(np.float16))
    writer.add_tensor("norm", MATRIX[0, :5].copy())
    writer.add_tensor("experts", MATRIX.reshape(3, 4, 16))
    for type_ in (Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0):
        writer.add_tensor(type_.name, gguf.quants.quantize(MATRIX, type_), raw_dtype=type_)
    for type_ in (Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K):
        writer.add_tensor(type_.name, np.full((3, 2 * gguf.GGML_QUANT_SIZES[type_][1]), 7, np.uint8), raw_dtype=type_)


@pytest.fixture
def everything(tmp_path: Path) -> Path:
    return write(tmp_path / "all.gguf", fill_everything)


def test_metadata_is_what_was_written(everything: Path) -> None:
    file = GGUFFile.open(everything)
    assert file.metadata == {
        "general.architecture": "llama",
        "u8": 200,
        "u16": 60_000,
        "u32": 4_000_000_000,
        "u64": 2**63,
        "i8": -66,
        "i16": -20_000,
        "i32": -1_333_333_333,
        "i64": -(2**63 // 3),
        "f32": float(np.float32(0.1)),
        "f64": 0.1,
        "yes": True,
        "text": "naïve 文字 🦙\n",
        "strings": ["a", "", "Ġword", "▁x"],
        "integers": [3, -1, 7],
        "floats": [0.5, -2.25],
        "bools": [True, False],
    }
    assert file.metadata["yes"] is True


def test_tensors_are_what_was_written(everything: Path) -> None:
    file = GGUFFile.open(everything)
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(everything).tensors}
    assert list(file.tensors) == list(reference)
    for name, tensor in file.tensors.items():
        assert tensor.shape == tuple(reversed(reference[name].shape.tolist()))
        assert int(tensor.type) == int(reference[name].tensor_type)
        assert (tensor.offset, tensor.nbytes) == (reference[name].data_offset, reference[name].n_bytes)
        assert file.raw(name).tobytes() == reference[name].data.tobytes()
    assert file.tensors["experts"].shape == (3, 4, 16)
    assert np.array_equal(file.raw("f32").view(np.float32).reshape(3, 64), MATRIX)


def test_views_outlive_the_file_object(everything: Path) -> None:
    view = GGUFFile.open(everything).raw("f32")
    assert np.array_equal(view.view(np.float32), MATRIX.ravel())
    assert not view.flags.writeable


def test_block_sizes_match_the_gguf_package() -> None:
    sizes = {type_: gguf.GGML_QUANT_SIZES[Type(int(type_))] for type_ in GGMLType}
    assert sizes == {type_: (type_.block_elements, type_.block_bytes) for type_ in GGMLType}


def test_version_2_and_another_alignment(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_custom_alignment(256)
        writer.add_tensor("a", MATRIX[0, :3].copy())
        writer.add_tensor("b", MATRIX)

    path = write(tmp_path / "aligned.gguf", fill)
    path.write_bytes(b"GGUF" + struct.pack("<I", 2) + path.read_bytes()[8:])
    file = GGUFFile.open(path)
    assert file.tensors["b"].offset % 256 == 0
    assert file.raw("b").tobytes() == MATRIX.tobytes()


def test_typed_look_ups(everything: Path) -> None:
    file = GGUFFile.open(everything)
    assert file.value("u32", int) == 4_000_000_000
    assert file.value_or("text", "") == "naïve 文字 🦙\n"
    assert file.value_or("absent", 7) == 7
    assert file.array("integers", int) == [3, -1, 7]
    with pytest.raises(CheckpointError, match="lacks the metadata key 'absent'"):
        file.value("absent", int)
    with pytest.raises(CheckpointError, match="yes should be one int, it is True"):
        file.value("yes", int)
    with pytest.raises(CheckpointError, match=r"integers should be one int, it is \[3, -1, 7\]"):
        file.value("integers", int)
    with pytest.raises(CheckpointError, match="integers should be an array of str"):
        file.array("integers", str)
    with pytest.raises(CheckpointError, match="no tensor 'absent'"):
        file.raw("absent")


def header(version: int = 3, tensors: int = 0, values: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


def key(name: str, type_: int) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", type_)


HUGE = struct.pack("<Q", 1 << 60)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is not a GGUF file"),
        (b"PK\x03\x04 a zip file", "is not a GGUF file"),
        (header()[:14], "byte 8: the file ends"),
        (header(version=1), "is GGUF version 1; supported are"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(values=1) + HUGE, "byte 24: a string of"),
        (header(values=1) + key("k", 8) + HUGE, "byte 37: a string of"),
        (header(values=1) + key("k", 9) + struct.pack("<I", 8) + HUGE, "the file ends inside"),
        (header(values=1) + key("k", 9) + struct.pack("<I", 4) + HUGE, "the file ends"),
        (header(values=1) + key("k", 9) + struct.pack("<I", 9) + HUGE, "array of arrays"),
        (header(values=1) + key("k", 99), "byte 33: an unknown metadata type 99"),
        (header(values=2) + 2 * (key("k", 0) + b"\x01"), "byte 38: a second metadata key 'k'"),
        (header(values=1) + key("k", 8) + struct.pack("<Q", 1) + b"\xff", "byte 45: a string is not UTF-8"),
        (header(values=1) + key("general.alignment", 4) + struct.pack("<I", 0), "general.alignment is 0"),
        (header(values=1) + key("split.count", 2) + struct.pack("<H", 3), "one of 3 parts.*--merge"),
        (header(tensors=1) + key("t", 9) + HUGE, "tensor 't' has 9 dimensions"),
        (
            header(tensors=1) + key("t", 1) + struct.pack("<QIQ", 256, 20, 0),
            "type IQ4_NL; supported are F32, F16, Q4_0",
        ),
        (header(tensors=1) + key("t", 1) + struct.pack("<QIQ", 33, 8, 0), r"type Q8_0 cannot have the shape \(33,\)"),
        (header(tensors=1) + key("t", 1) + HUGE + struct.pack("<IQ", 0, 0), "is truncated: tensor 't'"),
        (header(tensors=1) + key("t", 1) + struct.pack("<QI", 1, 0) + HUGE, "is truncated: tensor 't'"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        GGUFFile.open(path)
    assert str(path) in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.gguf cannot be read: No such file"):
        GGUFFile.open(tmp_path / "absent.gguf")


def test_every_truncation_is_refused(everything: Path) -> None:
    content = everything.read_bytes()
    last = max(tensor.offset + tensor.nbytes for tensor in GGUFFile.open(everything).tensors.values())
    for length in range(0, last, 23):
        everything.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            GGUFFile.open(everything)


def test_flipped_bytes_cost_no_memory(everything: Path) -> None:
    """Whatever a damaged header says, it is refused or read, within a few times its own size."""
    content = everything.read_bytes()
    header_bytes = min(tensor.offset for tensor in GGUFFile.open(everything).tensors.values())
    flip = random.Random(0)
    tracemalloc.start()
    refused = 0
    for _ in range(500):
        damaged = bytearray(content)
        for _ in range(3):
            damaged[flip.randrange(header_bytes)] = flip.choice((0, 1, 8, 9, 127, 255))
        everything.write_bytes(damaged)
        try:
            GGUFFile.open(everything)
        except CheckpointError:
            refused += 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused > 100
    assert peak < 5_000_000


def test_the_default_model_opens(default_model_path: Path) -> None:
    file = GGUFFile.open(default_model_path)
    assert len(file.tensors) == 272
    assert len(file.array("tokenizer.ggml.merges", str)) == 48_900
    assert file.tensors["blk.0.ffn_down.weight"].shape == (576, 1536)
