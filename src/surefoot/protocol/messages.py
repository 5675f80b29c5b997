"""Messages between frontend and engine, and between offline API and engine loop.

Commands go right (frontend to engine), events go left. Every submitted request gets exactly one terminal event:
`Refused`, or one `Finished` inside a `TokenBatch`.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Sampling(Struct, frozen=True, array_like=True):
    """How one request's next token is drawn from its logits."""

    temperature: float  # 0: greedy
    top_k: int  # 0: no limit
    top_p: float  # 1: no limit
    min_p: float  # 0: no limit; relative to the most probable token
    repetition_penalty: float  # 1: none; for tokens of prompt and output
    presence_penalty: float  # 0: none; for tokens of the output
    frequency_penalty: float  # 0: none; times the token's count in the output
    logit_bias: tuple[tuple[int, float], ...]  # (token id, added to its logit), each id once
    seed: int  # 0 <= seed < 2**63; the noise is a function of (seed, position, token id) alone

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """Whether it takes counts of the request's tokens to draw the next one."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def truncates(self) -> bool:
        """Whether some tokens are cut off before the draw."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


GREEDY = Sampling(
    temperature=0,
    top_k=0,
    top_p=1,
    min_p=0,
    repetition_penalty=1,
    presence_penalty=0,
    frequency_penalty=0,
    logit_bias=(),
    seed=0,
)
NO_LOGPROBS = -1


class GenerateRequest(Struct, frozen=True):
    """One sequence to continue. Text never crosses: stop strings belong to the frontend."""

    id: int  # unique among the requests alive in this engine
    group_id: int  # the id of the first of those asked for together, with the same prompt (n > 1); else its own id
    prompt_ids: tuple[int, ...]  # at least one
    max_new_tokens: int  # at least one
    min_new_tokens: int  # stop ids are not sampled before this many new tokens
    stop_ids: tuple[int, ...]  # end-of-text ids and the user's own; empty with ignore_eos
    sampling: Sampling
    logprobs: int  # most probable tokens to tell at each output token, besides its own logprob; NO_LOGPROBS: nothing
    prompt_logprobs: int  # the same for prompt tokens
    cache_namespace: str  # prefixes are shared only inside one namespace
    priority: int  # smaller ones are admitted first; 0 is usual


class Submit(Struct, frozen=True, tag=True):
    request: GenerateRequest


class Abort(Struct, frozen=True, tag=True):
    """The client left, a stop string was found, or a deadline passed. Unknown ids are ignored."""

    request_id: int


class Stop(Struct, frozen=True, tag=True):
    """No more commands will come: finish what is running, then end."""


Command = Submit | Abort | Stop


class FinishReason(StrEnum):
    STOP = "stop"  # a stop id was sampled; it is the last token of the request
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"


class Finished(Struct, frozen=True, array_like=True):
    """The terminal event of a request that was accepted."""

    request_id: int
    reason: FinishReason
    cached_tokens: int  # prompt tokens that came from the prefix cache when the request was first admitted
    detail: str  # what went wrong, for ERROR; else empty


class Logprobs(Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities at consecutive positions of one request: of the model's own distribution,
    before bias, penalties, temperature and truncation."""

    request_id: int
    chosen: tuple[float, ...]  # of the token that stands at each position
    top_ids: tuple[tuple[int, ...], ...]  # per position the most probable tokens, best first; as many as asked for
    top_logprobs: tuple[tuple[float, ...], ...]


class PageStats(Struct, frozen=True, array_like=True):
    """Pages of one KV group."""

    total: int
    free: int
    cached: int  # that the prefix tree alone holds: they are given away when pages are short


class EngineStats(Struct, frozen=True, array_like=True):
    """The scheduler's state after the event that carries it. Totals count since the engine started."""

    running: int
    waiting: int
    pages: tuple[PageStats, ...]  # per KV group
    preemptions: int  # total
    prefix_hit_tokens: int  # total
    prefix_query_tokens: int  # total


class Accepted(Struct, frozen=True, tag=True):
    """The request waits or runs: response headers may be sent."""

    request_id: int


class RefusalCause(StrEnum):
    QUEUE_FULL = "queue_full"
    TOO_LONG = "too_long"
    INVALID = "invalid"


class Refused(Struct, frozen=True, tag=True):
    request_id: int
    cause: RefusalCause
    detail: str


class TokenBatch(Struct, frozen=True, tag=True):
    """What one step (or one abort) gave, for all requests at once: columns."""

    request_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # as many as request_ids
    finished: tuple[Finished, ...]  # may name requests without a token in this batch
    logprobs: tuple[Logprobs, ...]  # one position each, of those in request_ids that asked for them
    prompt_logprobs: tuple[Logprobs, ...]  # of prompt tokens from the second on, in order over several batches
    path: str  # key of the ExecutionPath that ran; empty for an abort or a failed step
    stats: EngineStats


class EngineReady(Struct, frozen=True, tag=True):
    """The engine takes traffic from now on."""

    load_seconds: float
    stats: EngineStats


Event = EngineReady | Accepted | Refused | TokenBatch
