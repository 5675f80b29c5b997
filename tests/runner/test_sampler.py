"""The sampler inside a step: which kind runs, and what it may give."""

from __future__ import annotations

import math
from unittest.mock import Mock

import pytest
import torch

from surefoot.config.paths import LogprobsKind, SamplerKind
from surefoot.protocol.messages import Sampling
from surefoot.runner.model_runner import ModelRunner
from tests.runner.steps import GREEDY, admission, make_runner, prefill, sampling, set_last_token, step
from tests.tiny import TinyLlama

PROMPT = list(range(40, 60))
PLAIN = sampling(temperature=1.0, seed=11)
TOP_K = sampling(temperature=1.0, top_k=3, seed=11)
BIASED = sampling(logit_bias=((7, 0.5),))
PENALISED = sampling(presence_penalty=0.5)


@pytest.fixture(scope="module")
def runner(tiny_llama: TinyLlama) -> ModelRunner:
    return make_runner(tiny_llama.path)


def run(
    runner: ModelRunner, *samplings: Sampling, stop_ids: tuple[int, ...] = (), min_tokens: int = 0
) -> tuple[list[int], str]:
    """One prefill row each of the same prompt."""
    admissions = [
        admission(slot, asked, len(PROMPT), stop_ids=stop_ids, min_tokens=min_tokens, history=tuple(PROMPT))
        for slot, asked in enumerate(samplings)
    ]
    rows = [prefill(slot, 0, PROMPT, [2 * slot, 2 * slot + 1]) for slot in range(len(samplings))]
    done = runner.run(step(admissions, rows=rows))
    assert all(done.finite)
    return list(done.token_ids), done.path


@pytest.mark.parametrize(
    "samplings, kind",
    [
        ((GREEDY, GREEDY), SamplerKind.GREEDY),
        ((GREEDY, PLAIN), SamplerKind.PLAIN),
        ((GREEDY, PLAIN, TOP_K), SamplerKind.FULL),
        ((GREEDY, BIASED), SamplerKind.FULL),
        ((GREEDY, PLAIN, PENALISED), SamplerKind.FULL),
        ((sampling(top_k=5, top_p=0.5, min_p=0.1, seed=3), GREEDY), SamplerKind.GREEDY),
    ],
    ids=["greedy", "plain", "truncated", "biased", "penalised", "greedy-with-inert-limits"],
)
def test_the_kind_is_the_least_that_all_rows_need(
    runner: ModelRunner, samplings: tuple[Sampling, ...], kind: SamplerKind
) -> None:
    tokens, path = run(runner, *samplings)
    assert path.split("/")[-2:] == [kind, LogprobsKind.NONE]
    assert tokens[0] == run(runner, GREEDY)[0][0]


def test_a_row_draws_the_same_alone_and_beside_others(runner: ModelRunner) -> None:
    for asked in (PLAIN, TOP_K):
        assert run(runner, asked)[0][0] == run(runner, GREEDY, asked, PLAIN, TOP_K)[0][1]


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=lambda limit: str(*limit))
def test_the_tightest_truncation_leaves_the_best_token(runner: ModelRunner, limit: dict[str, float]) -> None:
    seeds = [sampling(temperature=2.0, seed=seed) for seed in range(4)]
    limited = [sampling(temperature=2.0, seed=seed, **limit) for seed in range(4)]
    assert len(set(run(runner, *seeds)[0])) > 1
    assert run(runner, *limited) == ([run(runner, GREEDY)[0][0]] * 4, "prefill/none/torch/dense/full/none")


def test_stop_ids_are_not_sampled_before_min_tokens(runner: ModelRunner) -> None:
    best = run(runner, GREEDY)[0][0]
    tokens, path = run(runner, GREEDY, stop_ids=(best,), min_tokens=len(PROMPT) + 1)
    assert tokens != [best]
    assert path.endswith("full/none")
    tokens, path = run(runner, GREEDY, stop_ids=(best,), min_tokens=len(PROMPT))
    assert tokens == [best]
    assert path.endswith("greedy/none")


