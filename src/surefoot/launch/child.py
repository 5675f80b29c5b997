"""One child process of the supervisor, and the pipes to it (protocol/control.py)."""

from __future__ import annotations

import signal
import sys
from asyncio import timeout
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from surefoot.launch.limits import memory_limit
from surefoot.protocol.control import MAX_LINE_BYTES, encode_line

GRACE_SECONDS = 2.0  # for a child to end when its stdin has
OOM_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")  # cgroup v2, v1


class Child:
    def __init__(self, process: Process) -> None:
        self._process = process
        self._oom_kills = oom_kills()

    @classmethod
    async def start(cls, module: str, inherited: Sequence[int] = ()) -> Self:
        """Runs a module, in a session of its own: Ctrl-C in a terminal reaches the supervisor alone.

        With -P, since the current folder may be a downloaded model, and its Python files are nobody's modules.

        inherited: file descriptors that it gets, with the same numbers.
        """
        return cls(
            await create_subprocess_exec(
                *(sys.executable, "-P", "-m", module),
                stdin=PIPE,
                stdout=PIPE,
                start_new_session=True,
                pass_fds=inherited,
                limit=MAX_LINE_BYTES,
            )
        )

    def tell(self, message: msgspec.Struct) -> None:
        """If the child has just died, nobody hears it."""
        assert self._process.stdin is not None
        self._process.stdin.write(encode_line(message))

    async def reports(self, report_type: Any) -> AsyncIterator[Any]:
        """What it says, until it has died. report_type: a union of messages."""
        assert self._process.stdout is not None
        decoder = msgspec.json.Decoder(report_type)
        async for line in self._process.stdout:
            if line.endswith(b"\n"):  # else it was killed while it wrote
                yield decoder.decode(line)

    async def wait(self) -> int:
        """Its exit code, or minus the signal that killed it."""
        return await self._process.wait()

    def how_it_ended(self, returncode: int) -> str:
        return how_it_ended(returncode, oom_killed=oom_kills() > self._oom_kills) + memory_limit()

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it has just died
            self._process.kill()

    async def end(self) -> None:
        """Closes its stdin, which ends it; kills it if it does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with timeout(GRACE_SECONDS):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()


def exit_code(returncode: int) -> int:
    """As a shell has it: a signal becomes 128 and its number."""
    return 128 - returncode if returncode < 0 else returncode


def how_it_ended(returncode: int, oom_killed: bool) -> str:
    """A predicate. oom_killed: whether the kernel has killed a process of this container for want of memory since."""
    if returncode == -signal.SIGKILL and oom_killed:
        return "was killed by the kernel, because memory ran out"
    if returncode < 0:
        return f"was killed by {_signal_name(-returncode)}"
    return f"ended with exit code {returncode}"


def _signal_name(number: int) -> str:
    """Real-time signals have no names, but for the first and the last."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def oom_kills(counters: Iterable[str] = OOM_COUNTERS) -> int:
    """How many processes of this container the kernel has killed for want of memory. 0 if it does not say."""
    for path in counters:
        with suppress(OSError):
            counts = dict(line.split() for line in Path(path).read_text().splitlines())
            return int(counts.get("oom_kill", 0))
    return 0
