"""Which architecture and which weight rules a family has."""

from __future__ import annotations

from surefoot.checkpoint.locate import CheckpointFormat
from surefoot.config.model_spec import ModelSpec
from surefoot.models.weights import LLAMA_GGUF, LLAMA_SAFETENSORS, WeightRules, llama_rules


def weight_rules(spec: ModelSpec, format: CheckpointFormat) -> WeightRules:
    """ValueError for a family that has none."""
    if spec.family != "llama":
        raise ValueError(f"no weight rules for the family {spec.family!r}")
    gguf = format == "gguf"
    return llama_rules(spec, LLAMA_GGUF if gguf else LLAMA_SAFETENSORS, interleaved=gguf)
