"""Attention of one query token per row over paged keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def decode_attention_reference(
    q: Tensor, cache: tuple[Tensor, Tensor], pages: Tensor, lengths: Tensor, window: int, scale: float, softcap: float
) -> Tensor:
    """softmax(cap(scale * q k^T)) v, row by row, each over the last `window` (0: all) of its `lengths[row]` tokens.
    cap(x) = softcap * tanh(x / softcap), or x if softcap is 0.

    q: [rows, heads, head_dim]; cache: keys and values, [pages, page_size, kv_heads, head_dim] each; pages: [rows,
    columns] page ids from the row's first token on; lengths: [rows]. Query head h reads KV head
    h // (heads / kv_heads). Returns [rows, heads, head_dim].
    """
    repeat = q.shape[1] // cache[0].shape[2]
    out = torch.empty_like(q)
    for row, length in enumerate(lengths.tolist()):
        seen = slice(max(0, length - window) if window else 0, length)
        # [heads, seen, head_dim] each
        k, v = (part[pages[row]].flatten(0, 1)[seen].repeat_interleave(repeat, 1).transpose(0, 1) for part in cache)
        scores = (k @ q[row].unsqueeze(-1)).squeeze(-1) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        out[row] = (scores.softmax(-1).unsqueeze(1) @ v).squeeze(1)
    return out


def decode_attention(
    q: Tensor, cache: tuple[Tensor, Tensor], pages: Tensor, mask: Tensor, scale: float, softcap: float
) -> Tensor:
    """The same for rows that are gathered together: their copied pages should fit a core's cache.

    pages: [rows * columns] page ids, each row's from any column on that its token sees, and padded with any valid page;
    mask: [rows, 1, 1, columns * page_size], 0 for a token that is seen and -inf for all other places. The query heads
    of a KV head are taken as its query rows, so each key is loaded once per group.
    """
    rows, heads, head_dim = q.shape
    kv_heads = cache[0].shape[2]
    k, v = (part.index_select(0, pages).view(rows, -1, kv_heads, head_dim).transpose(1, 2) for part in cache)
    grouped = q.view(rows, kv_heads, heads // kv_heads, head_dim)
    if softcap:
        scores = (grouped @ k.transpose(-1, -2)).mul_(scale / softcap).tanh_().mul_(softcap).add_(mask)
        out = scores.softmax(-1) @ v
    else:
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    return out.reshape(rows, heads, head_dim)
