"""What the code can do, declared without torch. Tests hold each declaration against its implementation."""

from __future__ import annotations

from msgspec import Struct

from surefoot.config.engine_plan import KVLayout
from surefoot.config.model_spec import ModelSpec

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")


class AttentionBackendDecl(Struct, frozen=True):
    name: str
    devices: tuple[str, ...]
    kv_layouts: tuple[str, ...]
    dtypes: tuple[str, ...]
    reads_unseen: bool  # it reads places that no token sees, with weight 0: they must not hold NaN


ATTENTION_BACKENDS = {
    "torch": AttentionBackendDecl(
        name="torch", devices=("cpu",), kv_layouts=("kv_pages",), dtypes=("float32",), reads_unseen=True
    ),
    "native": AttentionBackendDecl(
        name="native", devices=("cpu",), kv_layouts=("kv_pages",), dtypes=("float32",), reads_unseen=False
    ),
}


def kv_pages_layout(model: ModelSpec, dtype: str) -> KVLayout:
    """Keys and values in two tensors a layer, [pages, page_size, kv_heads, head_dim] each."""
    of_layer = 2 * model.kv_size * DTYPE_BYTES[dtype]
    bytes_per_token = tuple(model.layers.count(kind) * of_layer for kind in range(len(model.layer_kinds)))
    return KVLayout(name="kv_pages", dtype=dtype, bytes_per_token=bytes_per_token)
