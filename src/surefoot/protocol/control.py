"""Between the supervisor and its children: JSON lines. Down through a child's stdin, up through its stdout.

The supervisor starts a child with one `Start...` line. End of file on stdin means that the supervisor is gone: the
child exits at once. Children ignore SIGINT and SIGTERM, so that Ctrl-C in a terminal reaches them as `Drain`.

A plan travels as the JSON of a `config.ServerPlan` or `config.EnginePlan`, since protocol and config are siblings:
`msgspec.Raw(msgspec.json.encode(plan))` there, `msgspec.json.decode(start.plan, type=EnginePlan)` back.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct


class StartFrontend(Struct, frozen=True, tag=True):
    plan: msgspec.Raw  # a ServerPlan
    command_address: str  # ZeroMQ address that the engine binds
    event_address: str  # ZeroMQ address that the frontend binds


class StartEngine(Struct, frozen=True, tag=True):
    plan: msgspec.Raw  # an EnginePlan
    command_address: str
    event_address: str
    record_dir: str  # folder of the flight recorder
    log_level: str


class EngineDied(Struct, frozen=True, tag=True):
    detail: str  # one line, for clients and for the log
    restarting: bool  # whether another engine is being started; its EngineReady makes the frontend ready again


class Drain(Struct, frozen=True, tag=True):
    """Refuse new requests, let running ones end within the plan's `drain_seconds`, then exit with 0."""


class FrontendListening(Struct, frozen=True, tag=True):
    """HTTP is answered from now on; requests are refused until the engine is ready."""

    host: str
    port: int  # the one bound, also where the plan says 0


class FrontendReady(Struct, frozen=True, tag=True):
    """The engine has said that it is ready: requests are served."""

    load_seconds: float


FrontendCommand = StartFrontend | EngineDied | Drain
FrontendReport = FrontendListening | FrontendReady


def encode_line(message: Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"
