"""Sampling: what may be drawn is exact; how often is measured against the softmax."""

from __future__ import annotations

import math

import pytest
import torch

from surefoot.kernels import sampling
from surefoot.kernels.sampling import draw, gumbel_noise, mix32, truncate

VOCAB = 301


def kept_by_definition(row: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """One token after another, in double precision."""
    probabilities = row.double().softmax(-1)
    order = sorted(range(len(row)), key=lambda token: -float(row[token]))
    order = order[:top_k] if top_k else order
    total = sum(float(probabilities[token]) for token in order)
    kept, mass = [], 0.0
    for token in order:
        if top_p < 1 and mass >= top_p:
            break
        kept.append(token)
        mass += float(probabilities[token]) / total
    best = float(probabilities[order[0]])
    return {token for token in kept if float(probabilities[token]) >= min_p * best}


CASES = [  # top_k, top_p, min_p
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (7, 1.0, 0.0),
    (VOCAB + 5, 1.0, 0.0),
    (0, 0.5, 0.0),
    (0, 0.999, 0.0),
    (0, 1e-6, 0.0),
    (20, 0.7, 0.0),
    (0, 1.0, 0.1),
    (0, 1.0, 1.0),
    (40, 0.9, 0.05),
]


@pytest.mark.parametrize("candidates", [1, 8, 256, 1000])
def test_truncation_keeps_what_the_definition_keeps(monkeypatch: pytest.MonkeyPatch, candidates: int) -> None:
    """All cases in one batch, whatever number of candidates is looked at first."""
    monkeypatch.setattr(sampling, "TOP_P_CANDIDATES", candidates)
    logits = torch.randn(len(CASES), VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*CASES, strict=True))
    got = truncate(logits.clone(), top_k, top_p.float(), min_p.float())
    for row, case in enumerate(CASES):
        kept = set((got[row] > -torch.inf).nonzero().flatten().tolist())
        assert kept == kept_by_definition(logits[row], *case), case
        assert torch.equal(got[row, sorted(kept)], logits[row, sorted(kept)])


def test_draws_follow_the_softmax() -> None:
    """Pearson's chi-squared over 20,000 draws with different seeds."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, 0.5])
    draws = 20_000
    seeds = torch.arange(draws)
    tokens = draw(logits.expand(draws, -1), torch.ones(draws), seeds, torch.full((draws,), 17))
    expected = logits.softmax(-1) * draws
    chi_squared = ((tokens.bincount(minlength=6) - expected) ** 2 / expected).sum()
    assert float(chi_squared) < 20.5  # 0.1 % point of 5 degrees of freedom


def test_draws_of_one_seed_follow_the_softmax_over_positions() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, 0.5])
    draws = 20_000
    tokens = draw(logits.expand(draws, -1), torch.ones(draws), torch.full((draws,), 5), torch.arange(draws))
    expected = logits.softmax(-1) * draws
    chi_squared = ((tokens.bincount(minlength=6) - expected) ** 2 / expected).sum()
    assert float(chi_squared) < 20.5
    repeated = (tokens[1:] == tokens[:-1]).float().mean()
    assert abs(float(repeated) - float((logits.softmax(-1) ** 2).sum())) < 0.02


def test_noise_is_gumbel() -> None:
    noise = gumbel_noise(torch.arange(50), torch.arange(50), 5000)
    assert bool(noise.isfinite().all())
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    seeds, positions = torch.tensor([3, 3, 4, 2**62 + 3]), torch.tensor([9, 10, 9, 9])
    noise = gumbel_noise(seeds, positions, VOCAB)
    for row in range(4):
        assert torch.equal(noise[row], gumbel_noise(seeds[row : row + 1], positions[row : row + 1], VOCAB)[0])
        for other in range(row):
            assert float((noise[row] == noise[other]).float().mean()) < 0.02
    assert torch.equal(gumbel_noise(seeds, positions, 100), noise[:, :100])


def test_mix32_is_a_bijection_on_what_it_was_given() -> None:
    values = torch.cat((torch.arange(1 << 16), torch.arange(1 << 16) << 16, (1 << 32) - 1 - torch.arange(1 << 16)))
    mixed = mix32(values.unique().clone())
    assert mixed.unique().numel() == values.unique().numel()
    assert int(mixed.min()) >= 0
    assert int(mixed.max()) < 1 << 32


def test_temperature_zero_takes_the_argmax_beside_rows_that_draw() -> None:
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(1))
    temperatures = torch.tensor([0.0, 1.0] * 32)
    tokens = draw(logits.clone(), temperatures, torch.arange(64), torch.arange(64))
    assert torch.equal(tokens[::2], logits[::2].argmax(-1))
    assert not torch.equal(tokens[1::2], logits[1::2].argmax(-1))
