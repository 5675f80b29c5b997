"""What the readers of both formats make specs from, with the checks that need a file's own words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from surefoot.checkpoint.errors import ModelSpecError
from surefoot.config.model_spec import LayerKind, LongRopeScaling, Rope, RopeScaling, YarnRopeScaling

MAX_LAYERS = 4096

# Fields of a ModelSpec that most families leave alone.
PLAIN: dict[str, Any] = {
    "activation": "silu",
    "qkv_bias": False,
    "attention_out_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
    "post_norms": False,
    "embedding_scale": 1.0,
    "attention_softcap": 0.0,
    "logits_softcap": 0.0,
}


def head_size(where: str, hidden_size: int, num_heads: int, stated: int) -> int:
    """The width of a head: what the checkpoint states, or (if that is 0) an equal share of the hidden size."""
    if stated:
        return stated
    if num_heads < 1 or hidden_size % num_heads:
        raise ModelSpecError(f"{where}: hidden size {hidden_size} is not a multiple of its {num_heads} attention heads")
    return hidden_size // num_heads


def attention_scale(size: int) -> float:
    """1 / sqrt(size). 0 for a size that is refused later."""
    return size**-0.5 if size > 0 else 0.0


def checked_layers(where: str, num_layers: int) -> int:
    """Before anything is made of so many."""
    if not 0 < num_layers <= MAX_LAYERS:
        raise ModelSpecError(f"{where}: the number of layers is {num_layers}, it should be 1 to {MAX_LAYERS}")
    return num_layers


def windows(where: str, key: str, window: int, slides: Sequence[bool]) -> list[int]:
    """Each layer's window. slides: which layers have one. window: from `key`, 0 if the file has none."""
    if any(slides) and window <= 0:
        raise ModelSpecError(f"{where}: {key} = {window} should be positive, since there are layers that need it")
    return [window if layer_slides else 0 for layer_slides in slides]


def pattern(where: str, key: str, period: int, num_layers: int) -> list[bool]:
    """Which layers slide, if every `period`-th one attends to everything."""
    if period < 1:
        raise ModelSpecError(f"{where}: {key} = {period} should be positive")
    return [(i + 1) % period != 0 for i in range(num_layers)]


def layer_kinds(
    layer_windows: Sequence[int], full: Rope, sliding: Rope, max_context: int
) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """`ModelSpec.layer_kinds` (the wider window first) and `ModelSpec.layers`. A window that holds the whole context
    is none."""
    of_layer = [
        LayerKind(window if window < max_context else 0, sliding if window else full) for window in layer_windows
    ]
    kinds = sorted(dict.fromkeys(of_layer), key=lambda kind: -(kind.window or max_context))
    return tuple(kinds), tuple(map(kinds.index, of_layer))


def magnitude(factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor for rotated queries and keys (arXiv 2309.00071, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def reach(scaling: RopeScaling, max_context: int) -> int:
    """The context that a scaling was made for, if it is more than what the checkpoint states."""
    reached = scaling.factor * scaling.original_max_context if isinstance(scaling, YarnRopeScaling) else 0.0
    return int(min(reached, 2.0**62)) if reached > max_context else max_context


def check_factors(where: str, scaling: RopeScaling, rope_size: int) -> None:
    """LongRoPE's lists have one number for each frequency."""
    if isinstance(scaling, LongRopeScaling):
        for what, factors in (("short", scaling.short_factors), ("long", scaling.long_factors)):
            if len(factors) != rope_size // 2:
                raise ModelSpecError(
                    f"{where}: {len(factors)} {what} rope factors for {rope_size // 2} rotary frequencies"
                )
