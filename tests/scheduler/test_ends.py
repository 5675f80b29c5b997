"""How requests end: refused, aborted, or with a failed step. Every one ends once, and takes nothing with it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from surefoot.protocol.messages import Accepted, FinishReason, RefusalCause, Refused, TokenBatch
from surefoot.protocol.step_plan import StepDone

from .fake_device import continuation
from .rig import Rig, bounds, make_request

PROMPT = tuple(range(1, 23))  # five pages of four tokens, and two tokens


# Refusals


@pytest.mark.parametrize("slots, places", [(1, 0), (2, 0), (2, 3)])
def test_a_full_queue_refuses(slots: int, places: int) -> None:
    rig = Rig(bounds(max_running_requests=slots, max_queued_requests=places))
    for i in range(slots + places):
        assert rig.add(i, PROMPT) == Accepted(i)
    for _ in range(3):  # whether they wait or run makes no difference
        refused = rig.add(99, PROMPT)
        assert isinstance(refused, Refused)
        assert refused.cause == RefusalCause.QUEUE_FULL
        assert f"{slots} running and {places} waiting" in refused.detail
        rig.step()
    rig.abort(0)
    assert rig.add(99, PROMPT) == Accepted(99)


def test_preempted_requests_take_no_place_in_the_queue() -> None:
    rig = Rig(bounds(num_pages=8, max_running_requests=2, max_queued_requests=1))
    rig.add(0, (1,) * 12, new=20)
    rig.add(1, (2,) * 12, new=20)
    while not rig.scheduler.preemptions:
        rig.step()
    assert rig.waiting() == [1]
    assert rig.add(2, PROMPT) == Accepted(2)
    assert isinstance(rig.add(3, PROMPT), Refused)


@pytest.mark.parametrize(
    "prompt, new, min_new, cause, detail",
    [
        ((), 1, 0, RefusalCause.INVALID, "the prompt is empty"),
        (PROMPT, 0, 0, RefusalCause.INVALID, "max_new_tokens is 0"),
        (PROMPT, 4, 5, RefusalCause.INVALID, "min_new_tokens is 5"),
        ((1, -2), 1, 0, RefusalCause.INVALID, "outside 0..2147483647"),
        ((2**31,), 1, 0, RefusalCause.INVALID, "outside 0..2147483647"),
        ((1,) * 64, 1, 0, RefusalCause.TOO_LONG, "64 prompt tokens and 1 new ones are 65, the limit is 64"),
        (PROMPT, 43, 0, RefusalCause.TOO_LONG, "22 prompt tokens and 43 new ones are 65, the limit is 64"),
        (PROMPT, 20, 0, RefusalCause.TOO_LONG, "need 11 pages of the KV cache, which has 10"),
    ],
)
def test_what_cannot_be_served_is_refused(
    prompt: tuple[int, ...], new: int, min_new: int, cause: RefusalCause, detail: str
) -> None:
    rig = Rig(bounds(num_pages=10))
    refused = rig.submit(replace(make_request(1, prompt, new), min_new_tokens=min_new))
    assert isinstance(refused, Refused)
    assert refused.cause == cause
    assert detail in refused.detail
    assert not rig.scheduler.has_work


@pytest.mark.parametrize("prompt_length, new", [(22, 19), (40, 1), (1, 40)])
def test_what_just_fits_is_served(prompt_length: int, new: int) -> None:
    rig = Rig(bounds(num_pages=10, max_model_len=41))
    request = make_request(1, (5,) * prompt_length, new)
    assert rig.submit(request) == Accepted(1)
    rig.run(lookahead=1)
    assert rig.tokens[1] == continuation(request)


def test_a_live_id_is_refused_and_an_ended_one_is_not() -> None:
    rig = Rig()
    rig.add(1, PROMPT)
    refused = rig.add(1, PROMPT)
    assert isinstance(refused, Refused)
    assert (refused.cause, refused.detail.split(":")[0]) == (RefusalCause.INVALID, "request id 1 is in use")
    rig.run()
    assert rig.add(1, PROMPT) == Accepted(1)


# Aborts


@pytest.mark.parametrize("steps", [0, 1, 3, 7], ids=["waiting", "prefilling", "prefilled", "decoding"])
@pytest.mark.parametrize("in_flight", [0, 1])
def test_an_abort_ends_a_request_at_once(steps: int, in_flight: int) -> None:
    rig = Rig(bounds(chunked_prefill_size=8))
    rig.add(0, PROMPT, new=20)
    for _ in range(steps):
        rig.step()
    if in_flight:
        rig.plan()
    (batch,) = rig.abort(0)
    assert isinstance(batch, TokenBatch)
    assert [(f.request_id, f.reason) for f in batch.finished] == [(0, FinishReason.ABORTED)]
    assert (batch.path, batch.request_ids) == ("", ())
    assert not rig.scheduler.has_work
    assert rig.abort(0) == ()
    rig.add(0, PROMPT[::-1])  # the id is free; the row in flight is not taken for the new request's
    if in_flight:
        assert rig.commit().request_ids == ()
    rig.run()
    assert rig.tokens[0][-4:] == continuation(make_request(0, PROMPT[::-1]))


def test_an_abort_keeps_the_committed_part_of_the_prefix() -> None:
    rig = Rig(bounds(chunked_prefill_size=10))
    rig.add(0, PROMPT)
    rig.step()
    rig.plan()
    rig.abort(0)
    rig.commit()
    rig.add(1, PROMPT)
    rig.run()
    assert rig.finished[1].cached_tokens == 8


def test_an_abort_of_a_preempted_request() -> None:
    rig = Rig(bounds(num_pages=8, max_running_requests=2))
    rig.add(0, (1,) * 12, new=20)
    rig.add(1, (2,) * 12, new=20)
    while not rig.scheduler.preemptions:
        rig.plan()
        if len(rig.in_flight) > 1 and not rig.scheduler.preemptions:
            rig.commit()
    rig.abort(1)
    rig.run(lookahead=1)
    assert rig.finished[1].reason == FinishReason.ABORTED
    assert rig.tokens[0] == continuation(make_request(0, (1,) * 12, new=20))


# Failures


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_failed_step_ends_its_requests_and_no_others(lookahead: int) -> None:
    rig = Rig(bounds(max_running_requests=2))
    for i in range(2):
        rig.add(i, (i + 1,) * 9)
    rig.plan()
    rig.add(2, (1,) * 9)
    if lookahead:
        rig.plan()
    batch = rig.commit(error="RuntimeError: boom")
    assert {(f.request_id, f.reason, f.detail) for f in batch.finished} == {
        (0, FinishReason.ERROR, "RuntimeError: boom"),
        (1, FinishReason.ERROR, "RuntimeError: boom"),
    }
    assert rig.scheduler.stats().pages[0].cached == 0
    rig.run(lookahead)
    assert rig.tokens == {2: continuation(make_request(2, (1,) * 9))}
    assert rig.finished[2].cached_tokens == 0


def test_a_non_finite_row_ends_its_request_and_its_prefix() -> None:
    rig = Rig()
    rig.add(0, PROMPT)
    rig.add(1, PROMPT[::-1])
    plan = rig.plan()
    rig.device.execute(rig.in_flight.popleft())
    batch = rig.scheduler.commit(plan, StepDone(plan.step_id, (0, 1), (False, True), (), (), "path"))
    assert [(f.request_id, f.reason, f.detail) for f in batch.finished] == [
        (0, FinishReason.ERROR, "non-finite logits")
    ]
    assert batch.request_ids == (1,)
    assert rig.running() == [1]
    assert rig.scheduler.kv.cache.groups[0].num_pages == 5  # of request 1 alone
    assert rig.scheduler.stats().pages[0].cached == 0  # which still runs


def test_a_cached_prefix_that_gives_non_finite_logits_is_matched_no_more() -> None:
    rig = Rig()
    rig.add(0, PROMPT)
    rig.run()
    rig.add(1, PROMPT)
    plan = rig.plan()
    assert plan.prefill[0].start == 20
    rig.device.execute(rig.in_flight.popleft())
    rig.scheduler.commit(plan, StepDone(plan.step_id, (0,), (False,), (), (), "path"))
    rig.add(2, PROMPT)
    assert rig.plan().prefill[0].start == 0


def test_a_result_that_does_not_belong_to_the_oldest_step_is_refused() -> None:
    rig = Rig()
    rig.add(0, PROMPT)
    first = rig.plan()
    second = rig.plan()
    done = StepDone(second.step_id, (1,), (True,), (), (), "path")
    with pytest.raises(ValueError, match=r"result 1 of step 1 committed; in flight are \[0, 1\]"):
        rig.scheduler.commit(second, done)
    with pytest.raises(ValueError, match="1 sampling rows, its result has 2 tokens and 1 finite flags"):
        rig.scheduler.commit(first, StepDone(first.step_id, (1, 2), (True,), (), (), "path"))
