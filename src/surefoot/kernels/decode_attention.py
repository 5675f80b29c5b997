"""Attention of one query token per row over paged keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def decode_attention_reference(q: Tensor, keys: Tensor, values: Tensor, pages: Tensor, lengths: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v, row by row, each over its own `lengths[row]` tokens.

    q: [rows, heads, head_dim]; keys, values: [pages, page_size, kv_heads, head_dim]; pages: [rows, columns] page ids;
    lengths: [rows]. Query head h reads KV head h // (heads / kv_heads). Returns [rows, heads, head_dim].
    """
    repeat = q.shape[1] // keys.shape[2]
    out = torch.empty_like(q)
    for row, length in enumerate(lengths.tolist()):
        k = keys[pages[row]].flatten(0, 1)[:length].repeat_interleave(repeat, 1).transpose(0, 1)  # [heads, length, d]
        v = values[pages[row]].flatten(0, 1)[:length].repeat_interleave(repeat, 1).transpose(0, 1)
        scores = (k @ q[row].unsqueeze(-1)).squeeze(-1) / q.shape[-1] ** 0.5
        out[row] = (scores.softmax(-1).unsqueeze(1) @ v).squeeze(1)
    return out


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, pages: Tensor, mask: Tensor) -> Tensor:
    """The same for rows that are gathered together: their copied pages should fit a core's cache.

    pages: [rows * columns] page ids, rows padded with any valid page; mask: [rows, 1, 1, columns * page_size], 0 for a
    token and -inf past the row's end. The query heads of a KV head are taken as its query rows, so each key is loaded
    once per group.
    """
    rows, heads, head_dim = q.shape
    kv_heads = keys.shape[2]
    k = keys.index_select(0, pages).view(rows, -1, kv_heads, head_dim).transpose(1, 2)
    v = values.index_select(0, pages).view(rows, -1, kv_heads, head_dim).transpose(1, 2)
    grouped = q.view(rows, kv_heads, heads // kv_heads, head_dim)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(rows, heads, head_dim)
