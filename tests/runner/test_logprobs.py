"""Logprobs of prompt and output: those of transformers' log_softmax, however the prompt was cut."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import Mock

import pytest
import torch

from surefoot.config.paths import LogprobsKind
from surefoot.protocol.messages import Logprobs
from surefoot.protocol.step_plan import StepDone
from surefoot.runner.model_runner import ModelRunner
from tests.runner.steps import GREEDY, admission, make_runner, prefill, sampling, step
from tests.tiny import TinyLlama

PROMPT = [(11 * i * i + 5 * i) % 301 for i in range(151)]
PAGES = range(10)


@pytest.fixture(scope="module")
def runner(tiny_llama: TinyLlama) -> ModelRunner:
    return make_runner(tiny_llama.path)


def check(logprobs: Logprobs, tokens: Sequence[int], reference: torch.Tensor, count: int) -> None:
    """reference: [tokens, vocab] logits. Ids may differ from the reference's only where its values are equal too."""
    wanted = reference.double().log_softmax(-1)
    close = {"rtol": 0, "atol": 2e-5}  # of which the model's own logits need most
    chosen, top = torch.tensor(logprobs.chosen).double(), torch.tensor(logprobs.top_logprobs).double()
    torch.testing.assert_close(chosen, wanted[torch.arange(len(tokens)), list(tokens)], **close)
    assert top.shape == (len(tokens), count)
    if count:
        torch.testing.assert_close(top, wanted.topk(count).values, **close)
        torch.testing.assert_close(top, wanted.gather(-1, torch.tensor(logprobs.top_ids)), **close)


def scored(runner: ModelRunner, chunk: int, count: int, slot: int = 0) -> Logprobs:
    """The prompt's logprobs, of all its chunks together."""
    parts = []
    for start in range(0, len(PROMPT), chunk):
        tokens = PROMPT[start : start + chunk]
        targets = PROMPT[start + 1 : start + 1 + chunk]
        row = prefill(slot, start, tokens, () if start else PAGES, start + chunk >= len(PROMPT), targets)
        done = runner.run(step([] if start else [admission(slot, prompt_logprobs=count)], rows=[row]))
        assert done.path.endswith(LogprobsKind.PROMPT if targets else LogprobsKind.NONE)
        assert len(done.prompt_logprobs) == (1 if targets else 0)
        parts += done.prompt_logprobs
    assert {part.request_id for part in parts} == {100 + slot}
    return Logprobs(
        100 + slot,
        tuple(value for part in parts for value in part.chosen),
        tuple(ids for part in parts for ids in part.top_ids),
        tuple(values for part in parts for values in part.top_logprobs),
    )


@pytest.mark.parametrize("count", [0, 5, 20])
@pytest.mark.parametrize("chunk", [1, 7, 16, 50, 1000], ids=["one-token", "odd", "page", "last-of-one", "whole"])
def test_prompt_logprobs_do_not_depend_on_chunks(
    runner: ModelRunner, tiny_llama: TinyLlama, chunk: int, count: int
) -> None:
    check(scored(runner, chunk, count), PROMPT[1:], tiny_llama.logits(PROMPT)[:-1], count)


