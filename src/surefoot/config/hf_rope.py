"""The rotary settings of a config.json.

transformers 5 writes `rope_parameters`, older versions `rope_theta` and `rope_scaling` (null if none). Where several
places state a value, the one that transformers would take counts.
"""

from __future__ import annotations

import math

from surefoot.checkpoint.errors import ModelSpecError
from surefoot.config.hf_config import HFConfig
from surefoot.config.model_parts import check_factors, magnitude
from surefoot.config.model_spec import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    NoRopeScaling,
    Rope,
    RopeScaling,
    YarnRopeScaling,
)

DEFAULT_THETA = 10_000.0
GEMMA3_THETA = 1_000_000.0
_OUTER = ("rope_theta", "partial_rotary_factor")
_PHI3_NAMES = {"su": "longrope", "yarn": "longrope"}  # what Phi-3's first files called it


def read_rope(config: HFConfig, head_dim: int, family: str) -> Rope:
    """One rope for all layers."""
    rope = config.section("rope_scaling" if "rope_scaling" in config else "rope_parameters", outer=_OUTER)
    if "original_max_position_embeddings" in config:
        # With the value beside the object, transformers takes that.
        original = config.value("original_max_position_embeddings", int)
    else:
        original = rope.value_or("original_max_position_embeddings", config.value("max_position_embeddings", int))
    size = head_dim
    if family == "phi3":
        share = rope.value_or("partial_rotary_factor", 1.0)
        if not 0 < share <= 1:
            raise ModelSpecError(f"{rope.where}: partial_rotary_factor = {share} should be above 0 and at most 1")
        size = int(head_dim * share)
    else:
        rope.refuse_unless("partial_rotary_factor", [1], default=1.0)
    return _rope(config, rope, original, size, _PHI3_NAMES if family == "phi3" else {})


def read_gemma3_ropes(config: HFConfig, head_dim: int) -> tuple[Rope, Rope]:
    """(of layers that see everything, of sliding ones). Older files state one scaling, which is of the former."""
    both = config.section("rope_parameters")
    if {"rope_type", "type", "rope_theta"} & both.raw.keys():
        raise ModelSpecError(f"{both.where} should hold 'full_attention' and 'sliding_attention', one object each")
    full = config.section("rope_scaling").with_defaults(both.section("full_attention").raw)
    full = full.with_defaults({"rope_theta": config.value_or("rope_theta", GEMMA3_THETA)})
    sliding = both.section("sliding_attention")
    sliding = sliding.with_defaults({"rope_theta": config.value_or("rope_local_base_freq", DEFAULT_THETA)})
    ropes = []
    for rope in (full, sliding):
        original = rope.value_or("original_max_position_embeddings", config.value("max_position_embeddings", int))
        rope.refuse_unless("partial_rotary_factor", [1], default=1.0)
        ropes.append(_rope(config, rope, original, head_dim, {}))
    return ropes[0], ropes[1]


def _rope(config: HFConfig, rope: HFConfig, original: int, size: int, renamed: dict[str, str]) -> Rope:
    kind = rope.value_or("rope_type", rope.value_or("type", "default"))
    scaling = _scaling(config, rope, renamed.get(kind, kind), original)
    check_factors(rope.where, scaling, size)
    return Rope(rope.value_or("rope_theta", DEFAULT_THETA), scaling, size)


def _scaling(config: HFConfig, rope: HFConfig, kind: str, original: int) -> RopeScaling:
    match kind:
        case "default":
            return NoRopeScaling()
        case "linear":
            return LinearRopeScaling(rope.value("factor", float))
        case "dynamic":
            return DynamicRopeScaling(rope.value("factor", float), config.value("max_position_embeddings", int))
        case "llama3":
            return Llama3RopeScaling(
                factor=rope.value("factor", float),
                low_freq_factor=rope.value("low_freq_factor", float),
                high_freq_factor=rope.value("high_freq_factor", float),
                original_max_context=original,
            )
        case "yarn":
            return _yarn(rope, rope.value_or("factor", _extension(config, original)), original)
        case "longrope":
            factor = rope.value_or("factor", _extension(config, original))
            return LongRopeScaling(
                short_factors=rope.values("short_factor", float),
                long_factors=rope.values("long_factor", float),
                original_max_context=original,
                attention_factor=rope.value_or("attention_factor", _longrope_magnitude(factor, original)),
            )
        case _:
            raise ModelSpecError(
                f"{rope.where}: rope_type = {kind!r} is not supported; supported are 'default', 'linear', 'dynamic', "
                f"'llama3', 'yarn' and 'longrope'"
            )


def _extension(config: HFConfig, original: int) -> float:
    if original < 1:
        raise ModelSpecError(f"{config.where}: original_max_position_embeddings = {original} should be positive")
    return config.value("max_position_embeddings", int) / original


def _yarn(rope: HFConfig, factor: float, original: int) -> YarnRopeScaling:
    mscale, mscale_all_dim = rope.value_or("mscale", 0.0), rope.value_or("mscale_all_dim", 0.0)
    attention_factor = magnitude(factor)
    if mscale and mscale_all_dim:
        attention_factor = magnitude(factor, mscale) / magnitude(factor, mscale_all_dim)
    return YarnRopeScaling(
        factor=factor,
        original_max_context=original,
        beta_fast=rope.value_or("beta_fast", 0.0) or 32.0,
        beta_slow=rope.value_or("beta_slow", 0.0) or 1.0,
        truncate=rope.value_or("truncate", True),
        attention_factor=rope.value_or("attention_factor", attention_factor),
    )


def _longrope_magnitude(factor: float, original: int) -> float:
    """LongRoPE's factor for rotated queries and keys (arXiv 2402.13753, section 3)."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