def test_an_inner_chunk_samples_nothing(runner: ModelRunner) -> None:
    done = runner.run(step([admission(0)], rows=[prefill(0, 0, PROMPT, [0, 1], samples=False)]))
    assert (done.token_ids, done.finite) == ((), ())
    assert done.path.endswith("none/none")


def test_non_finite_logits_are_flagged_per_row(runner: ModelRunner) -> None:
    runner.run(step([admission(0)], rows=[prefill(0, 0, PROMPT, [0, 1])]))
    runner.run(step([admission(1)], rows=[prefill(1, 0, PROMPT, [2, 3])]))
    with torch.inference_mode():
        runner._kv.layers[1].values[2, 3] = math.nan
    try:
        done = runner.run(step(decode=[(0, 20), (1, 20)]))
        assert done.finite == (True, False)
    finally:
        with torch.inference_mode():
            runner._kv.layers[1].values[2, 3] = 0


def test_a_step_beyond_its_bounds_is_refused(runner: ModelRunner) -> None:
    with pytest.raises(ValueError, match="600 tokens in one row, the bound is 512"):
        runner.run(step(decode=[(0, 599)]))
    with pytest.raises(ValueError, match="300 prefill tokens, the bound is 256"):
        runner.run(step([admission(0)], rows=[prefill(0, 0, range(300), range(19))]))
    with pytest.raises(ValueError, match="9 rows, the bound is 8"):
        runner.run(step(decode=[(0, 1)] * 9))
    for count_row in (-1, 8):
        asked = admission(0, PENALISED, count_row=count_row)
        with pytest.raises(ValueError, match=f"count row {count_row}, the bound is 8"):
            runner.run(step([asked], rows=[prefill(0, 0, PROMPT, [0, 1])]))
    with pytest.raises(ValueError, match="history of 0 tokens, its prompt has 20"):
        runner.run(step([admission(0, PENALISED, 20)], rows=[prefill(0, 0, PROMPT, [0, 1])]))
    with pytest.raises(ValueError, match="21 targets, more than its 20 tokens"):
        runner.run(step([admission(0)], rows=[prefill(0, 0, PROMPT, [0, 1], targets=range(21))]))


def test_the_next_owner_of_a_page_does_not_see_what_the_last_one_left(runner: ModelRunner) -> None:
    """NaN in places past its end, and in the pages of a longer row beside it, must not reach a row."""
    clean = run(runner, GREEDY)[0]
    with torch.inference_mode():
        for layer in runner._kv.layers:
            layer.keys[:20] = math.nan
            layer.values[:20] = math.nan
    assert run(runner, GREEDY)[0] == clean
    long = [prefill(2, 0, range(60, 160), range(10, 17))]
    runner.run(step([admission(2)], rows=long))
    with torch.inference_mode():
        runner._kv.layers[0].values[17:20] = math.nan
        runner._table.page_tables[0, 0, 2:] = 18  # what an earlier owner of the slot left there
    alone = runner.run(step(decode=[(0, 20)]))
    set_last_token(runner, 0, clean[0])
    beside = runner.run(step(decode=[(0, 20), (2, 100)]))
    assert alone.finite + beside.finite == (True,) * 3
    assert beside.token_ids[0] == alone.token_ids[0]


def test_rows_in_flight_after_a_failed_step_write_to_nobody(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that admits slot 0 raises before it has said so; the next one, already in flight, decodes slot 0."""
    run(runner, GREEDY)
    before = [layer.keys[:2].clone() for layer in runner._kv.layers]
    failing = step([admission(0)], rows=[prefill(0, 0, PROMPT, [5, 6])])
    with monkeypatch.context() as patch:
        patch.setattr(runner._table, "apply", Mock(side_effect=RuntimeError("planted")))
        with pytest.raises(RuntimeError, match="planted"):
            runner.run(failing)
    runner.run(step(decode=[(0, 20)]))
    assert all(torch.equal(layer.keys[:2], saved) for layer, saved in zip(runner._kv.layers, before, strict=True))
    assert bool(runner._kv.layers[0].keys[-1].any())  # the sink page
