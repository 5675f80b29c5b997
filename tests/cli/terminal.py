"""The command line as a user has it: in a process of its own, with or without a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import TracebackType
from typing import Self

SECONDS = 60.0


def environment(state: Path) -> dict[str, str]:
    """80 columns wide, no colours, and a place of its own for history."""
    return os.environ | {"COLUMNS": "80", "TERM": "dumb", "XDG_STATE_HOME": str(state)}


def surefoot(*arguments: str, stdin: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Standard input is a pipe."""
    return subprocess.run(
        [sys.executable, "-m", "surefoot", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        cwd=cwd,
        env=os.environ | {"COLUMNS": "80"},
    )


class Terminal:
    """`with Terminal(state, "chat", ...) as terminal:` runs the command on a terminal of 80 columns."""

    def __init__(self, state: Path, *arguments: str) -> None:
        self._state = state
        self._command = [sys.executable, "-m", "surefoot", *arguments]
        self._unread = ""

    def __enter__(self) -> Self:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            self._command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(self._state),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(SECONDS)
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def ask(self, line: str, prompt: str = "> ") -> str:
        """Types a line. Returns what is shown between it and the next prompt."""
        self.type(line + "\n")
        self.until(line + "\n")
        return self.until(prompt).removesuffix(prompt)

    def until(self, text: str) -> str:
        """All that is shown up to and including `text`, since the last call."""
        deadline = time.monotonic() + SECONDS
        while text not in self._unread:
            assert time.monotonic() < deadline, f"no {text!r} after {self._unread!r}"
            self._read(0.1)
        seen, _, self._unread = self._unread.partition(text)
        return seen + text

    def interrupt(self, answer: str) -> None:
        """Ctrl-C until it is answered. One that another thread gets, as while readline draws, Python sees only when the
        line ends."""
        for key in ("\x03", "\x03", "\n"):
            self.type(key)
            self._read(2.0)
            if answer in self._unread:
                break
        self.until(answer)

    def _read(self, seconds: float) -> None:
        if select.select([self._master], [], [], seconds)[0]:
            self._unread += os.read(self._master, 4096).decode(errors="replace").replace("\r\n", "\n")

    def end(self) -> int:
        """The exit code."""
        return self.process.wait(SECONDS)
