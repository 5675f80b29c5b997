"""Random traffic on a server whose engine is killed now and then; and what must be true of it.

Each client asks one thing after the other: chat or completion, streamed or whole, of any length, with any sampling,
valid or not, read to its end or left. Each request must end exactly once: with a result, or with an error that says
why.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.faulty import FaultyServer

CLIENTS = 64
FRONTEND = "surefoot.http.process"
MIN_SIZES = 20
RESULTS = {"stop", "length"}
REFUSALS = {"refused 400", "refused 404"}
DEATHS = {"error event", "status 500", "status 503"}  # what clients of a dying engine may get
WRONG: list[dict[str, Any]] = [
    {"temperature": -1},
    {"max_tokens": 0},
    {"top_p": 7},
    {"no_such_parameter": 1},
    {"model": "another"},
    {"stop": ["x"] * 100},
    {"max_tokens": 10**9},
]


@dataclass
class Memory:
    """Resident set sizes of one process, in MiB, one a second while the server is ready."""

    role: str
    sizes: list[float] = field(default_factory=list)

    def growth(self) -> float:
        """MiB between a third of its life and its end; 0 for one that lived too short to tell."""
        return self.sizes[-1] - self.sizes[len(self.sizes) // 3] if len(self.sizes) >= MIN_SIZES else 0.0


@dataclass
class Soak:
    server: FaultyServer
    seconds: float
    kill_every: float  # seconds
    ends: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    memory: dict[int, Memory] = field(default_factory=dict)  # by process id

    async def run(self) -> None:
        self._until = time.monotonic() + self.seconds
        limits = httpx.Limits(max_connections=CLIENTS + 2)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=60, limits=limits) as client:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._measure(client))
                group.create_task(self._kill_engines(client))
                for number in range(CLIENTS):
                    group.create_task(self._live(client, random.Random(number)))
            await self._ready(client)

    def summary(self) -> str:
        peak = {role: max(max(m.sizes) for m in self.memory.values() if m.role == role) for role in self._roles()}
        growth = {role: max(m.growth() for m in self.memory.values() if m.role == role) for role in self._roles()}
        sizes = ", ".join(f"{role} {peak[role]:.0f} ({growth[role]:+.1f})" for role in peak)
        ends = ", ".join(f"{count} {end}" for end, count in self.ends.most_common())
        return (
            f"soak: {self.ends.total()} requests of {CLIENTS} clients in {self.seconds:g} s; "
            f"{self.kills} engines killed; ends: {ends}; peak memory in MiB (growth since a third of its life): {sizes}"
        )

    def _roles(self) -> list[str]:
        return list(dict.fromkeys(memory.role for memory in self.memory.values()))

    async def _measure(self, client: httpx.AsyncClient) -> None:
        lasting = {"supervisor": self.server.process.pid, "frontend": self.server.child(FRONTEND)}
        while time.monotonic() < self._until:
            await self._ready(client)
            with suppress(AssertionError, OSError):  # the engine has just been killed
                for role, pid in (lasting | {"engine": self.server.engine()}).items():
                    self.memory.setdefault(pid, Memory(role)).sizes.append(resident_mib(pid))
            await asyncio.sleep(1)

    async def _kill_engines(self, client: httpx.AsyncClient) -> None:
        while time.monotonic() + self.kill_every < self._until:
            await asyncio.sleep(self.kill_every)
            await self._ready(client)
            os.kill(self.server.engine(), signal.SIGKILL)
            self.kills += 1

    async def _ready(self, client: httpx.AsyncClient) -> None:
        async with asyncio.timeout(60):
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.1)

    async def _live(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        while time.monotonic() < self._until:
            path, body = a_request(rng, self.server.model_name)
            try:
                if body.get("stream"):
                    end = await streamed(client, path, body, leaves_after=rng.choice([0, 1, 5, *[10**6] * 6]))
                else:
                    async with asyncio.timeout(rng.choice([0.02, *[60] * 6])):
                        end = await whole(client, path, body)
            except TimeoutError:
                end = "left"
            self.ends[end] += 1
            if end == "status 503":
                await asyncio.sleep(rng.random() / 2)


def a_request(rng: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": rng.randrange(1, 60),
        "temperature": rng.choice([0, 0.8, 1.5]),
        "top_k": rng.choice([0, 5]),
        "top_p": rng.choice([1, 0.8]),
        "stop": rng.sample(["a", "e", "x", "1", "2", "th"], rng.randrange(0, 4)) or None,
        "stream": rng.random() < 0.6,
    }
    if rng.random() < 0.3:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "fox " * rng.randrange(1, 8)}]
    else:
        path = "/v1/completions"
        stem = list(range(20, 20 + rng.choice([8, 24, 40])))
        body["prompt"] = stem + [rng.randrange(10, 280) for _ in range(rng.randrange(1, 24))]
    if rng.random() < 0.1:
        body |= rng.choice(WRONG)
    return path, body


async def whole(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
    """How it ended."""
    answer = await client.post(path, json=body)
    return how_answered(answer) if answer.status_code != 200 else str(answer.json()["choices"][0]["finish_reason"])


async def streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any], leaves_after: int) -> str:
    """How it ended. AssertionError if it ended not at all, or twice."""
    events: list[Any] = []
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            await response.aread()
            return how_answered(response)
        async for line in response.aiter_lines():
            if len(events) >= leaves_after:
                return "left"
            if line.startswith("data: "):
                events.append("[DONE]" if line == "data: [DONE]" else json.loads(line[6:]))
    chunks = [event for event in events if event != "[DONE]"]
    errors = [chunk for chunk in chunks if "error" in chunk]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    if errors:
        assert len(errors) == 1, events
        assert errors[0] == events[-1], events
        assert not reasons, events
        assert "died" in errors[0]["error"]["message"], errors
        return "error event"
    assert len(reasons) == 1, events
    assert events[-1] == "[DONE]", events
    assert events.count("[DONE]") == 1, events
    return str(reasons[0])


def how_answered(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert error["message"], answer.text
    if answer.status_code in (400, 404):
        return f"refused {answer.status_code}"
    if answer.status_code == 503:
        assert int(answer.headers["retry-after"]) >= 1
    else:
        assert "died" in error["message"], answer.text
    return f"status {answer.status_code}"


def resident_mib(pid: int) -> float:
    pages = int((Path("/proc") / str(pid) / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files(pid: int) -> int:
    return len(list((Path("/proc") / str(pid) / "fd").iterdir()))
