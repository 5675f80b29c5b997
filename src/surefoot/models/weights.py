"""How a checkpoint's tensors become a model's parameters: explicit rules, one per parameter.

A model names its parameters (`layers.3.qkv`); a rule says from which tensors of the file a parameter is made. A tensor
that no rule uses, or that a rule misses, is an error before anything is read. Which names a family has in which format
is in models.registry.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from surefoot.config.model_spec import ModelSpec


@dataclass(frozen=True)
class Source:
    """One tensor of the checkpoint."""

    name: str  # as `WeightRules.canonical` gives it
    shape: tuple[int, ...]
    interleaved_heads: int = 0  # > 0: rows of so many heads are stored for interleaved rotary pairs (GGUF's q and k)
    offset: float = 0.0  # added to what is stored


@dataclass(frozen=True)
class WeightRule:
    parameter: str
    sources: tuple[Source, ...]  # stacked along the first dimension


@dataclass(frozen=True)
class Naming:
    """The names of one family in one file format."""

    names: Mapping[str, str]  # of each tensor by our short name, `{i}` for the layer; biases are named like weights
    interleaved: bool = False  # q and k are stored for interleaved rotary pairs
    norm_offset: float = 0.0  # norm scales are stored less this
    ignored: tuple[str, ...] = ()  # patterns of whole names that a file may hold and that no parameter needs
    renamed: Mapping[str, str] = field(default_factory=dict)  # prefixes that some files have, and what they stand for


@dataclass(frozen=True)
class WeightRules:
    rules: tuple[WeightRule, ...]
    ignored: tuple[str, ...]  # patterns of whole names
    renamed: Mapping[str, str]
    copies: tuple[tuple[Source, Source], ...]  # a tensor that a file may hold, and the one that it must be equal to

    def canonical(self, name: str) -> str:
        """The name by which sources know the file's tensor `name`."""
        for prefix, meant in self.renamed.items():
            if name.startswith(prefix):
                return meant + name.removeprefix(prefix)
        return name


@dataclass(frozen=True)
class Blocks:
    """A matrix of quantised rows, as GGUF stores them."""

    format: Literal["q4_1", "q8_0"]
    rows: npt.NDArray[np.uint8]  # [out, bytes of a row]
    inputs: int


class WeightSource(Protocol):
    """Each parameter is taken once."""

    def take(self, parameter: str) -> Tensor:
        """The parameter in fp32, as its rule says."""

    def take_stored(self, parameter: str) -> Blocks | Tensor:
        """The same, but quantised if all its sources are, all in one format of `Blocks` or a special case of it."""


class WeightNamesError(ValueError):
    """The checkpoint's tensors are not those of the model: lists all that are missing, unused or misshapen."""


def check_names(rules: WeightRules, found: Mapping[str, tuple[int, ...]]) -> None:
    """Raises WeightNamesError unless the rules and `found` (canonical name to shape) agree."""
    wanted = {source.name: source.shape for rule in rules.rules for source in rule.sources}
    copies = {copy.name: copy.shape for copy, _ in rules.copies}
    unused = (name for name in found if name not in wanted and name not in copies)
    problems = [f"missing: {name} {list(shape)}" for name, shape in wanted.items() if name not in found]
    problems += [f"unused: {name} {list(found[name])}" for name in unused if not _matches(name, rules.ignored)]
    problems += [
        f"wrong shape: {name} is {list(found[name])}, the config says {list(shape)}"
        for name, shape in (wanted | copies).items()
        if name in found and found[name] != shape
    ]
    if problems:
        raise WeightNamesError(f"{len(problems)} tensors do not fit the model:\n  " + "\n  ".join(problems))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def decoder_rules(spec: ModelSpec, naming: Naming) -> WeightRules:
    """Rules of models.decoder.Decoder. Matrices that a file stores fused are those in `naming.names`."""
    vocab, hidden = spec.vocab_size, spec.hidden_size
    names = naming.names
    norm = naming.norm_offset
    embedding, lm_head = Source(names["embedding"], (vocab, hidden)), Source(names["lm_head"], (vocab, hidden))
    rules = [
        WeightRule("embedding", (embedding,)),
        WeightRule("norm", (Source(names["norm"], (hidden,), offset=norm),)),
    ]
    if not spec.tied_embeddings:
        rules.append(WeightRule("lm_head", (lm_head,)))
    for i in range(spec.num_layers):
        for short, size in _norms(spec).items():
            source = Source(names[short].format(i=i), (size,), offset=norm)
            rules.append(WeightRule(f"layers.{i}.{short}", (source,)))
        for parameter, bias, rows, columns in _matrices(spec, naming):
            sources = tuple(Source(names[short].format(i=i), (count, columns), heads) for short, count, heads in rows)
            rules.append(WeightRule(f"layers.{i}.{parameter}", sources))
            if bias:
                biases = tuple(
                    Source(source.name.removesuffix("weight") + "bias", source.shape[:1], source.interleaved_heads)
                    for source in sources
                )
                rules.append(WeightRule(f"layers.{i}.{parameter}_bias", biases))
    copies = ((lm_head, embedding),) if spec.tied_embeddings else ()
    return WeightRules(tuple(rules), naming.ignored, naming.renamed, copies)


def _norms(spec: ModelSpec) -> dict[str, int]:
    """A layer's norms with their sizes."""
    norms = {"attention_norm": spec.hidden_size, "mlp_norm": spec.hidden_size}
    if spec.post_norms:
        norms |= {"post_attention_norm": spec.hidden_size, "post_mlp_norm": spec.hidden_size}
    if spec.qk_norm:
        norms |= {"q_norm": spec.head_dim, "k_norm": spec.head_dim}
    return norms


_Rows = tuple[tuple[str, int, int], ...]  # (short name, rows, interleaved heads) of the tensors of one matrix


def _matrices(spec: ModelSpec, naming: Naming) -> list[tuple[str, bool, _Rows, int]]:
    """A layer's matrices: parameter, whether it has a bias, its tensors, columns."""
    size, q_heads, kv_heads = spec.intermediate_size, 0, 0
    if naming.interleaved:
        q_heads, kv_heads = spec.num_heads, spec.num_kv_heads
    qkv: _Rows = (("q", spec.q_size, q_heads), ("k", spec.kv_size, kv_heads), ("v", spec.kv_size, 0))
    if "qkv" in naming.names:
        qkv = (("qkv", spec.q_size + 2 * spec.kv_size, 0),)
    gate_up: _Rows = (("gate", size, 0), ("up", size, 0))
    if "gate_up" in naming.names:
        gate_up = (("gate_up", 2 * size, 0),)
    return [
        ("qkv", spec.qkv_bias, qkv, spec.hidden_size),
        ("attention_out", spec.attention_out_bias, (("attention_out", spec.hidden_size, 0),), spec.q_size),
        ("gate_up", spec.mlp_bias, gate_up, spec.hidden_size),
        ("down", spec.mlp_bias, (("down", spec.hidden_size, 0),), size),
    ]
