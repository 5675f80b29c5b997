"""Who is admitted when: priorities, siblings, penalties. And who is preempted."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from surefoot.protocol.messages import GREEDY, Accepted, RefusalCause, Refused
from surefoot.protocol.step_plan import NO_COUNT_ROW
from surefoot.scheduler.request import MAX_LOGPROBS

from .fake_device import continuation
from .rig import PENALISED, Rig, bounds, make_request

PROMPT = tuple(range(1, 23))  # five pages of four tokens, and two tokens


def admitted(rig: Rig) -> list[int]:
    """Runs to the end; the ids in order of admission."""
    order: list[int] = []
    while rig.scheduler.has_work:
        order += [admission.request_id for admission in rig.step().admissions]
    return order


# Priorities


def test_smaller_priorities_are_admitted_first_and_equal_ones_in_order_of_arrival() -> None:
    rig = Rig(bounds(max_running_requests=1))
    for i, priority in enumerate((0, 5, -1, 5, 0, -(2**40))):
        rig.add(i, (i + 1,) * 9, priority=priority)
    assert admitted(rig) == [5, 2, 0, 4, 1, 3]


def test_cached_pages_decide_within_one_priority_alone() -> None:
    rig = Rig(bounds(max_running_requests=1))
    rig.add(0, PROMPT)
    rig.run()
    rig.add(1, (28,) * 9, priority=1)
    rig.add(2, PROMPT, priority=1)
    rig.add(3, (27,) * 9)
    assert admitted(rig) == [3, 2, 1]


def test_nobody_is_preempted_because_someone_more_urgent_waits() -> None:
    rig = Rig(bounds(max_running_requests=1))
    rig.add(0, PROMPT, priority=9)
    rig.step()
    rig.add(1, PROMPT[::-1], priority=-9)
    assert admitted(rig) == [1]
    assert rig.scheduler.preemptions == 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_least_urgent_is_preempted_although_it_came_first(lookahead: int) -> None:
    rig = Rig(bounds(num_pages=10))
    requests = [make_request(i, (i + 1,) * 5, new=25, priority=priority) for i, priority in enumerate((2, 0, 1))]
    rig.submit(requests[0])
    rig.step()
    for request in requests[1:]:
        rig.submit(request)
    rig.step()
    assert rig.running() == [1, 2, 0]
    victims: list[int] = []
    while rig.scheduler.has_work or rig.in_flight:
        before = rig.running()
        plan = rig.plan()
        victims += [i for i in before if i in rig.waiting()]
        if len(rig.in_flight) > (lookahead if plan.num_rows else 0):
            rig.commit()
    assert victims[0] == 0
    assert 1 not in victims
    assert rig.tokens == {request.id: continuation(request) for request in requests}


def test_a_preempted_request_goes_before_more_urgent_new_ones() -> None:
    rig = Rig(bounds(num_pages=8, max_running_requests=2))
    rig.add(0, (1,) * 12, new=20)
    rig.add(1, (2,) * 12, new=20, priority=1)
    while not rig.scheduler.preemptions:
        rig.step()
    rig.add(2, (3,), priority=-1)
    assert admitted(rig) == [1, 2]


def test_urgent_prompts_are_computed_first() -> None:
    rig = Rig(bounds(chunked_prefill_size=8))
    rig.add(0, (1,) * 20, priority=1)
    rig.step()
    rig.step()
    rig.add(1, (2,) * 20)
    first = rig.step()  # the rest of request 0, four tokens, and the beginning of request 1
    assert [(row.request_id, len(row.token_ids)) for row in first.prefill] == [(0, 4), (1, 4)]
    rig.add(2, (3,) * 20, priority=-1)
    assert [row.request_id for row in rig.step().prefill] == [1]
    assert rig.running() == [1, 0]


# Siblings


def sibling(request_id: int, **changes: Any) -> Any:
    return make_request(request_id, PROMPT, group_id=0, **changes)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_siblings_wait_for_the_prompt_of_the_first_and_share_it(lookahead: int) -> None:
    rig = Rig(bounds(chunked_prefill_size=16))
    for i in range(3):
        rig.submit(sibling(i, sampling=replace(GREEDY, seed=i)))
    rig.add(7, PROMPT[::-1])
    first, second = rig.step(), rig.step()
    assert [row.request_id for row in first.prefill + second.prefill] == [0, 0, 7]
    third = rig.step()
    assert [(row.request_id, row.start) for row in third.prefill] == [(7, 10), (1, 20), (2, 20)]
    rig.run(lookahead)
    assert rig.finished[2].cached_tokens == 20


def test_siblings_are_admitted_once_the_prompt_is_committed() -> None:
    rig = Rig()
    rig.submit(sibling(0))
    rig.submit(sibling(1))
    rig.plan()
    assert [row.request_id for row in rig.plan().prefill] == []
    rig.commit()
    assert [row.request_id for row in rig.plan().prefill] == [1]


@pytest.mark.parametrize(
    "prefix_cache, aborts, scores", [(False, False, False), (True, True, False), (True, False, True)]
)
def test_siblings_do_not_wait_for_nothing(prefix_cache: bool, aborts: bool, scores: bool) -> None:
    """Without a prefix cache; for a request that has ended; when they must compute the prompt anyway."""
    rig = Rig(bounds(chunked_prefill_size=30), prefix_cache)
    rig.submit(sibling(0))
    if aborts:
        rig.abort(0)
    rig.submit(sibling(1, prompt_logprobs=0 if scores else -1))
    assert [row.request_id for row in rig.step().prefill] == ([1] if aborts else [0, 1])


def test_siblings_of_a_request_that_follows_another_do_not_wait_for_it() -> None:
    rig = Rig()
    rig.add(0, PROMPT, group_id=1)
    rig.add(1, PROMPT, group_id=0)
    assert [row.request_id for row in rig.step().prefill] == [0, 1]


def test_siblings_wait_for_a_first_one_that_was_preempted() -> None:
    rig = Rig(bounds(num_pages=6, chunked_prefill_size=4, max_running_requests=2))
    rig.add(9, (9,) * 4, new=13, priority=-1)
    rig.step()
    rig.submit(replace(sibling(0), prompt_ids=PROMPT[:16]))
    rig.submit(replace(sibling(1), prompt_ids=PROMPT[:16]))
    while not rig.scheduler.preemptions:
        rig.step()
    assert rig.waiting() == [0, 1]
    assert admitted(rig)[:2] == [0, 1]
    assert rig.finished[1].cached_tokens == 12


# Penalties


def test_a_penalised_request_has_a_count_row_and_others_have_none() -> None:
    rig = Rig()
    rig.add(0, PROMPT, sampling=PENALISED)
    rig.add(1, PROMPT[::-1])
    penalised, plain = rig.step().admissions
    assert (penalised.count_row, penalised.history, penalised.prompt_length) == (0, PROMPT, len(PROMPT))
    assert (plain.count_row, plain.history) == (NO_COUNT_ROW, ())


def test_without_a_free_count_row_a_penalised_request_waits_and_others_pass() -> None:
    rig = Rig(bounds(count_rows=1))
    rig.add(0, PROMPT, new=3, sampling=PENALISED)
    rig.add(1, PROMPT, sampling=PENALISED, priority=-1)
    rig.add(2, PROMPT)
    rig.add(3, PROMPT)
    assert [row.request_id for row in rig.step().prefill] == [1, 2, 3]
    assert rig.waiting() == [0]
    rig.abort(1)
    assert [admission.count_row for admission in rig.step().admissions] == [0]
    rig.run()
    assert len(rig.scheduler.free_count_rows) == 1


def test_a_resumed_request_has_the_history_of_its_output_too() -> None:
    rig = Rig(bounds(num_pages=8, max_running_requests=2))
    rig.add(0, (1,) * 12, new=20)
    rig.add(1, (2,) * 12, new=20, sampling=PENALISED)
    while not rig.scheduler.preemptions:
        rig.step()
    assert len(rig.scheduler.free_count_rows) == 2
    known = (*(2,) * 12, *rig.tokens[1])
    while rig.waiting():
        admissions = rig.step().admissions
    assert admissions[0].history == known
    assert admissions[0].prompt_length == 12


def test_an_engine_without_count_rows_refuses_penalties() -> None:
    rig = Rig(bounds(count_rows=0))
    refused = rig.add(0, PROMPT, sampling=PENALISED)
    assert isinstance(refused, Refused)
    assert refused.cause == RefusalCause.INVALID
    assert "ask without penalties" in refused.detail


# Integers that would break the engine


@pytest.mark.parametrize(
    "changes, detail",
    [
        ({"logprobs": MAX_LOGPROBS + 1}, "logprobs holds 1025, which is outside -1..1024"),
        ({"logprobs": -2}, "logprobs holds -2"),
        ({"prompt_logprobs": 2**40}, "prompt_logprobs holds 1099511627776"),
        ({"priority": 2**63}, "priority holds 9223372036854775808"),
        ({"priority": -(2**63)}, "priority holds -9223372036854775808"),
        ({"group_id": -1}, "group_id holds -1"),
        ({"id": 2**64}, "id holds 18446744073709551616"),
        ({"stop_ids": (3, -3)}, "stop_ids holds -3"),
        ({"sampling": replace(GREEDY, top_k=2**31)}, "top_k holds 2147483648"),
        ({"sampling": replace(GREEDY, seed=-1)}, "seed holds -1"),
        ({"sampling": replace(GREEDY, logit_bias=((5, 1.0), (2**31, 1.0)))}, "logit_bias holds 2147483648"),
    ],
    ids=str,
)
def test_integers_out_of_range_are_refused(changes: dict[str, Any], detail: str) -> None:
    rig = Rig()
    refused = rig.submit(replace(make_request(1, PROMPT), **changes))
    assert isinstance(refused, Refused)
    assert refused.cause == RefusalCause.INVALID
    assert detail in refused.detail


def test_integers_at_their_limits_are_served() -> None:
    rig = Rig()
    sampling = replace(GREEDY, top_k=2**31 - 1, seed=2**63 - 1, logit_bias=((2**31 - 1, -100.0),))
    limits: dict[str, Any] = {"logprobs": MAX_LOGPROBS, "priority": -(2**63 - 1), "stop_ids": (2**31 - 1,)}
    request = make_request(2**63 - 1, PROMPT, sampling=sampling, **limits)
    assert rig.submit(request) == Accepted(request.id)
    rig.run()
    assert rig.tokens[request.id] == continuation(request)
