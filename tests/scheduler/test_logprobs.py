"""Logprobs of live requests pass through, each once, and prompts are scored without cached prefixes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from surefoot.protocol.messages import FinishReason, Logprobs
from surefoot.protocol.step_plan import StepDone, StepPlan

from .fake_device import continuation, logprobs_at
from .rig import Rig, bounds, make_request

PROMPT = tuple(range(1, 23))  # five pages of four tokens, and two tokens


def done(plan: StepPlan, finite: bool = True, **changes: tuple[Logprobs, ...]) -> StepDone:
    """One token for each row."""
    tokens = (5,) * plan.num_rows
    return replace(StepDone(plan.step_id, tokens, (finite,) * len(tokens), (), (), "path"), **changes)


def scores(count: int, request_id: int = 0) -> Logprobs:
    return Logprobs(request_id, (-1.0,) * count, ((),) * count, ((),) * count)


def chosen(batches: list[Logprobs]) -> list[float]:
    return [value for logprobs in batches for value in logprobs.chosen]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_each_token_comes_with_its_logprobs_if_they_were_asked_for(lookahead: int) -> None:
    rig = Rig()
    requests = [make_request(i, PROMPT[i:], new=6, logprobs=top) for i, top in enumerate((-1, 0, 3))]
    for request in requests:
        rig.submit(request)
    rig.run(lookahead)
    assert 0 not in rig.logprobs
    for request in requests[1:]:
        tokens = (*request.prompt_ids, *continuation(request))
        expected = [
            logprobs_at((position,), tokens, request.id, request.logprobs)
            for position in range(len(request.prompt_ids), len(tokens))
        ]
        assert rig.logprobs[request.id] == expected


@pytest.mark.parametrize("chunk", [1, 7, 4, 64])
@pytest.mark.parametrize("length", [1, 2, 8, 22])
def test_every_prompt_token_but_the_first_is_scored_once(length: int, chunk: int) -> None:
    rig = Rig(bounds(chunked_prefill_size=chunk))
    request = make_request(0, PROMPT[:length], prompt_logprobs=2)
    rig.submit(request)
    rig.run(lookahead=1)
    expected = logprobs_at(range(1, length), request.prompt_ids, 0, 2)
    assert chosen(rig.prompt_logprobs.get(0, [])) == list(expected.chosen)


def test_targets_follow_their_tokens_and_the_last_chunk_has_one_fewer() -> None:
    rig = Rig(bounds(chunked_prefill_size=10))
    rig.add(0, PROMPT, prompt_logprobs=0)
    rows = [rig.step().prefill[0] for _ in range(3)]
    assert [row.targets for row in rows] == [PROMPT[1:11], PROMPT[11:21], PROMPT[21:]]
    rig.run()
    rig.add(1, PROMPT)
    assert rig.step().prefill[0].targets == ()


def test_a_prompt_to_be_scored_matches_nothing_and_is_matched() -> None:
    rig = Rig()
    rig.add(0, PROMPT)
    rig.run()
    for i in (1, 2):
        rig.add(i, PROMPT, prompt_logprobs=0)
        assert rig.step().prefill[0].start == 0
        rig.run()
        assert rig.finished[i].cached_tokens == 0


def test_what_was_delivered_before_a_preemption_is_not_delivered_again() -> None:
    rig = Rig(bounds(num_pages=7, chunked_prefill_size=7))
    rig.add(0, (9,) * 6, new=20, priority=-1)
    request = make_request(1, PROMPT[:20], new=1, prompt_logprobs=1)
    rig.submit(request)  # its first chunk is of one token
    while not rig.scheduler.preemptions:
        rig.step()
    assert len(chosen(rig.prompt_logprobs[1])) == 15
    targets: list[tuple[int, ...]] = []
    while rig.scheduler.has_work:
        targets += [row.targets for row in rig.step().prefill if row.request_id == 1]
    assert targets == [(), (), PROMPT[15:20]]  # of the last one, the first is known already
    expected = logprobs_at(range(1, 20), request.prompt_ids, 1, 1)
    assert chosen(rig.prompt_logprobs[1]) == list(expected.chosen)


def test_a_resumed_request_whose_prompt_is_scored_matches_again() -> None:
    rig = Rig(bounds(num_pages=8, max_running_requests=2))
    rig.add(0, (1,) * 12, new=20)
    rig.add(1, (2,) * 12, new=20, prompt_logprobs=0)
    while not rig.scheduler.preemptions:
        rig.step()
    rows = []
    while not rows:
        rows = [row for row in rig.step().prefill if row.request_id == 1]
    assert rows[0].targets == ()
    rig.run()
    assert len(chosen(rig.prompt_logprobs[1])) == 11


def test_rows_of_ended_requests_and_rows_that_are_not_finite_have_no_logprobs() -> None:
    rig = Rig()
    rig.add(0, PROMPT, logprobs=0, prompt_logprobs=0)
    plan = rig.plan()
    rig.abort(0)
    told = {"logprobs": (scores(1),), "prompt_logprobs": (scores(21),)}
    batch = rig.scheduler.commit(plan, done(plan, **told))
    assert (batch.request_ids, batch.logprobs, batch.prompt_logprobs) == ((), (), ())
    rig.in_flight.clear()
    rig.device.queue.clear()
    rig.add(0, PROMPT, logprobs=0, prompt_logprobs=0)
    plan = rig.plan()
    batch = rig.scheduler.commit(plan, done(plan, finite=False, **told))
    assert [finished.reason for finished in batch.finished] == [FinishReason.ERROR]
    assert (batch.logprobs, batch.prompt_logprobs) == ((), ())


@pytest.mark.parametrize(
    "told, detail",
    [
        ({"prompt_logprobs": (scores(21),)}, "lacks 1 logprobs of request 0"),
        ({"logprobs": (scores(1),), "prompt_logprobs": (scores(20),)}, "lacks 21 logprobs of request 0"),
        ({"logprobs": (scores(1, request_id=3),), "prompt_logprobs": (scores(21),)}, "lacks 1 logprobs of request 0"),
    ],
)
def test_a_result_without_the_logprobs_asked_for_is_refused(told: dict[str, tuple[Logprobs, ...]], detail: str) -> None:
    rig = Rig()
    rig.add(0, PROMPT, logprobs=0, prompt_logprobs=0)
    plan = rig.plan()
    with pytest.raises(ValueError, match=detail):
        rig.scheduler.commit(plan, done(plan, **told))
