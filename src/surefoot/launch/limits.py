"""What the shell or the container allows each process: open files, and memory."""

from __future__ import annotations

import logging
import resource
from contextlib import suppress

OWN_FILES = 64  # of a process without any connection, with room to spare

log = logging.getLogger("surefoot.launch")


def raise_file_limit(num_requests: int) -> None:
    """As far as is allowed; children inherit it. Warns if not so many requests can have a connection each."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some sandboxes allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < num_requests + OWN_FILES:
        log.warning(
            "a process may open %d files here (ulimit -Hn): too few for the connections of %d running and waiting "
            "requests. Those beyond are reset; raise the limit, or lower --max-queued-requests",
            *(hard, num_requests),
        )


def memory_limit() -> str:
    """To be added to a death without a cause: libraries that cannot be loaded say no more than that they failed."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return ""
    return f"; its memory is limited to {limit / 2**20:.0f} MiB (ulimit -v)"
