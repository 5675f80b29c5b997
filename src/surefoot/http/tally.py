"""What has been generated for one HTTP request, for its usage, its line in the log, and the metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from surefoot.frontend.engine_client import Begun, Delta, Ended, Update
from surefoot.frontend.output import Output
from surefoot.http.metrics import Metrics


class Tally:
    """A prompt counts once in the usage, however many choices it has; in the metrics each sequence has its own."""

    def __init__(self, metrics: Metrics, began: float, outputs: Sequence[Output]) -> None:
        """`began`: time.monotonic() when the request arrived."""
        self.began = began
        self.cached_tokens = 0
        self.reasons: list[str] = []
        self._metrics = metrics
        self._outputs = outputs
        self._first_token: dict[int, float] = {}  # sequence -> when its first token came
        self._latest_text: dict[int, float] = {}
        self._open = 0  # sequences that were accepted and have not ended

    @property
    def prompt_tokens(self) -> int:
        return sum(len(output.request.prompt_ids) for output in self._outputs if output.is_first_sibling)

    @property
    def output_tokens(self) -> int:
        """So far: an answer that is cut short has a count too."""
        return sum(len(output.token_ids) for output in self._outputs)

    def usage(self) -> dict[str, Any]:
        prompt, output = self.prompt_tokens, self.output_tokens
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def whole_usage(self) -> dict[str, Any]:
        """When everything has ended: what was cached is known then."""
        return self.usage() | {"prompt_tokens_details": {"cached_tokens": self.cached_tokens}}

    def count_accepted(self, choices: int) -> None:
        """`choices`: of each prompt."""
        self._open = len(self._outputs)
        for output in self._outputs:
            self._metrics.token_limits.observe(output.request.max_new_tokens)
            if output.is_first_sibling:
                self._metrics.choices.observe(choices)

    def count(self, update: Update) -> None:
        now, metrics = time.monotonic(), self._metrics
        match update:
            case Begun(index):
                metrics.time_to_first_token.observe(now - self.began)
                self._first_token[index] = now
            case Delta(index):
                if index in self._latest_text:
                    metrics.inter_token.observe(now - self._latest_text[index])
                self._latest_text[index] = now
            case Ended():
                self._count_ended(update, now)

    def end_open(self, reason: str) -> None:
        """Those that have not ended end now, for `reason`: "abort" or "error"."""
        for _ in range(self._open):
            self._metrics.count_end(reason)
        self._open = 0

    def _count_ended(self, ended: Ended, now: float) -> None:
        metrics, output = self._metrics, self._outputs[ended.index]
        self._open -= 1
        self.reasons.append(ended.reason)
        if output.is_first_sibling:
            self.cached_tokens += ended.cached_tokens
        metrics.count_end(ended.reason)
        metrics.count_prompt(len(output.request.prompt_ids), ended.cached_tokens)
        metrics.output_lengths.observe(ended.output_tokens)
        metrics.latency.observe(now - self.began)
        if ended.output_tokens > 1:
            seconds = now - self._first_token[ended.index]
            metrics.time_per_output_token.observe(seconds / (ended.output_tokens - 1))
