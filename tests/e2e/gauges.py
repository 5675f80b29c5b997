"""Names of the metrics that these tests read, and how they read them."""

from __future__ import annotations

from tests.e2e.server import Server, wait_until

RUNNING = "surefoot_num_requests_running"
WAITING = "surefoot_num_requests_waiting"
PAGES = "surefoot_kv_pages"
PAGES_FREE = "surefoot_kv_pages_free"
PAGES_CACHED = "surefoot_kv_pages_cached"
PREEMPTIONS = "surefoot_num_preemptions_total"
PREFIX_HITS = "surefoot_prefix_cache_hits_total"
GENERATED = "surefoot_generation_tokens_total"


def value(server: Server, name: str) -> float:
    """The sum over all labels."""
    return sum(value for sample, value in server.metrics().items() if sample.partition("{")[0] == name)


def wait_idle(server: Server) -> None:
    """Until nothing runs or waits: an abort may still be on its way."""
    wait_until(lambda: value(server, RUNNING) + value(server, WAITING) == 0)


def check_pages(server: Server) -> None:
    """When nothing runs, every page is free or in the prefix cache."""
    wait_idle(server)
    assert value(server, PAGES) > 0
    assert value(server, PAGES_FREE) + value(server, PAGES_CACHED) == value(server, PAGES)
