"""The spec that the tests of all readers start from."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from surefoot.config.model_spec import LayerKind, ModelSpec, NoRopeScaling, Rope

ROPE = Rope(theta=500_000.0, scaling=NoRopeScaling(), size=8)
SPEC = ModelSpec(
    family="llama",
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    layer_kinds=(LayerKind(0, ROPE),),
    layers=(0, 0, 0),
    norm_eps=0.5**17,  # exact in float32, as GGUF stores it
    max_context=2048,
    tied_embeddings=False,
    activation="silu",
    qkv_bias=False,
    attention_out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    post_norms=False,
    embedding_scale=1.0,
    attention_scale=8**-0.5,
    attention_softcap=0.0,
    logits_softcap=0.0,
)


def spec(rope: dict[str, Any] | None = None, windows: tuple[int, ...] = (0,), **changes: Any) -> ModelSpec:
    """SPEC with `changes`; `rope` changes the rope of all kinds, of which there is one for each of `windows`."""
    kinds = tuple(LayerKind(window, replace(ROPE, **(rope or {}))) for window in windows)
    return replace(SPEC, layer_kinds=kinds, **changes)
