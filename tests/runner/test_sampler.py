"""The sampler inside a step: which kind runs, and what it may give."""

from __future__ import annotations

import math
from unittest.mock import Mock

import pytest
import torch

from surefoot.config.paths import SamplerKind
from surefoot.protocol.messages import Sampling
from surefoot.runner.model_runner import ModelRunner
from tests.runner.steps import GREEDY, admission, make_runner, prefill, set_last_token, step
from tests.tiny import TinyLlama

PROMPT = list(range(40, 60))
PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1, min_p=0, seed=11)
TOP_K = Sampling(temperature=1.0, top_k=3, top_p=1, min_p=0, seed=11)


@pytest.fixture(scope="module")
def runner(tiny_llama: TinyLlama) -> ModelRunner:
    return make_runner(tiny_llama.path)


def run(
    runner: ModelRunner, *samplings: Sampling, stop_ids: tuple[int, ...] = (), min_tokens: int = 0
) -> tuple[list[int], str]:
    """One prefill row each of the same prompt."""
    admissions = [admission(slot, sampling, stop_ids, min_tokens) for slot, sampling in enumerate(samplings)]
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
        ((Sampling(0, 5, 0.5, 0.1, 3), GREEDY), SamplerKind.GREEDY),
    ],
    ids=["greedy", "plain", "full", "greedy-with-inert-limits"],
)
def test_the_kind_is_the_least_that_all_rows_need(
    runner: ModelRunner, samplings: tuple[Sampling, ...], kind: SamplerKind
) -> None:
    tokens, path = run(runner, *samplings)
    assert path.split("/")[-1] == kind
    assert tokens[0] == run(runner, GREEDY)[0][0]


def test_a_row_draws_the_same_alone_and_beside_others(runner: ModelRunner) -> None:
    for sampling in (PLAIN, TOP_K):
        assert run(runner, sampling)[0][0] == run(runner, GREEDY, sampling, PLAIN, TOP_K)[0][1]


def test_stop_ids_are_not_sampled_before_min_tokens(runner: ModelRunner) -> None:
    best = run(runner, GREEDY)[0][0]
    tokens, path = run(runner, GREEDY, stop_ids=(best,), min_tokens=len(PROMPT) + 1)
    assert tokens != [best]
    assert path.endswith("full")
    tokens, path = run(runner, GREEDY, stop_ids=(best,), min_tokens=len(PROMPT))
    assert tokens == [best]
    assert path.endswith("greedy")


def test_an_inner_chunk_samples_nothing(runner: ModelRunner) -> None:
    done = runner.run(step([admission(0)], rows=[prefill(0, 0, PROMPT, [0, 1], samples=False)]))
    assert (done.token_ids, done.finite) == ((), ())
    assert done.path.endswith("none")


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
        runner._table.page_table[0, 2:] = 18  # what an earlier owner of the slot left there
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
    assert bool(runner._kv.layers[0].keys[runner._kv.sink_page].any())
