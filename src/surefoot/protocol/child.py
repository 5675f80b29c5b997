"""How a child of the supervisor begins, and how it reports."""

from __future__ import annotations

import ctypes
import os
import signal
import traceback

from msgspec import Struct

from surefoot.protocol.control import Failed, encode_line

PR_SET_PDEATHSIG = 1  # prctl(2)


class Reports:
    """A child's way up to the supervisor."""

    def __init__(self) -> None:
        """Takes stdout: whatever else writes there, writes to stderr from now on."""
        self._pipe = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)

    def send(self, message: Struct) -> None:
        self._pipe.write(encode_line(message))
        self._pipe.flush()

    def fail(self, error: BaseException) -> None:
        """Says which exception ends this process, which nobody foresaw. Notes that it carries come first."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        trace = "".join(traceback.format_exception(error)).rstrip()
        notes = vars(error).get("__notes__", [])
        self.send(Failed(" ".join("; ".join([*notes, f"{type(error).__name__}: {error}"]).split()), trace))


def begin_child() -> Reports:
    """What a child of the supervisor does first.

    It leaves SIGINT and SIGTERM to the supervisor, so that Ctrl-C in a terminal reaches it as `Drain`; and the kernel
    kills it with the supervisor, also while it is stopped or stuck and would not notice the end of its stdin.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return Reports()
