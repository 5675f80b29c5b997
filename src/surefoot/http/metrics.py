"""What Prometheus scrapes. Counts of the engine are updated once per step, never per token.

inter_token_seconds is the time between two pieces of text of a sequence: tokens that arrive together count as one.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from surefoot.protocol.messages import EngineReady, EngineStats, Event, TokenBatch

TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class Outcome(StrEnum):
    """How a request for a completion ended."""

    COMPLETED = "completed"
    REFUSED = "refused"  # status 4xx or 503, nothing was generated
    FAILED = "failed"  # any other error, before or within the answer
    CLIENT_LEFT = "client_left"


class _EngineStatsCollector(Collector):
    """The last EngineStats, turned into metrics when they are scraped."""

    def __init__(self) -> None:
        self.stats = EngineStats(0, 0, 0, 0, 0, 0, 0, 0)

    def collect(self) -> Iterator[Metric]:
        for name, text, value in (
            ("requests_running", "Requests that have a slot", self.stats.running),
            ("requests_waiting", "Requests that wait for a slot", self.stats.waiting),
            ("kv_pages", "Pages of the KV cache", self.stats.pages_total),
            ("kv_pages_free", "Pages that nobody holds", self.stats.pages_free),
            ("kv_pages_cached", "Pages that the prefix cache holds", self.stats.pages_cached),
        ):
            yield GaugeMetricFamily(f"surefoot_{name}", text, value)
        for name, text, value in (
            ("preemptions", "Requests put back for want of pages", self.stats.preemptions),
            (
                "prefix_query_tokens",
                "Prompt tokens that were looked up in the prefix cache",
                self.stats.prefix_query_tokens,
            ),
            ("prefix_hit_tokens", "Prompt tokens that were found there", self.stats.prefix_hit_tokens),
        ):
            yield CounterMetricFamily(f"surefoot_{name}", text, value)


class Metrics:
    """A registry of its own, so that several servers may live in one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineStatsCollector()
        self._registry.register(self._engine)
        self._requests = self._counter("requests", "Requests for a completion, by how they ended", ("outcome",))
        self._steps = self._counter("steps", "Steps of the engine, by execution path", ("path",))
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended sequences")
        self._cached_tokens = self._counter("cached_prompt_tokens", "Those that came from the prefix cache")
        self._generated_tokens = self._counter("generation_tokens", "Tokens that the engine sampled")
        self.time_to_first_token = self._histogram(
            "time_to_first_token", "From a request's arrival to its first text", REQUEST_BUCKETS
        )
        self.inter_token = self._histogram("inter_token", "Between two pieces of text of a sequence", TOKEN_BUCKETS)
        self.request_seconds = self._histogram(
            "request", "From a request's arrival to the end of its answer", REQUEST_BUCKETS
        )

    def observe(self, event: Event) -> None:
        """Takes what an event of the engine tells."""
        if isinstance(event, EngineReady | TokenBatch):
            self._engine.stats = event.stats
        if isinstance(event, TokenBatch) and event.path:
            self._steps.labels(event.path).inc()
            self._generated_tokens.inc(len(event.token_ids))

    def count_request(self, outcome: Outcome) -> None:
        self._requests.labels(outcome).inc()

    def count_prompt(self, tokens: int, cached: int) -> None:
        """One sequence has ended."""
        self._prompt_tokens.inc(tokens)
        self._cached_tokens.inc(cached)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"surefoot_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"surefoot_{name}_seconds", text, buckets=buckets, registry=self._registry)
