"""`ModelSpec` from a checkpoint's own description: config.json (hf_readers) or GGUF metadata (gguf_readers)."""

from __future__ import annotations

from pathlib import Path

from surefoot.checkpoint.errors import ModelSpecError
from surefoot.checkpoint.gguf import GGUFFile
from surefoot.config.engine_plan import CheckpointRef
from surefoot.config.gguf_readers import read_gguf_spec
from surefoot.config.hf_readers import read_hf_spec
from surefoot.config.model_spec import (
    DynamicRopeScaling,
    FactorsRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ModelSpec,
    NoRopeScaling,
    Rope,
    RopeScaling,
    YarnRopeScaling,
)

# Far above what any model has, and small enough that no product of two of them is a surprise.
MAX_SIZE = 1 << 20
MAX_HEADS = 1 << 12
MAX_VOCABULARY = 1 << 24
MAX_CONTEXT = 1 << 30
MAX_NUMBER = 1e12  # of what frequencies are made of


def read_model_spec(ref: CheckpointRef) -> ModelSpec:
    """What the checkpoint is. Raises ModelSpecError, or CheckpointError if the file is damaged."""
    spec = read_gguf_spec(GGUFFile.open(ref.path)) if ref.format == "gguf" else read_hf_spec(Path(ref.path))
    for kind in spec.layer_kinds:
        _check_frequencies(ref.path, kind.rope)
    _check_sizes(ref.path, spec)
    return spec


def _check_sizes(where: str, spec: ModelSpec) -> None:
    """Refuses sizes that no model has, before anything is allocated by them."""
    sizes: dict[str, tuple[float, float]] = {
        "vocabulary": (spec.vocab_size, MAX_VOCABULARY),
        "hidden size": (spec.hidden_size, MAX_SIZE),
        "number of attention heads": (spec.num_heads, MAX_HEADS),
        "MLP size": (spec.intermediate_size, MAX_SIZE),
        "number of key-value heads": (spec.num_kv_heads, MAX_HEADS),
        "head size": (spec.head_dim, MAX_SIZE),
        "context": (spec.max_context, MAX_CONTEXT),
        "norm epsilon": (spec.norm_eps, 1),
        "attention scale": (spec.attention_scale, MAX_NUMBER),
    }
    for what, (size, largest) in sizes.items():
        if not 0 < size <= largest:
            raise ModelSpecError(f"{where}: the {what} is {size}, it should be positive and at most {largest}")
    for what, softcap in (("attention", spec.attention_softcap), ("logits", spec.logits_softcap)):
        if not 0 <= softcap <= MAX_NUMBER:
            raise ModelSpecError(f"{where}: the soft cap of {what} is {softcap}, it should be positive, or 0 for none")
    if spec.num_heads % spec.num_kv_heads:
        raise ModelSpecError(
            f"{where}: {spec.num_heads} attention heads cannot share {spec.num_kv_heads} key-value heads"
        )
    for kind in spec.layer_kinds:
        if kind.rope.size % 2 or not 0 < kind.rope.size <= spec.head_dim:
            raise ModelSpecError(
                f"{where}: {kind.rope.size} elements of a head of {spec.head_dim} would have rotary positions; "
                "it should be an even number, and no more than there are"
            )


def _check_frequencies(where: str, rope: Rope) -> None:
    if not 1 < rope.theta <= MAX_NUMBER:
        raise ModelSpecError(f"{where}: the rope theta is {rope.theta}, it should be above 1 and at most {MAX_NUMBER}")
    if not all(0 < number <= MAX_NUMBER for number in _scaling_numbers(rope.scaling)):
        raise ModelSpecError(
            f"{where}: the rope scaling has a number that is not positive, or not finite: {rope.scaling}"
        )


def _scaling_numbers(scaling: RopeScaling) -> tuple[float, ...]:
    """All that frequencies are divided by or multiplied with, or that a division's denominator comes from."""
    match scaling:
        case NoRopeScaling():
            return ()
        case LinearRopeScaling(factor):
            return (factor,)
        case FactorsRopeScaling(factors, attention_factor):
            return *factors, attention_factor
        case LongRopeScaling(short, long, original, attention_factor):
            return *short, *long, original, attention_factor
        case DynamicRopeScaling(factor, original):
            return factor, original
        case Llama3RopeScaling(factor, low, high, original):
            return factor, low, high - low, original
        case YarnRopeScaling(factor, original, fast, slow, _, attention_factor):
            return factor, original, fast, slow, attention_factor
