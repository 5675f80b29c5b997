"""`reachable_paths` against the steps that the engine really runs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from msgspec.structs import replace

from surefoot import LLM
from surefoot.config.paths import reachable_paths
from surefoot.frontend.sampling_params import SamplingParams, Vocabulary
from surefoot.protocol.messages import Event, Finished, FinishReason, GenerateRequest, Refused, Submit, TokenBatch
from tests.tiny import TinyLlama

FEWEST, MOST = 300, 3000  # requests
VOCABULARY = Vocabulary(256, ())
SAMPLINGS = (
    SamplingParams(temperature=0, ignore_eos=True),
    SamplingParams(temperature=1, ignore_eos=True),
    SamplingParams(temperature=1, top_k=5, ignore_eos=True),
)


class Traffic:
    """Requests of every kind until all paths in `wanted` have run: inbox and outbox of the engine's loop."""

    def __init__(self, wanted: set[str], max_model_len: int) -> None:
        self._wanted = wanted
        self._random = random.Random(1)
        self._max_model_len = max_model_len
        self._submitted = 0
        self.paths: set[str] = set()
        self.ends: list[Finished] = []

    @property
    def is_open(self) -> bool:
        return self._submitted < FEWEST or (self._submitted < MOST and not self._wanted <= self.paths)

    def drain(self, block: bool) -> Iterator[Submit]:
        """When the engine is idle, a burst of requests of one kind, or of two."""
        if not block:
            return
        self._params = self._random.choice(SAMPLINGS)
        self._logprobs = self._random.choice((((-1, -1),), ((1, -1),), ((-1, 1), (1, -1))))
        self._repeats = self._random.choice((True, False))
        for _ in range(self._random.randint(1, 5)):
            self._submitted += 1
            yield Submit(self._request())

    def send(self, events: Sequence[Event]) -> None:
        for event in events:
            assert not isinstance(event, Refused), event
            if isinstance(event, TokenBatch):
                self.ends += event.finished
                self.paths.add(event.path)

    def _request(self) -> GenerateRequest:
        length = self._random.randint(1, self._random.choice((6, self._max_model_len - 1)))
        prompt = [3 if self._repeats else self._random.randint(3, 250) for _ in range(length)]
        made = self._params.to_request(self._submitted, prompt, VOCABULARY, self._max_model_len, default_seed=1)
        new = min(made.max_new_tokens, self._random.randint(1, 5))
        logprobs, prompt_logprobs = self._random.choice(self._logprobs)
        return replace(made, max_new_tokens=new, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_running_requests": 3, "chunked_prefill_size": 8},
        {"max_running_requests": 3, "chunked_prefill_size": 8, "disable_prefix_cache": True},
        {"max_running_requests": 2, "chunked_prefill_size": 64},
        {"max_running_requests": 1, "chunked_prefill_size": 64},
        {"max_running_requests": 1, "chunked_prefill_size": 64, "disable_prefix_cache": True},
        {"max_running_requests": 1, "chunked_prefill_size": 20, "disable_prefix_cache": True},
        {"max_running_requests": 1, "chunked_prefill_size": 8},
    ],
    ids=lambda settings: ",".join(f"{name}={value}" for name, value in settings.items()),
)
def test_every_reachable_path_runs_and_no_other(tiny_llama: TinyLlama, settings: dict[str, int]) -> None:
    common = {
        "max_model_len": 32,
        "page_size": 4,
        "kv_cache_tokens": 400,
        "max_queued_requests": 5,
        "lookahead": 0,
        "threads": 1,
    }
    with LLM(str(tiny_llama.path), weight_dtype="float32", **common, **settings) as llm:
        reachable = {path.key for path in reachable_paths(llm.plan)}
        traffic = Traffic(reachable, llm.plan.bounds.max_model_len)
        llm.serve(traffic, traffic)
    assert {finished.reason for finished in traffic.ends} == {FinishReason.LENGTH}
    assert traffic.paths == reachable
