"""Reads a checkpoint's tensors, one parameter at a time, as the model asks for them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from surefoot.checkpoint.gguf import GGMLType, GGUFFile
from surefoot.checkpoint.safetensors import tensor_infos
from surefoot.config.engine_plan import EnginePlan
from surefoot.models.registry import weight_rules
from surefoot.models.weights import Blocks, Source, WeightNamesError, WeightRules, check_names
from surefoot.quant.gguf import dequantize, q4_1_of_q4_0

FLOAT_DTYPES = {"F64", "F32", "F16", "BF16"}
DUMMY_STD = 0.02  # of random weights: Llama's initialiser range


class TensorFile(Protocol):
    """A checkpoint's tensors by name."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def read(self, name: str) -> Tensor:
        """The tensor in fp32, to be kept or changed."""

    def blocks(self, name: str) -> Blocks | None:
        """A matrix as it is stored, if it is quantised in one of the formats of `Blocks`."""


class GGUFTensors:
    def __init__(self, path: Path) -> None:
        self._file = GGUFFile.open(path)
        self.shapes = {name: tensor.shape for name, tensor in self._file.tensors.items()}

    def read(self, name: str) -> Tensor:
        tensor = self._file.tensors[name]
        return dequantize(self._file.raw(name), tensor.type, tensor.shape)

    def blocks(self, name: str) -> Blocks | None:
        tensor = self._file.tensors[name]
        rows = self._file.raw(name).reshape(tensor.shape[0], -1)
        match tensor.type:
            case GGMLType.Q4_0:
                return Blocks("q4_1", q4_1_of_q4_0(rows), tensor.shape[1])
            case GGMLType.Q4_1:
                return Blocks("q4_1", rows, tensor.shape[1])
            case GGMLType.Q8_0:
                return Blocks("q8_0", rows, tensor.shape[1])
            case _:
                return None


class SafetensorsTensors:
    """Shards are mapped, and a tensor is read when it is asked for."""

    def __init__(self, directory: Path) -> None:
        infos = tensor_infos(directory)
        if wrong := [f"{name} ({info.dtype})" for name, info in infos.items() if info.dtype not in FLOAT_DTYPES]:
            raise ValueError(f"{directory}: tensors that are not plain floating-point numbers: {', '.join(wrong)}")
        self.shapes = {name: info.shape for name, info in infos.items()}
        self._files = {name: info.file for name, info in infos.items()}
        self._open = {file: safe_open(file, framework="pt") for file in sorted(set(self._files.values()))}

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._open[self._files[name]].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor.float()

    def blocks(self, name: str) -> None:
        return None


class DummyTensors:
    """Random matrices that are a function of (seed, name) alone; norms that scale by one and biases of zero."""

    def __init__(self, rules: WeightRules, seed: int) -> None:
        self._sources = {source.name: source for rule in rules.rules for source in rule.sources}
        self.shapes = {name: source.shape for name, source in self._sources.items()}
        self._seed = seed

    def read(self, name: str) -> Tensor:
        source = self._sources[name]
        if name.endswith("bias"):
            return torch.zeros(source.shape)
        if len(source.shape) == 1:
            return torch.full(source.shape, 1.0 - source.offset)
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        return torch.randn(source.shape, generator=generator) * DUMMY_STD

    def blocks(self, name: str) -> None:
        return None


class CheckpointWeights:
    """The `WeightSource` of a model. `progress` is called with (parameters taken, parameters in all)."""

    def __init__(self, file: TensorFile, rules: WeightRules, progress: Callable[[int, int], None]) -> None:
        self._names = {rules.canonical(name): name for name in file.shapes}
        if len(self._names) < len(file.shapes):
            doubles = sorted(set(file.shapes) - set(self._names.values()))
            raise WeightNamesError(f"tensors that the file has under another name too: {', '.join(doubles)}")
        check_names(rules, {name: file.shapes[own] for name, own in self._names.items()})
        self._file = file
        self._rules = {rule.parameter: rule for rule in rules.rules}
        self._count = len(self._rules)
        self._progress = progress
        self._check_copies(rules)

    def take(self, parameter: str) -> Tensor:
        rule = self._rules.pop(parameter)
        parts = [self._read(source) for source in rule.sources]
        self._progress(self._count - len(self._rules), self._count)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def take_stored(self, parameter: str) -> Blocks | Tensor:
        parts: list[Blocks] = []
        for source in self._rules[parameter].sources:
            stored = self._file.blocks(self._names[source.name])
            if stored is None or (parts and stored.format != parts[0].format):
                return self.take(parameter)
            rows = _half_split(torch.tensor(stored.rows), source.interleaved_heads).numpy()
            parts.append(replace(stored, rows=rows))
        del self._rules[parameter]
        self._progress(self._count - len(self._rules), self._count)
        return replace(parts[0], rows=np.concatenate([part.rows for part in parts]))

    def _read(self, source: Source) -> Tensor:
        stored = self._file.read(self._names[source.name])
        if source.offset:
            stored = stored + source.offset
        return _half_split(stored, source.interleaved_heads)

    def _check_copies(self, rules: WeightRules) -> None:
        for copy, original in rules.copies:
            if copy.name in self._names and not torch.equal(self._read(copy), self._read(original)):
                raise WeightNamesError(
                    f"{self._names[copy.name]} differs from {self._names[original.name]}, and config.json ties them: "
                    f"set tie_word_embeddings to false there"
                )


def _half_split(weight: Tensor, heads: int) -> Tensor:
    """From rows (2i, 2i + 1) as rotary pairs to rows (i, i + head_dim / 2). heads = 0: nothing to do."""
    if not heads:
        return weight
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def open_weights(plan: EnginePlan, progress: Callable[[int, int], None]) -> CheckpointWeights:
    """WeightNamesError names the checkpoint and lists all tensors that are missing, unused or misshapen."""
    rules = weight_rules(plan.model, plan.checkpoint.format)
    path = Path(plan.checkpoint.path)
    file: TensorFile
    if plan.load_format == "dummy":
        file = DummyTensors(rules, plan.seed)
    elif plan.checkpoint.format == "gguf":
        file = GGUFTensors(path)
    else:
        file = SafetensorsTensors(path)
    try:
        return CheckpointWeights(file, rules, progress)
    except WeightNamesError as error:
        raise WeightNamesError(f"{path}: {error}") from error
