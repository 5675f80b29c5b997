"""Causal attention of one row's chunk over its paged keys and values: the cached ones and the chunk's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def prefill_attention_reference(q: Tensor, keys: Tensor, values: Tensor, pages: Tensor, start: int) -> Tensor:
    """Query token i stands at position start + i and sees positions 0 to start + i.

    q: [tokens, heads, head_dim]; keys, values: [pages, page_size, kv_heads, head_dim]; pages: [columns] page ids that
    cover start + tokens places. Returns [tokens, heads, head_dim].
    """
    repeat = q.shape[1] // keys.shape[2]
    k = keys[pages].flatten(0, 1).repeat_interleave(repeat, 1)  # [places, heads, head_dim]
    v = values[pages].flatten(0, 1).repeat_interleave(repeat, 1)
    out = torch.empty_like(q)
    for i in range(q.shape[0]):
        length = start + i + 1
        scores = torch.einsum("hd,khd->hk", q[i], k[:length]) / q.shape[-1] ** 0.5
        out[i] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[:length])
    return out


def prefill_attention(q: Tensor, keys: Tensor, values: Tensor, pages: Tensor, mask: Tensor) -> Tensor:
    """The same with `mask`: [tokens, columns * page_size], 0 where a token may look and -inf elsewhere."""
    k = keys.index_select(0, pages).flatten(0, 1).transpose(0, 1)  # [kv_heads, places, head_dim]
    v = values.index_select(0, pages).flatten(0, 1).transpose(0, 1)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), attn_mask=mask, enable_gqa=True
    )
    return out.squeeze(0).transpose(0, 1)
