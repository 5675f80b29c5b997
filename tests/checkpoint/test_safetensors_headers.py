"""Shards are found and their headers read without the weights; what is missing or damaged is named."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from surefoot.checkpoint.errors import CheckpointError
from surefoot.checkpoint.safetensors import TensorInfo, read_header, shards, tensor_infos

TENSORS = {
    "embed": torch.zeros(7, 4, dtype=torch.bfloat16),
    "norm": torch.zeros(4, dtype=torch.float32),
    "scale": torch.zeros((), dtype=torch.float16),
    "fp8": torch.zeros(2, 3, 5).to(torch.float8_e4m3fn),
}
SHAPES = {"embed": ("BF16", (7, 4)), "norm": ("F32", (4,)), "scale": ("F16", ()), "fp8": ("F8_E4M3", (2, 3, 5))}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    files = {"embed": "a.safetensors", "norm": "a.safetensors", "scale": "b.safetensors", "fp8": "c.safetensors"}
    for file in set(files.values()):
        save_file({name: TENSORS[name] for name in files if files[name] == file}, tmp_path / file, {"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return tmp_path


def test_one_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    assert shards(tmp_path) == (path,)
    assert tensor_infos(tmp_path) == {name: TensorInfo(SHAPES[name][1], SHAPES[name][0], str(path)) for name in TENSORS}


def test_several_files(sharded: Path) -> None:
    assert [path.name for path in shards(sharded)] == ["a.safetensors", "b.safetensors", "c.safetensors"]
    infos = tensor_infos(sharded)
    assert {name: (info.dtype, info.shape) for name, info in infos.items()} == SHAPES
    assert infos["fp8"].file == str(sharded / "c.safetensors")


def test_missing_files_are_all_named(sharded: Path) -> None:
    (sharded / "a.safetensors").unlink()
    (sharded / "c.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 2 of the 3 files .* a\.safetensors, c\.safetensors"):
        shards(sharded)


def test_a_tensor_that_no_file_holds_is_named(sharded: Path) -> None:
    save_file({"other": torch.zeros(1)}, sharded / "b.safetensors")
    with pytest.raises(CheckpointError, match="names tensors that no file holds, the first is 'scale'"):
        tensor_infos(sharded)


def test_a_tensor_in_two_files_is_named(sharded: Path) -> None:
    save_file({"scale": TENSORS["scale"], "norm": TENSORS["norm"]}, sharded / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"'norm' is both in .*a\.safetensors and in .*b\.safetensors"):
        tensor_infos(sharded)


def test_an_index_cannot_point_outside_its_directory(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../secret.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"names '\.\./secret\.safetensors'"):
        shards(sharded)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no weights: neither model\.safetensors nor"):
        shards(tmp_path)


def entry(**changes: object) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}).encode()
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "truncated or not a safetensors file"),
        (struct.pack("<Q", 1 << 40) + b"{}", "truncated or not a safetensors file"),
        (struct.pack("<Q", 2) + b"{]", "the JSON is damaged"),
        (struct.pack("<Q", 2) + b"[]", "expected a JSON object"),
        (entry(), "is truncated: tensor 'w' ends at byte 8 of 0 bytes"),
        (entry(dtype="F4_XX") + bytes(8), "tensor 'w' has dtype 'F4_XX'; known are F64"),
        (entry(shape=[3]) + bytes(8), r"tensor 'w', F32\[3\], cannot lie in bytes 0 to 8"),
        (entry(shape=[-2]) + bytes(8), "entry of tensor 'w' is malformed"),
        (entry(shape=[2.0]) + bytes(8), "entry of tensor 'w' is malformed"),
        (entry(dtype=["F32"]) + bytes(8), "entry of tensor 'w' is malformed"),
        (entry(data_offsets=[-8, 0]) + bytes(8), "entry of tensor 'w' is malformed"),
        (entry(data_offsets=["0", "8"]) + bytes(8), "entry of tensor 'w' is malformed"),
        (entry(data_offsets=[0]) + bytes(8), "entry of tensor 'w' is malformed"),
        (entry(data_offsets=[4, 12]) + bytes(12), "one tensor ends at byte 0, the next begins at 4"),
        (entry() + bytes(9), "its tensors end at byte 8 of 9 bytes of data"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "the JSON is damaged"),
        (entry(shape="two") + bytes(8), "entry of tensor 'w' is malformed"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_what_this_reader_accepts_the_library_opens(tmp_path: Path) -> None:
    """Headers with a few wrong bytes: read here, or refused here, and never refused later by the library."""
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    whole, random = path.read_bytes(), Random(7)
    accepted = 0
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(random.randint(1, 2)):
            damaged[random.randrange(8, 8 + int.from_bytes(whole[:8], "little"))] = random.choice(b'0123456789{}[],":F')
        path.write_bytes(damaged)
        try:
            infos = read_header(path)
        except CheckpointError:
            continue
        accepted += 1
        with safe_open(path, framework="pt") as opened:
            assert set(opened.keys()) == infos.keys()
    assert accepted
