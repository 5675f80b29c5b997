"""Random scenarios: bounds, requests, and what befalls them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from msgspec.structs import replace

from surefoot.config.bounds import Bounds, KVGroup, held_pages
from surefoot.protocol.messages import GREEDY, NO_LOGPROBS, GenerateRequest

from .fake_device import VOCAB, Faults
from .rig import PENALISED


@dataclass(frozen=True)
class Scenario:
    bounds: Bounds
    prefix_cache: bool
    lookahead: int
    requests: tuple[GenerateRequest, ...]
    arrival: float  # how probable it is that another request comes before a step
    abort: float  # that a live one is aborted before a step
    reuse_ids: bool
    faults: Faults


def make_scenario(random: Random) -> Scenario:
    bounds = make_bounds(random) if random.random() < 0.8 else make_crowded_bounds(random)
    max_model_len = bounds.max_model_len
    stems = [random.choices(range(VOCAB), k=random.randint(1, max_model_len - 2)) for _ in range(3)]
    traits = Traits(
        stems=stems,
        namespaces=random.choice((("",), ("", "a"), ("a", "b", ""))),
        priorities=random.choice(((0,), (0,), (0, 1), (-3, 0, 7))),
        penalties=random.choice((0, 0.2, 0.6)) if bounds.count_rows else 0.02,
        scoring=random.choice((0, 0.2, 0.6)),
        siblings=random.choice((0, 0.3)),
    )
    calm = random.random() < 0.5
    return Scenario(
        bounds=bounds,
        prefix_cache=random.random() < 0.8,
        lookahead=random.randint(0, 1),
        requests=make_requests(random, traits, bounds),
        arrival=random.choice((0.1, 0.8, 0.95)),
        abort=random.choice((0, 0.02, 0.15)),
        reuse_ids=random.random() < 0.3,
        faults=Faults() if calm else Faults(random.choice((0, 0.02, 0.1)), random.choice((0, 0.01, 0.05))),
    )


def make_bounds(random: Random) -> Bounds:
    page_size = random.randint(1, 8)
    max_model_len = random.randint(8, 48)
    chunk = random.choice((1, 2, 3, 7, 16, 64))
    windows = random.choice(((0,), (0,), (0, 1), (1, 0), (1,), (1, 1), (0, 1, 1), (0, 0)))
    groups = []
    for is_windowed in windows:
        window = random.choice((1, 2, page_size, page_size + 1, 2 * page_size, random.randint(1, 60))) * is_windowed
        most = held_pages(max_model_len - 1, window, page_size, chunk)
        num_pages = most + random.choice((0, 0, 1, 3, 8, 40))
        if random.random() < 0.1:  # the longest request does not fit
            num_pages = max(1, most - random.randint(1, 3))
        groups.append(KVGroup(window, num_pages))
    max_running = random.randint(1, 7)
    return Bounds(
        page_size=page_size,
        kv_groups=tuple(groups),
        max_model_len=max_model_len,
        max_running_requests=max_running,
        max_queued_requests=random.choice((0, 1, 4, 100)),
        chunked_prefill_size=chunk,
        count_rows=random.choice((0, 1, 2, max_running)),
        logits_rows=max_running,
    )


def make_crowded_bounds(random: Random) -> Bounds:
    """Long prompts in many chunks, whose windows slide over pages that others share, in a pool that holds few."""
    page_size, chunk, window = random.choice((1, 2, 4)), random.choice((2, 4, 8)), random.choice((8, 12, 16))
    most = held_pages(47, window, page_size, chunk)
    windowed = KVGroup(window, most + random.choice((2, 4, 6)))
    return Bounds(
        page_size=page_size,
        kv_groups=(KVGroup(0, 100), windowed) if random.random() < 0.3 else (windowed,),
        max_model_len=48,
        max_running_requests=4,
        max_queued_requests=100,
        chunked_prefill_size=chunk,
        count_rows=4,
        logits_rows=4,
    )


@dataclass(frozen=True)
class Traits:
    """What the requests of a scenario are like."""

    stems: Sequence[Sequence[int]]  # prompts begin with a part of one of these
    namespaces: Sequence[str]
    priorities: Sequence[int]
    penalties: float  # how probable each is, from 0 to 1
    scoring: float
    siblings: float


def make_requests(random: Random, traits: Traits, bounds: Bounds) -> tuple[GenerateRequest, ...]:
    requests: list[GenerateRequest] = []
    for i in range(random.randint(4, 20)):
        request = make_request(random, i, traits, bounds)
        if requests and random.random() < traits.siblings:
            first = requests[-1]
            sampling = replace(first.sampling, seed=random.randint(0, 3))
            request = replace(first, id=i, sampling=sampling)
            if random.random() < 0.1:  # a circle
                request = replace(request, group_id=first.id)
                requests[-1] = replace(first, group_id=i)
        requests.append(request)
    if random.random() < 0.1:  # siblings may come before the first of them, too
        random.shuffle(requests)
    return tuple(requests)


def make_request(random: Random, request_id: int, traits: Traits, bounds: Bounds) -> GenerateRequest:
    """Now and then one that must be refused."""
    stem = random.choice(traits.stems)
    tail = random.choices(range(VOCAB), k=random.randint(0, random.choice((5, 5, 40))))
    prompt = (*stem[: random.randint(1, len(stem))], *tail)[: bounds.max_model_len - 1]
    max_new = random.randint(1, bounds.max_model_len - len(prompt))
    if random.random() < 0.05:
        prompt, max_new = random.choice((((), 1), (prompt, 0), (prompt, bounds.max_model_len), ((-1,), 1)))
    sampling = PENALISED if random.random() < traits.penalties else GREEDY
    return GenerateRequest(
        id=request_id,
        group_id=request_id,
        prompt_ids=prompt,
        max_new_tokens=max_new,
        min_new_tokens=random.randint(0, max_new) if random.random() < 0.3 else 0,
        stop_ids=tuple(random.sample(range(VOCAB), k=random.choice((0, 0, 1, 3)))),
        sampling=replace(sampling, seed=random.randint(0, 3)),
        logprobs=random.choice((NO_LOGPROBS, NO_LOGPROBS, 0, 2)),
        prompt_logprobs=random.choice((0, 1)) if random.random() < traits.scoring else NO_LOGPROBS,
        cache_namespace=random.choice(traits.namespaces),
        priority=random.choice(traits.priorities),
    )
