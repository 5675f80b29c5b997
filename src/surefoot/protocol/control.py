"""Between the supervisor and its children: JSON lines. Down through a child's stdin, up through its stdout.

The supervisor starts a child with one `Start...` line, then tells it by `Connect` which channels to its peer are good.
Another peer, started after the death of the former one, has other channels: `Connect` comes again. End of file on
stdin means that the supervisor is gone: the child exits at once.

A plan travels as the JSON of a `config.ServerPlan` or `config.EnginePlan`, since protocol and config are siblings:
`msgspec.Raw(msgspec.json.encode(plan))` there, `msgspec.json.decode(start.plan, type=EnginePlan)` back.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

MAX_LINE_BYTES = 16 * 1024 * 1024  # of either direction


class StartFrontend(Struct, frozen=True, tag=True):
    plan: msgspec.Raw  # a ServerPlan
    listener: int  # descriptor of the bound socket, inherited: it outlives a frontend, so nobody is refused meanwhile
    first_request_id: int  # no request of an earlier frontend has it, or a greater one


class StartEngine(Struct, frozen=True, tag=True):
    plan: msgspec.Raw  # an EnginePlan
    ring: str  # file of the flight recorder
    log_level: str
    log_format: str


class Connect(Struct, frozen=True, tag=True):
    """The channels between the engine and the frontend that are alive now. Nobody has used them before."""

    command_address: str  # ZeroMQ address that the engine binds
    event_address: str  # ZeroMQ address that the frontend binds


class EngineDied(Struct, frozen=True, tag=True):
    detail: str  # one line, for clients and for the log
    restarting: bool  # whether another engine is being started; its EngineReady makes the frontend ready again
    retry_seconds: int  # how long that will take, as far as is known


class Drain(Struct, frozen=True, tag=True):
    """Refuse new requests, let running ones end within so many seconds, then exit with 0. May come again: the shorter
    time counts."""

    seconds: float


class FrontendListening(Struct, frozen=True, tag=True):
    """HTTP is answered from now on; requests are refused until the engine is ready."""


class FrontendReady(Struct, frozen=True, tag=True):
    """The engine has said that it is ready: requests are served."""


class EngineLoaded(Struct, frozen=True, tag=True):
    """The weights are there. From now on a beat must come every few seconds."""


class EngineBeat(Struct, frozen=True, tag=True):
    """The loop goes round: a step has ended since the last beat, or nothing is to be done."""


class Failed(Struct, frozen=True, tag=True):
    """The last words of a child. The supervisor writes them, so that the log names a cause once, and first."""

    detail: str  # the cause, in one sentence or line
    trace: str  # where it was raised; empty if the detail says it all


FrontendCommand = StartFrontend | Connect | EngineDied | Drain
EngineCommand = StartEngine | Connect
FrontendReport = FrontendListening | FrontendReady | Failed
EngineReport = EngineLoaded | EngineBeat | Failed


def encode_line(message: Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"
