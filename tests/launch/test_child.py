"""What the supervisor can tell of a death."""

from __future__ import annotations

import asyncio
import resource
import signal
from pathlib import Path

import pytest

from surefoot.launch.child import Child, exit_code, how_it_ended, oom_kills


def test_how_it_ended() -> None:
    assert how_it_ended(7, oom_killed=False) == "ended with exit code 7"
    assert how_it_ended(-40, oom_killed=False) == "was killed by signal 40"
    assert how_it_ended(-signal.SIGSEGV, oom_killed=True) == "was killed by SIGSEGV"
    assert how_it_ended(-signal.SIGKILL, oom_killed=False) == "was killed by SIGKILL"
    assert how_it_ended(-signal.SIGKILL, oom_killed=True) == "was killed by the kernel, because memory ran out"


def test_a_death_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import that fails for it is no cause that a child could report."""

    async def death() -> str:
        child = await Child.start("surefoot.nothing")
        return child.how_it_ended(await child.wait())

    assert asyncio.run(death()) == "ended with exit code 1"
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (600 * 2**20, resource.RLIM_INFINITY))
    assert asyncio.run(death()) == "ended with exit code 1; its memory is limited to 600 MiB (ulimit -v)"


def test_exit_codes_are_those_of_a_shell() -> None:
    assert [exit_code(returncode) for returncode in (0, 2, -signal.SIGKILL)] == [0, 2, 137]


def test_the_kernels_count_of_kills(tmp_path: Path) -> None:
    v1, v2, absent = tmp_path / "v1", tmp_path / "v2", tmp_path / "absent"
    v1.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    v2.write_text("low 0\nhigh 2\nmax 9\noom 4\noom_kill 5\noom_group_kill 0\n")
    assert oom_kills([str(absent), str(v1)]) == 3
    assert oom_kills([str(v2), str(v1)]) == 5
    assert oom_kills([str(absent)]) == 0
