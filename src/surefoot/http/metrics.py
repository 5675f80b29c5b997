"""What Prometheus scrapes, under this server's names or those of vLLM or SGLang.

OTHER_NAMES is the one table of the latter: dashboards and autoscalers made for those engines read the same figures.
What happens in a step is counted once per step, never per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from importlib.metadata import version as version_of

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from surefoot.config.engine_plan import EnginePlan
from surefoot.protocol.messages import EngineReady, EngineStats, Event, TokenBatch

GAP_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)  # seconds
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)  # seconds
COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)  # tokens
CHOICE_BUCKETS = (1, 2, 5, 10, 20)
PREFIX = "surefoot_"

# Without prefix and `_total`: vLLM's name, SGLang's name; empty where an engine has none of the same meaning.
OTHER_NAMES = {
    "num_requests_running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "num_requests_waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "kv_cache_usage_perc": ("vllm:kv_cache_usage_perc", "sglang:token_usage"),
    "prefix_cache_queries": ("vllm:prefix_cache_queries", ""),
    "prefix_cache_hits": ("vllm:prefix_cache_hits", ""),
    "prefix_cache_hit_rate": ("", "sglang:cache_hit_rate"),
    "num_preemptions": ("vllm:num_preemptions", ""),
    "prompt_tokens": ("vllm:prompt_tokens", "sglang:prompt_tokens"),
    "prompt_tokens_cached": ("vllm:prompt_tokens_cached", "sglang:cached_tokens"),
    "generation_tokens": ("vllm:generation_tokens", "sglang:generation_tokens"),
    "request_success": ("vllm:request_success", ""),
    "requests": ("", "sglang:num_requests"),
    "time_to_first_token_seconds": ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    "inter_token_latency_seconds": ("vllm:inter_token_latency_seconds", "sglang:inter_token_latency_seconds"),
    "request_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds", ""),
    "e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds"),
    "request_prompt_tokens": ("vllm:request_prompt_tokens", ""),
    "request_generation_tokens": ("vllm:request_generation_tokens", ""),
    "request_params_n": ("vllm:request_params_n", ""),
    "request_params_max_tokens": ("vllm:request_params_max_tokens", ""),
    "cache_config_info": ("vllm:cache_config_info", ""),
}

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for each series, which nobody reads


class Names(StrEnum):
    """Whose names a scrape asks for."""

    OWN = "surefoot"
    VLLM = "vllm"
    SGLANG = "sglang"

    def of(self, own: str) -> str:
        """The name of a family of this server; empty if there is none."""
        match self:
            case Names.OWN:
                return PREFIX + own
            case Names.VLLM:
                return OTHER_NAMES.get(own, ("", ""))[0]
            case Names.SGLANG:
                return OTHER_NAMES.get(own, ("", ""))[1]


class Outcome(StrEnum):
    """How an HTTP request for a completion ended."""

    COMPLETED = "completed"
    REFUSED = "refused"  # status 4xx or 503, nothing was generated
    FAILED = "failed"  # any other error, before or within the answer
    CLIENT_LEFT = "client_left"


class Metrics:
    """A registry of its own, so that several servers may live in one process."""

    def __init__(self, plan: EnginePlan) -> None:
        self._model_name = plan.served_model_name
        self._registry = CollectorRegistry()
        self._engine = _EngineStatsCollector()
        self._registry.register(self._engine)
        self._ready_engines = 0

        counter, histogram = self._counter, self._histogram
        self._requests = counter("requests", "HTTP requests for a completion, by how they ended", "outcome")
        self._finished = counter("request_success", "Ended sequences, by how they ended", "finished_reason")
        self._steps = counter("steps", "Steps of the engine, by execution path", "path")
        self._restarts = counter("engine_restarts", "Engines that became ready after the first")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of ended sequences")
        self._cached_tokens = counter("prompt_tokens_cached", "Those that came from the prefix cache")
        self._generated_tokens = counter("generation_tokens", "Tokens that the engine sampled")
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to a sequence's first token", REQUEST_BUCKETS
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Between two pieces of text of a sequence", GAP_BUCKETS
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds", "Of a sequence, after its first token: their mean", GAP_BUCKETS
        )
        self.latency = histogram(
            "e2e_request_latency_seconds", "From a request's arrival to a sequence's end", REQUEST_BUCKETS
        )
        self._prompt_lengths = histogram("request_prompt_tokens", "Prompt tokens of a sequence", COUNT_BUCKETS)
        self.output_lengths = histogram("request_generation_tokens", "Output tokens of a sequence", COUNT_BUCKETS)
        self.choices = histogram("request_params_n", "Choices asked for, of a prompt", CHOICE_BUCKETS)
        self.token_limits = histogram("request_params_max_tokens", "Output tokens allowed", COUNT_BUCKETS)
        self._info("info", "The server", version=version_of("surefoot"))
        bounds = plan.bounds
        self._info(
            "cache_config_info",
            "The KV cache's largest group",
            block_size=str(bounds.page_size),
            num_gpu_blocks=str(max(group.num_pages for group in bounds.kv_groups)),
        )

    def observe(self, event: Event) -> None:
        """Takes what an event of the engine tells."""
        if isinstance(event, EngineReady | TokenBatch):
            self._engine.stats = event.stats
        if isinstance(event, EngineReady):
            self._ready_engines += 1
            if self._ready_engines > 1:
                self._restarts.inc()
        if isinstance(event, TokenBatch) and event.path:
            self._steps.labels(event.path).inc()
            self._generated_tokens.inc(len(event.token_ids))

    def count_request(self, outcome: Outcome) -> None:
        self._requests.labels(outcome).inc()

    def count_prompt(self, tokens: int, cached: int) -> None:
        """Of one sequence that has ended."""
        self._prompt_tokens.inc(tokens)
        self._cached_tokens.inc(cached)
        self._prompt_lengths.observe(tokens)

    def count_end(self, reason: str) -> None:
        """Of one sequence: "stop", "length", "abort" (its client left) or "error"."""
        self._finished.labels(reason).inc()

    def render(self, names: Names = Names.OWN) -> bytes:
        return generate_latest(_Named(self._registry, names, self._model_name))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)

    def _info(self, name: str, text: str, **labels: str) -> None:
        Gauge(name, text, tuple(labels), registry=self._registry).labels(**labels).set(1)


class _EngineStatsCollector(Collector):
    """The last EngineStats, turned into metrics when they are scraped."""

    def __init__(self) -> None:
        self.stats = EngineStats(0, 0, (), 0, 0, 0)

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        hit_rate = stats.prefix_hit_tokens / stats.prefix_query_tokens if stats.prefix_query_tokens else 0.0
        usage = max((1 - (group.free + group.cached) / group.total for group in stats.pages), default=0.0)
        for name, text, value in (
            ("num_requests_running", "Requests that have a slot", stats.running),
            ("num_requests_waiting", "Requests that wait for a slot", stats.waiting),
            ("kv_cache_usage_perc", "Share of pages neither free nor only cached: of the fullest KV group", usage),
            ("prefix_cache_hit_rate", "Share of looked up prompt tokens that were cached, since the start", hit_rate),
        ):
            yield GaugeMetricFamily(name, text, value)
        for name, text, values in (
            ("kv_pages", "Pages of the KV cache", [group.total for group in stats.pages]),
            ("kv_pages_free", "Pages that nobody holds", [group.free for group in stats.pages]),
            ("kv_pages_cached", "Pages that the prefix cache alone holds", [group.cached for group in stats.pages]),
        ):
            family = GaugeMetricFamily(name, text, labels=("group",))
            for index, pages in enumerate(values):
                family.add_metric((str(index),), pages)
            yield family
        for name, text, value in (
            ("num_preemptions", "Requests put back for want of pages", stats.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_query_tokens),
            ("prefix_cache_hits", "Prompt tokens found there", stats.prefix_hit_tokens),
        ):
            yield CounterMetricFamily(name, text, value)


class _Named(Collector):
    """A registry's metrics under `names`, those of no name left out, each with the label `model_name`."""

    def __init__(self, registry: CollectorRegistry, names: Names, model_name: str) -> None:
        self._registry = registry
        self._names = names
        self._label = {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            if name := self._names.of(family.name):
                named = Metric(name, family.documentation, family.type)
                for sample in family.samples:
                    suffix = sample.name.removeprefix(family.name)
                    named.add_sample(name + suffix, self._label | sample.labels, sample.value)
                yield named
