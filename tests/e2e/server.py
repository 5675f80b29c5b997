"""A real `surefoot serve` process tree on a free port, and what tests ask of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

READY_SECONDS = 60.0
STOP_SECONDS = 30.0


class Server:
    """`with Server(model=path, page_size=8) as server:` enters when it is ready, leaves with SIGTERM."""

    def __init__(self, log: Path, wait_ready: bool = True, **settings: Any) -> None:
        self._log = log
        self._wait_ready = wait_ready
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if value is not True]
        flags += [f"--{name.replace('_', '-')}" for name, value in settings.items() if value is True]
        self._command = [
            sys.executable,
            "-m",
            "surefoot.cli",
            "serve",
            "--port=0",
            f"--record-dir={log.parent}",
            *flags,
        ]
        self._environment = dict(os.environ)
        self._client = httpx.Client()  # kept: making one takes longer than many a request
        self.model_name = str(settings.get("served_model_name", Path(str(settings.get("model", ""))).name))

    def __enter__(self) -> Self:
        with self._log.open("w") as log:
            self.process = subprocess.Popen(self._command, stderr=log, stdout=log, env=self._environment)
        try:
            self.url = self._wait(r"listening on (http://\S+),")
            if self._wait_ready:
                self._wait(r"(Ready: )")
        except BaseException:
            self.process.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._client.close()
        if self.process.poll() is None:
            self.stop()
        if kind is not None:
            print(self.log())

    def stop(self) -> int:
        """SIGTERM, then the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)

    def log(self) -> str:
        return self._log.read_text()

    def metrics(self) -> dict[str, float]:
        """Every sample, by name with labels."""
        lines = self._client.get(f"{self.url}/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def paths(self) -> set[str]:
        """Keys of all execution paths that ran."""
        found = (re.search(r'path="([^"]+)"', name) for name in self.metrics() if "steps_total{" in name)
        return {match[1] for match in found if match}

    def child(self, module: str) -> int:
        """Process id of the child that runs `module`."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and module in command_line(entry) and parent(entry) == self.process.pid:
                return int(entry.name)
        raise AssertionError(f"no child runs {module}")

    def _wait(self, pattern: str) -> str:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            match = re.search(pattern, self.log())
            if match:
                return match[1]
            if self.process.poll() is not None:
                raise AssertionError(f"exit code {self.process.returncode}:\n{self.log()}")
            time.sleep(0.02)
        raise AssertionError(f"not ready after {READY_SECONDS} s:\n{self.log()}")


def command_line(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def is_alive(pid: int) -> bool:
    """Zombies, which only wait to be reaped, are dead."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"does not hold after {seconds} s"
        time.sleep(0.01)


def wait_dead(*pids: int) -> None:
    wait_until(lambda: not any(map(is_alive, pids)))


@contextmanager
def killed_after(pid: int) -> Iterator[None]:
    try:
        yield
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
