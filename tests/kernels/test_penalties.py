"""Penalties against their definition, one token after another, in double precision."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from surefoot.kernels.penalties import penalise

REPETITION, PRESENCE, FREQUENCY = (1.0, 1.3, 0.7), (0.0, 0.6, -1.5), (0.0, 0.25, -0.4)
COMBINATIONS = list(itertools.product(REPETITION, PRESENCE, FREQUENCY))


def by_definition(
    row: torch.Tensor, prompt: list[int], output: list[int], penalties: tuple[float, float, float]
) -> torch.Tensor:
    repetition, presence, frequency = penalties
    out = row.double().clone()
    for token in set(prompt) | set(output):
        value = float(out[token])
        value = value / repetition if value > 0 else value * repetition
        if token in output:
            value -= presence + frequency * output.count(token)
        out[token] = value
    return out


@pytest.mark.parametrize("vocab_size", [301, 49153])
def test_every_combination_in_one_batch(vocab_size: int) -> None:
    """Their rows of the pool are in another order than the rows of logits, and rows between them are not touched."""
    rng = random.Random(vocab_size)
    n = len(COMBINATIONS)
    logits = torch.randn(2 * n, vocab_size, generator=torch.Generator().manual_seed(5)) * 4
    rows, count_rows = rng.sample(range(2 * n), n), rng.sample(range(n), n)
    counts = torch.zeros(n, vocab_size, dtype=torch.int32)
    seen = torch.zeros(n, vocab_size, dtype=torch.bool)
    wanted = logits.double()
    for row, count_row, penalties in zip(rows, count_rows, COMBINATIONS, strict=True):
        prompt = rng.choices(range(vocab_size), k=rng.choice((1, 40, 900)))
        output = rng.choices([*prompt[:3], 0, vocab_size - 1], k=rng.choice((0, 1, 30)))
        for token in output:
            counts[count_row, token] += 1
        seen[count_row, prompt + output] = True
        wanted[row] = by_definition(logits[row], prompt, output, penalties)
    got = logits.clone()
    repetition, presence, frequency = torch.tensor(COMBINATIONS).unbind(-1)
    penalise(got, torch.tensor(rows), counts, seen, torch.tensor(count_rows), repetition, presence, frequency)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-5)
    others = [row for row in range(2 * n) if row not in rows]
    assert torch.equal(got[others], logits[others])


def test_neutral_penalties_change_no_bit() -> None:
    logits = torch.randn(1, 301)
    got, one, zero = logits.clone(), torch.ones(1), torch.zeros(1)
    seen, counts = torch.ones(1, 301, dtype=torch.bool), torch.full((1, 301), 3, dtype=torch.int32)
    penalise(got, torch.tensor([0]), counts, seen, torch.tensor([0]), one, zero, zero)
    assert torch.equal(got, logits)
