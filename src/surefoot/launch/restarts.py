"""When a process that died is started again, and when that is no use any more."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_SECONDS = 600.0
MAX_DELAY_SECONDS = 60.0
MAX_FAILED_STARTS = 2  # in a row


@dataclass(frozen=True)
class Restart:
    delay: float  # seconds from now


@dataclass(frozen=True)
class GiveUp:
    in_loop: bool  # False: its very first start failed, or it is not to be restarted at all
    how_often: str  # to be added to the cause of the last death; empty for a first one


class RestartRule:
    """Of one process: again at once, and after 1, 2, 4 ... seconds if it has died before within the window."""

    def __init__(self, max_restarts: int) -> None:
        """max_restarts: within the window; 0 is never."""
        self._max_restarts = max_restarts
        self._deaths: deque[float] = deque()
        self._failed_starts = 0  # in a row
        self.is_up = False
        self.ever_came_up = False

    def came_up(self) -> None:
        """It does its work from now on."""
        self.is_up = self.ever_came_up = True
        self._failed_starts = 0

    def died(self, now: float) -> Restart | GiveUp:
        """now: seconds of any clock that does not go back."""
        self._failed_starts += not self.is_up
        self.is_up = False
        self._deaths.append(now)
        while self._deaths[0] <= now - WINDOW_SECONDS:
            self._deaths.popleft()
        count = len(self._deaths)
        if not self.ever_came_up or not self._max_restarts:
            return GiveUp(False, "")
        if self._failed_starts == MAX_FAILED_STARTS:
            return GiveUp(True, f"; it has died {MAX_FAILED_STARTS} times in a row while it started")
        if count > self._max_restarts:
            return GiveUp(True, f"; it has died {count} times within {WINDOW_SECONDS / 60:g} minutes")
        return Restart(0.0 if count == 1 else min(2.0 ** (count - 2), MAX_DELAY_SECONDS))
