"""What the scheduler promises, one promise at a time."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from surefoot.protocol.messages import FinishReason, PageStats
from surefoot.protocol.step_plan import PageRun
from surefoot.scheduler.waiting_queue import ADMISSION_WINDOW, MAX_OVERTAKES

from .fake_device import continuation
from .rig import Rig, bounds, make_request

PROMPT = tuple(range(1, 23))  # five pages of four tokens, and two tokens


# Rows of a step


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("chunk", [1, 7, 4, 64], ids=["one-token", "odd", "page", "whole"])
def test_prompts_in_chunks_of_any_size_give_the_same_tokens(chunk: int, lookahead: int) -> None:
    rig = Rig(bounds(chunked_prefill_size=chunk))
    requests = [make_request(i, PROMPT[i:], new=9) for i in range(3)]
    for request in requests:
        rig.submit(request)
    rig.run(lookahead)
    assert rig.tokens == {request.id: continuation(request) for request in requests}


def test_everyone_who_decodes_has_a_row_beside_a_prompt_in_chunks() -> None:
    rig = Rig(bounds(chunked_prefill_size=5))
    rig.add(0, (1,), new=20)
    rig.add(1, (2,), new=20)
    rig.step()
    rig.add(2, PROMPT)
    rig.add(3, PROMPT[::-1])
    plans = [rig.step() for _ in range(9)]
    assert all(plan.decode_slots[:2] == (0, 1) for plan in plans)
    assert [sum(len(row.token_ids) for row in plan.prefill) for plan in plans] == [5] * 8 + [4]
    # A running prompt is finished before the next one begins.
    assert [row.request_id for plan in plans for row in plan.prefill] == [2] * 5 + [3] * 5


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_last_token_is_never_computed(lookahead: int) -> None:
    rig = Rig()
    rig.add(0, PROMPT, new=3)
    rig.run(lookahead)
    assert rig.device.tokens_computed == len(PROMPT) + 2


def test_an_admission_says_what_the_device_needs_for_the_whole_stay() -> None:
    rig = Rig()
    request = replace(make_request(7, PROMPT), min_new_tokens=3, stop_ids=(5, 6))
    rig.submit(request)
    (admission,) = rig.step().admissions
    assert (admission.slot, admission.request_id) == (0, 7)
    assert admission.sampling == request.sampling
    assert admission.stop_ids == (5, 6)
    assert admission.min_tokens == len(PROMPT) + 3
    assert rig.step().admissions == ()


def test_a_stop_id_is_the_last_token() -> None:
    expected = continuation(make_request(0, PROMPT, new=9))
    rig = Rig()
    rig.submit(replace(make_request(0, PROMPT, new=9), stop_ids=(expected[2],)))
    rig.run(lookahead=1)
    assert rig.tokens[0] == expected[: expected.index(expected[2]) + 1]
    assert rig.finished[0].reason == FinishReason.STOP


# Prefixes


def test_a_match_leaves_one_token_to_compute() -> None:
    rig = Rig()
    rig.add(0, PROMPT[:8])
    rig.run()
    rig.add(1, PROMPT[:8])
    (row,) = rig.step().prefill
    rig.run()
    assert (row.start, row.token_ids) == (4, PROMPT[4:8])
    assert rig.finished[1].cached_tokens == 4
    assert rig.tokens[1] == rig.tokens[0]


def test_output_is_matched_too() -> None:
    rig = Rig()
    rig.add(0, PROMPT, new=7)
    rig.run()
    rig.add(1, (*PROMPT, *rig.tokens[0], 3))
    rig.run()
    assert rig.finished[1].cached_tokens == 28  # of 29: the last output token's KV was never computed


def test_a_prefix_is_shared_while_its_first_owner_is_still_prefilling() -> None:
    rig = Rig(bounds(chunked_prefill_size=8))
    rig.add(0, PROMPT)
    rig.step()
    rig.step()
    rig.add(1, (*PROMPT[:18], 28, 28, 28))
    rows = rig.step().prefill
    assert [(row.request_id, row.start) for row in rows] == [(0, 16), (1, 16)]


def test_what_is_in_flight_is_not_matched() -> None:
    rig = Rig()
    rig.add(0, PROMPT)
    rig.plan()
    rig.add(1, PROMPT)
    assert rig.plan().prefill[0].start == 0
    rig.commit()
    rig.commit()
    rig.run()
    assert rig.tokens[0] == rig.tokens[1]


def test_namespaces_share_nothing() -> None:
    rig = Rig()
    for i, namespace in enumerate(("a", "b", "a")):
        rig.add(i, PROMPT, cache_namespace=namespace)
        rig.run()
    assert [rig.finished[i].cached_tokens for i in range(3)] == [0, 0, 20]


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    rig = Rig(prefix_cache=False)
    for i in range(2):
        rig.add(i, PROMPT)
        rig.run()
    assert rig.finished[1].cached_tokens == 0
    assert rig.scheduler.stats().pages == (PageStats(total=64, free=64, cached=0),)


def test_stats_count_what_the_cache_saved() -> None:
    rig = Rig()
    for i in range(2):
        rig.add(i, PROMPT)
        rig.run()
    stats = rig.scheduler.stats()
    assert (stats.prefix_hit_tokens, stats.prefix_query_tokens) == (20, 44)
    assert stats.pages == (PageStats(total=64, free=58, cached=6),)


# Preemption


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_last_admitted_is_preempted_and_comes_back_first(lookahead: int) -> None:
    rig = Rig(bounds(num_pages=10))
    requests = [make_request(i, (i + 1,) * 5, new=25) for i in range(4)]
    for request in requests:
        rig.submit(request)
    order: list[int] = []
    while rig.scheduler.has_work or rig.in_flight:
        preempted = rig.scheduler.preemptions
        before = rig.running()
        plan = rig.plan()
        order += [admission.request_id for admission in plan.admissions]
        if rig.scheduler.preemptions > preempted:
            assert not plan.admissions
            gone = [request_id for request_id in before if request_id not in rig.running()]
            assert gone == before[-len(gone) :]
            assert rig.waiting()[: len(gone)] == gone
        if len(rig.in_flight) > (lookahead if plan.num_rows else 0):
            rig.commit()
    assert rig.scheduler.preemptions > 0
    assert order[:4] == [0, 1, 2, 3]
    assert len(order) == 4 + rig.scheduler.preemptions
    assert rig.tokens == {request.id: continuation(request) for request in requests}
    assert all(finished.cached_tokens == 0 for finished in rig.finished.values())


def test_the_token_in_flight_of_a_preempted_request_is_sent_once() -> None:
    rig = Rig(bounds(num_pages=6))
    requests = [make_request(0, (1,) * 11, new=13), make_request(1, (2,) * 10, new=13)]
    for request in requests:
        rig.submit(request)
    while not rig.scheduler.preemptions:
        rig.plan()
        if len(rig.in_flight) > 1 and not rig.scheduler.preemptions:
            rig.commit()
    assert rig.waiting() == [1]
    sent = len(rig.tokens[1])
    assert 1 in rig.commit().request_ids
    assert len(rig.tokens[1]) == sent + 1
    rig.run(lookahead=1)
    assert rig.tokens == {request.id: continuation(request) for request in requests}


def test_a_request_of_the_size_of_the_pool_runs_after_all_others() -> None:
    rig = Rig(bounds(num_pages=16))
    requests = [make_request(0, (1,) * 8), make_request(1, (2,) * 32, new=32), make_request(2, (3,) * 8)]
    for request in requests:
        rig.submit(request)
    rig.run(lookahead=1)
    assert rig.tokens == {request.id: continuation(request) for request in requests}


# Admission


def test_the_request_with_most_cached_pages_is_admitted_first() -> None:
    rig = Rig(bounds(max_running_requests=1))
    rig.add(0, PROMPT)
    rig.run()
    rig.add(1, (28,) * 9)
    rig.add(2, PROMPT[:9])
    rig.add(3, PROMPT)
    rig.add(4, PROMPT)
    order = admitted(rig)
    assert order == [3, 4, 2, 1]


def test_nobody_is_overtaken_for_ever() -> None:
    rig = Rig(bounds(max_running_requests=1, max_queued_requests=200))
    rig.add(0, PROMPT, new=1)
    rig.run()
    rig.add(1000, (28,) * 9, new=1)
    rig.add(1001, (27,) * 9, new=1)
    for i in range(1, 100):
        rig.add(i, PROMPT, new=1)
    order = admitted(rig)
    assert order.index(1000) == MAX_OVERTAKES
    assert order.index(1001) == MAX_OVERTAKES + 1
    assert [i for i in order if i < 1000] == list(range(1, 100))


def test_only_the_window_is_looked_at() -> None:
    rig = Rig(bounds(max_running_requests=1, max_queued_requests=200))
    rig.add(0, PROMPT, new=1)
    rig.run()
    for i in range(1, ADMISSION_WINDOW + 1):
        rig.add(i, (28, i % 29, i // 29), new=1)
    rig.add(1000, PROMPT, new=1)
    assert admitted(rig)[:3] == [1, 1000, 2]


def test_a_big_request_is_not_bypassed_by_small_ones() -> None:
    rig = Rig(bounds(num_pages=12))
    rig.add(0, (1,) * 20, new=20)
    rig.step()
    rig.add(1, (2,) * 40)
    rig.add(2, (3,))
    rig.step()
    assert rig.running() == [0]
    assert admitted(rig) == [1, 2]


def test_an_admission_holds_the_pages_of_its_whole_prompt() -> None:
    rig = Rig(bounds(chunked_prefill_size=4))
    rig.add(0, PROMPT)
    (row,) = rig.step().prefill
    assert row.pages == (PageRun(group=0, column=0, pages=(0, 1, 2, 3, 4, 5)),)
    (row,) = rig.step().prefill
    assert row.pages == ()


def admitted(rig: Rig) -> list[int]:
    """Runs to the end; the ids in order of admission."""
    order: list[int] = []
    while rig.scheduler.has_work:
        order += [admission.request_id for admission in rig.step().admissions]
    return order
