"""Causal attention of one row's chunk over its paged keys and values: the cached ones and the chunk's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def prefill_attention_reference(
    q: Tensor, cache: tuple[Tensor, Tensor], pages: Tensor, start: int, window: int, scale: float, softcap: float
) -> Tensor:
    """Query token i stands at position p = start + i and sees the last `window` (0: all) of positions 0 to p, by
    softmax(cap(scale * q k^T)) v, with cap(x) = softcap * tanh(x / softcap), or x if softcap is 0.

    q: [tokens, heads, head_dim]; cache: keys and values, [pages, page_size, kv_heads, head_dim] each; pages: [columns]
    page ids that cover places 0 to start + tokens. Returns [tokens, heads, head_dim].
    """
    repeat = q.shape[1] // cache[0].shape[2]
    k, v = (part[pages].flatten(0, 1).repeat_interleave(repeat, 1) for part in cache)  # [places, heads, head_dim]
    out = torch.empty_like(q)
    for i in range(q.shape[0]):
        length = start + i + 1
        seen = slice(max(0, length - window) if window else 0, length)
        scores = torch.einsum("hd,khd->hk", q[i], k[seen]) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        out[i] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[seen])
    return out


def prefill_attention(
    q: Tensor, cache: tuple[Tensor, Tensor], pages: Tensor, mask: Tensor, scale: float, softcap: float
) -> Tensor:
    """The same, with pages: [columns] page ids from any column on that the first token sees, and mask: [tokens,
    columns * page_size], 0 where a token may look and -inf elsewhere."""
    tokens, heads, head_dim = q.shape
    k, v = (part.index_select(0, pages).flatten(0, 1).transpose(0, 1) for part in cache)  # [kv_heads, places, head_dim]
    if not softcap:
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), attn_mask=mask, scale=scale, enable_gqa=True
        )
        return out.squeeze(0).transpose(0, 1)
    kv_heads, repeat = k.shape[0], heads // k.shape[0]
    grouped = q.view(tokens, kv_heads, repeat, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    scores = (grouped @ k.transpose(-1, -2)).mul_(scale / softcap).tanh_().mul_(softcap)
    weights = scores.view(kv_heads, repeat, tokens, -1).add_(mask).softmax(-1)
    out = (weights.flatten(1, 2) @ v).view(kv_heads, repeat, tokens, head_dim)
    return out.permute(2, 0, 1, 3).reshape(tokens, heads, head_dim)
