"""Logprobs against log_softmax in double precision, and the order of the most probable tokens."""

from __future__ import annotations

import pytest
import torch

from surefoot.kernels.logprobs import token_logprobs


@pytest.mark.parametrize("count", [0, 1, 5, 20, 300, 1000])
@pytest.mark.parametrize("vocab_size", [301, 49153])
def test_against_log_softmax(vocab_size: int, count: int) -> None:
    """17 rows are not a whole number of slices."""
    logits = torch.randn(17, vocab_size, generator=torch.Generator().manual_seed(count)) * 6
    tokens = torch.arange(17) * 17
    chosen, top_ids, top = token_logprobs(logits, tokens, count)
    wanted = logits.double().log_softmax(-1)
    columns = min(count, vocab_size)
    assert top.shape == top_ids.shape == (17, columns)
    torch.testing.assert_close(chosen.double(), wanted[torch.arange(17), tokens], rtol=0, atol=1e-5)
    torch.testing.assert_close(top.double(), wanted.gather(-1, top_ids), rtol=0, atol=1e-5)
    assert torch.equal(top_ids, logits.sort(dim=-1, descending=True, stable=True).indices[:, :columns])


def test_of_equal_logits_the_smaller_id_comes_first() -> None:
    values = [0.0, 2.0, -0.0, 2.0, -1.0, 0.0, -1.0, 3e38, -3e38, 2.0]
    logits = torch.tensor([values, values[::-1]])
    for row, ids in enumerate(token_logprobs(logits, torch.tensor([0, 0]), 10)[1].tolist()):
        assert ids == sorted(range(10), key=lambda token: (-float(logits[row, token]), token))


@pytest.mark.parametrize("vocab_size", [301, 49153])
def test_ties_that_cross_the_edge(vocab_size: int) -> None:
    """Each logit occurs often, so that the last of the tokens wanted is one of many."""
    logits = torch.randint(0, 4, (9, vocab_size), generator=torch.Generator().manual_seed(1)).float()
    wanted = logits.sort(dim=-1, descending=True, stable=True).indices
    for count in (1, 5, 20, 200, 300):
        assert torch.equal(token_logprobs(logits, torch.zeros(9, dtype=torch.int64), count)[1], wanted[:, :count])


def test_a_row_is_the_same_alone_and_beside_others() -> None:
    logits = torch.randn(20, 301, generator=torch.Generator().manual_seed(2)).half().float()  # with ties
    together = token_logprobs(logits, torch.arange(20), 20)
    for row in range(20):
        alone = token_logprobs(logits[row : row + 1], torch.tensor([row]), 7)
        assert torch.equal(alone[1][0], together[1][row, :7])
        torch.testing.assert_close(alone[2][0], together[2][row, :7], rtol=0, atol=1e-6)


def test_a_row_with_nan_gives_token_ids_nonetheless() -> None:
    """Its request ends, but the rows beside it must get theirs."""
    logits = torch.randn(2, 301)
    logits[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.nan])
    _, ids, logprobs = token_logprobs(logits, torch.tensor([0, 0]), 20)
    assert 0 <= int(ids.min()) <= int(ids.max()) < 301
    assert bool(logprobs[1].isfinite().all())
