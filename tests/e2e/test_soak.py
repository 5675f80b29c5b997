"""64 clients with random lengths, stop strings and disconnects: every request ends once, every page comes back."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter

import httpx
import pytest

from tests.e2e.server import Server

CLIENTS = 64


async def client_life(client: httpx.AsyncClient, server: Server, number: int, rounds: int, ends: Counter[str]) -> None:
    rng = random.Random(number)
    for _ in range(rounds):
        prompt = list(range(20, 20 + rng.choice([8, 24, 40]))) + [
            rng.randrange(10, 300) for _ in range(rng.randrange(1, 40))
        ]
        body = {
            "model": server.model_name,
            "prompt": prompt,
            "max_tokens": rng.randrange(1, 128 - len(prompt)),
            "temperature": rng.choice([0, 0.8, 1.5]),
            "stop": rng.sample(["a", "e", "x", "1", "2", "th"], rng.randrange(0, 5)) or None,
            "stream": True,
        }
        leaves_after = rng.choice([0, 1, 3, 10**6, 10**6, 10**6])
        try:
            await one_stream(client, body, leaves_after, ends)
        except httpx.ReadTimeout:
            ends["timeout"] += 1


async def one_stream(client: httpx.AsyncClient, body: dict[str, object], leaves_after: int, ends: Counter[str]) -> None:
    reasons: list[str] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            ends[f"status {response.status_code}"] += 1
            return
        events = 0
        done = 0
        async for line in response.aiter_lines():
            if events >= leaves_after:
                ends["left"] += 1
                return
            if line == "data: [DONE]":
                done += 1
            elif line.startswith("data: "):
                events += 1
                reason = json.loads(line[6:])["choices"][0]["finish_reason"]
                reasons += [reason] if reason else []
    assert len(reasons) == 1, reasons
    assert done == 1
    ends[reasons[0]] += 1


def soak(server: Server, rounds: int) -> Counter[str]:
    async def run() -> Counter[str]:
        ends: Counter[str] = Counter()
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            await asyncio.gather(*(client_life(client, server, number, rounds, ends) for number in range(CLIENTS)))
        return ends

    return asyncio.run(run())


def check_ledger(server: Server) -> None:
    """When nothing runs, every page is free or in the prefix tree. An abort may still be on its way: wait a little."""
    deadline = time.monotonic() + 10
    while True:
        metrics = server.metrics()
        idle = metrics["surefoot_requests_running"] == metrics["surefoot_requests_waiting"] == 0
        if idle or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert idle, "requests are left in the engine"
    free, cached = metrics["surefoot_kv_pages_free"], metrics["surefoot_kv_pages_cached"]
    assert free + cached == metrics["surefoot_kv_pages"]


def test_every_request_ends_once_and_the_pages_add_up(tight_server: Server) -> None:
    ends = soak(tight_server, rounds=3)
    assert ends.total() == 3 * CLIENTS
    assert ends["left"] > 20
    assert ends["stop"] > 20
    assert ends["length"] > 20
    assert set(ends) <= {"left", "stop", "length"}, ends
    check_ledger(tight_server)
    assert tight_server.metrics()["surefoot_preemptions_total"] > 0


@pytest.mark.slow
def test_a_long_soak(tight_server: Server) -> None:
    ends = soak(tight_server, rounds=60)
    assert ends.total() == 60 * CLIENTS
    assert set(ends) <= {"left", "stop", "length"}, ends
    check_ledger(tight_server)
