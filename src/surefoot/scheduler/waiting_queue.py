"""Who is admitted next: preempted requests first, then the more urgent ones, then those that came first.

Within one priority, requests with more cached pages pass by others, each of them at most `MAX_OVERTAKES` times. A
request may be ineligible for the time being; it is looked past then, and nobody overtakes it by that.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import islice, takewhile

from surefoot.scheduler.request import Request

ADMISSION_WINDOW = 64  # eligible requests among which the one with most cached pages is admitted first
MAX_OVERTAKES = 32  # requests of its priority that may be admitted before one that waited longer


class WaitingQueue:
    def __init__(self) -> None:
        self._requests: list[Request] = []  # sorted by _place

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_place)

    def remove(self, request: Request) -> None:
        del self._requests[bisect_left(self._requests, _place(request), key=_place)]

    def choose(self, is_eligible: Callable[[Request], bool], count_cached: Callable[[Request], int]) -> Request | None:
        """The one to admit next; None if nobody is eligible. It stays in the queue.

        Of those with the first eligible request's priority, the oldest that may not be overtaken any more; else the one
        with most cached pages, the older one of equals.
        """
        eligible = filter(is_eligible, self._requests)
        front = next(eligible, None)
        if front is None or front.preempted:
            return front
        peers = [
            front,
            *takewhile(lambda other: other.priority == front.priority, islice(eligible, ADMISSION_WINDOW - 1)),
        ]
        for request in peers:
            if request.overtaken >= MAX_OVERTAKES:
                return request
        return max(peers, key=count_cached)

    def take(self, request: Request, is_eligible: Callable[[Request], bool]) -> None:
        """Removes the chosen request, and counts whom it has overtaken."""
        for other in self._requests:
            if other is request:
                break
            if other.priority == request.priority and not other.preempted and is_eligible(other):
                other.overtaken += 1
        self.remove(request)


def _place(request: Request) -> tuple[bool, int, int]:
    return not request.preempted, request.priority, request.arrival
