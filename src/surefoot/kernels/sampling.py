"""Drawing the next token from logits.

Randomness is a function of (seed, position, token id) alone, so a request sees the same noise whatever it is batched
with and however often it is preempted. A draw is Gumbel-max: argmax(logits / temperature + noise), which samples from
the softmax without computing it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# So many of a row's most probable tokens nearly always reach its top_p; else the whole row is sorted.
TOP_P_CANDIDATES = 256
# Noise is made for so many rows at once: on a CPU its passes then stay within a core's cache (docs/log.md).
ROWS_AT_ONCE = 8

_MASK32 = 0xFFFFFFFF


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits: [rows, vocab] fp32. Returns the place of each row's largest, [rows] int64, and whether all of a row are
    finite, [rows] bool."""
    # A sum is finite if all its terms are, and the fastest look at all of them.
    return logits.argmax(-1), logits.sum(-1).isfinite()


def mix32(x: Tensor) -> Tensor:
    """A bijective 32-bit mixer, `lowbias32` (C. Wellons, "Prospecting for Hash Functions", 2018).

    x: int64 with values below 2^32. Mixed in place, and returned.
    """
    shifted = x >> 16
    x.bitwise_xor_(shifted).mul_(0x7FEB352D).bitwise_and_(_MASK32)
    torch.bitwise_right_shift(x, 15, out=shifted)
    x.bitwise_xor_(shifted).mul_(0x846CA68B).bitwise_and_(_MASK32)
    torch.bitwise_right_shift(x, 16, out=shifted)
    return x.bitwise_xor_(shifted)


@functools.lru_cache(maxsize=4)
def _token_keys(vocab_size: int, device: torch.device) -> Tensor:
    return mix32(torch.arange(vocab_size, device=device))


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, -log(-log(u)) with u uniform in (0, 1).

    seeds: [rows] int64 >= 0, positions: [rows] int64. Returns [rows, vocab_size] fp32.
    """
    row_keys = mix32(mix32(mix32(seeds & _MASK32) ^ (seeds >> 32)) ^ (positions & _MASK32))
    bits = mix32(_token_keys(vocab_size, seeds.device) ^ row_keys[:, None])
    uniform = bits.bitwise_right_shift_(8).float().add_(0.5).mul_(2.0**-24)  # never 0 or 1
    return uniform.log_().neg_().log_().neg_()


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Sets to -inf what a row may not draw: first all but its top_k most probable tokens; then, of what is left and
    renormalised, all after the smallest set that reaches top_p; then all less probable than min_p times the best.

    logits: [rows, vocab] fp32, divided by the temperature; top_k: [rows] int64, 0 for no limit; top_p: [rows] in
    (0, 1]; min_p: [rows] in [0, 1]. Returns [rows, vocab].
    """
    vocab_size = logits.shape[-1]
    candidates = min(vocab_size, max(int(top_k.max()), TOP_P_CANDIDATES))
    kept = _most_probable(logits, candidates, top_k, top_p)
    if kept is None:
        kept = _most_probable(logits, vocab_size, top_k, top_p)
        assert kept is not None
    threshold = logits.amax(-1, keepdim=True) + min_p.log()[:, None]  # log(0) is -inf: no limit
    return kept.masked_fill_(kept < threshold, -torch.inf)


def _most_probable(logits: Tensor, candidates: int, top_k: Tensor, top_p: Tensor) -> Tensor | None:
    """Top-k and top-p, looking at `candidates` tokens of a row; None if those do not reach some row's top_p."""
    values, indices = logits.topk(candidates, dim=-1)
    limited = top_k > 0
    rank = torch.arange(candidates, device=logits.device)
    values.masked_fill_(limited[:, None] & (rank >= top_k[:, None]), -torch.inf)
    total = torch.where(limited, values.logsumexp(-1), logits.logsumexp(-1))
    reached = (values - total[:, None]).exp_().cumsum(-1)
    if candidates < logits.shape[-1] and bool((~limited & (top_p < 1) & (reached[:, -1] < top_p)).any()):
        return None
    # A token is kept if those before it do not reach top_p yet: the first always is.
    values[:, 1:].masked_fill_((reached[:, :-1] >= top_p[:, None]) & (top_p < 1)[:, None], -torch.inf)
    cut = torch.full_like(logits, -torch.inf).scatter_(-1, indices, values)
    whole = ~limited & (top_p >= 1)
    return torch.where(whole[:, None], logits, cut)


def draw(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """argmax(logits + noise); rows of temperature 0 take the argmax of the logits alone.

    logits: [rows, vocab] fp32, divided by the temperature and truncated; positions: [rows] int64, that of the token
    to draw. Returns [rows] int64.
    """
    tokens = torch.empty_like(seeds)
    for first in range(0, len(seeds), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        noise = gumbel_noise(seeds[rows], positions[rows], logits.shape[-1])
        noise.masked_fill_((temperatures[rows] == 0)[:, None], 0)
        tokens[rows] = noise.add_(logits[rows]).argmax(-1)
    return tokens