def test_no_more_rows_of_logits_exist_than_the_bound_says(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = runner._plan.bounds.logits_rows
    assert bound < len(PROMPT)
    head = Mock(wraps=runner._model.logits)
    monkeypatch.setattr(runner._model, "logits", head)
    scored(runner, 1000, 5)
    sizes = [len(call.args[0]) for call in head.call_args_list]
    assert max(sizes) == bound
    assert sum(sizes) == len(PROMPT)  # each once: the last one to sample


def test_a_prefix_of_the_targets_scores_a_prefix(runner: ModelRunner, tiny_llama: TinyLlama) -> None:
    row = prefill(0, 0, PROMPT, PAGES, targets=PROMPT[1:31])
    done = runner.run(step([admission(0, prompt_logprobs=2)], rows=[row]))
    check(done.prompt_logprobs[0], PROMPT[1:31], tiny_llama.logits(PROMPT)[:30], 2)


def mixed_step(runner: ModelRunner) -> StepDone:
    """Slots 1 and 2 decode, 3 to 6 prefill; 1, 3 and 5 ask for their output's logprobs, 4 and 5 for their prompts'."""
    full = {"temperature": 1.3, "seed": 5, "top_k": 3, "repetition_penalty": 1.5, "logit_bias": ((7, 3.0), (8, -1.0))}
    first = [
        admission(1, sampling(**full), 40, history=tuple(PROMPT[:40]), logprobs=4),
        admission(2, GREEDY),
        admission(3, sampling(temperature=0.5), logprobs=0),
        admission(4, prompt_logprobs=3),
        admission(5, sampling(**full), 20, history=tuple(PROMPT[:20]), logprobs=20, prompt_logprobs=1),
        admission(6, GREEDY),
    ]
    rows = [prefill(slot, 0, PROMPT[:40], range(10 * slot, 10 * slot + 4)) for slot in (1, 2)]
    before = runner.run(step(first[:2], rows=rows))
    assert [logprobs.request_id for logprobs in before.logprobs] == [101]
    rows = [
        prefill(3, 0, PROMPT[:9], [30]),
        prefill(4, 0, PROMPT[:12], [40], samples=False, targets=PROMPT[1:13]),
        prefill(5, 0, PROMPT[:20], [50, 51], targets=PROMPT[1:20]),
        prefill(6, 0, PROMPT[:5], [60]),
    ]
    with torch.inference_mode():
        runner._table.last_token[1] = PROMPT[40]
    return runner.run(step(first[2:], decode=[(1, 40), (2, 40)], rows=rows))


def test_each_row_of_a_mixed_step_gets_what_it_asked_for(runner: ModelRunner, tiny_llama: TinyLlama) -> None:
    """Of the model's own distribution, not of the one that was drawn from."""
    done = mixed_step(runner)
    assert done.path.endswith(f"full/{LogprobsKind.PROMPT}")
    assert [logprobs.request_id for logprobs in done.logprobs] == [101, 103, 105]
    reference = tiny_llama.logits(PROMPT[:41])
    for logprobs, row, length, count in zip(done.logprobs, (0, 2, 3), (41, 9, 20), (4, 0, 20), strict=True):
        check(logprobs, [done.token_ids[row]], reference[length - 1 : length], count)
    assert [logprobs.request_id for logprobs in done.prompt_logprobs] == [104, 105]
    check(done.prompt_logprobs[0], PROMPT[1:13], reference[:12], 3)
    check(done.prompt_logprobs[1], PROMPT[1:20], reference[:19], 1)


def test_steps_in_which_nobody_asks_compute_none(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = step([admission(0), admission(1)], rows=[prefill(slot, 0, PROMPT[:9], [slot]) for slot in (0, 1)])
    with monkeypatch.context() as patch:
        patch.setattr("surefoot.runner.logprobs.token_logprobs", Mock(side_effect=AssertionError))
        done = runner.run(plan)
    assert (done.logprobs, done.prompt_logprobs) == ((), ())
    assert done.path.endswith(f"greedy/{LogprobsKind.NONE}")
    asking = step([admission(0, logprobs=0)], rows=[prefill(0, 0, PROMPT[:9], [0])])
    assert runner.run(asking).path.endswith(f"greedy/{LogprobsKind.OUTPUT}")


def test_a_row_in_flight_after_a_failed_step_is_still_a_row(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that admits slot 0 raises; the next one holds the prompt's next chunk."""
    with monkeypatch.context() as patch:
        patch.setattr(runner._table, "apply", Mock(side_effect=RuntimeError("planted")))
        with pytest.raises(RuntimeError, match="planted"):
            runner.run(step([admission(0, prompt_logprobs=5)], rows=[prefill(0, 0, PROMPT[:16], [0], samples=False)]))
    stray = prefill(0, 16, PROMPT[16:20], targets=PROMPT[17:21])
    beside = prefill(1, 0, PROMPT[:8], [10], targets=PROMPT[1:8])
    done = runner.run(step([admission(1, prompt_logprobs=3)], rows=[stray, beside]))
    assert [logprobs.request_id for logprobs in done.prompt_logprobs] == [100, 101]
    assert done.prompt_logprobs[0].top_ids == ((),) * 4
    assert [len(ids) for ids in done.prompt_logprobs[1].top_ids] == [3] * 7
