"""Sends sessions to one server: by clients that wait for their answers (closed loop), or at times that do not depend on
them (open loop)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Iterator

from surefoot.bench.client import Messages, Target, ask
from surefoot.bench.results import RequestRecord
from surefoot.bench.workloads import Content, Session, WorkloadError

Ended = Callable[[RequestRecord], None]  # told of every request that has ended


async def closed_loop(target: Target, sessions: Iterable[Session], clients: int, began: float, ended: Ended) -> None:
    """Each client begins its next session when its last one has ended. began: of the run, by time.perf_counter."""
    left = iter(sessions)

    async def client() -> None:
        for session in left:
            await _run_session(target, session, began, ended)

    await asyncio.gather(*(client() for _ in range(clients)))


async def open_loop(target: Target, sessions: Iterable[Session], began: float, ended: Ended) -> None:
    """Each session begins when it arrives, however many there are."""
    async with asyncio.TaskGroup() as tasks:
        for session in sessions:
            await asyncio.sleep(max(0.0, session.arrives - (time.perf_counter() - began)))
            tasks.create_task(_run_session(target, session, began, ended))


def arriving(sessions: Iterable[Session], rate: float, burstiness: float, rng: random.Random) -> Iterator[Session]:
    """Gives sessions arrival times: on average `rate` a second, with gaps of a gamma distribution. `burstiness` is its
    shape: 1 is a Poisson process, below 1 they come in bursts, above 1 more evenly."""
    at = 0.0
    for session in sessions:
        yield Session(session.turns, at)
        at += rng.gammavariate(burstiness, 1 / (rate * burstiness))


async def _run_session(target: Target, session: Session, began: float, ended: Ended) -> None:
    said: Messages = []
    for turn in session.turns:
        prompt = _prompt(target, said, turn.content) if len(session.turns) > 1 else turn.content
        record, text = await ask(target, prompt, turn.output_tokens, began)
        ended(record)
        if record.error:  # what follows would be another conversation
            return
        said += [{"role": "user", "content": str(turn.content)}, {"role": "assistant", "content": text}]


def _prompt(target: Target, said: Messages, content: Content) -> Content | Messages:
    if not isinstance(content, str):
        raise WorkloadError("conversations are made of words, not of token ids: give --prompt-kind words")
    if target.chat:
        return [*said, {"role": "user", "content": content}]
    return "\n".join([*(message["content"] for message in said), content])
