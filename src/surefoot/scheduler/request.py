"""The one mutable record of the engine: a request as the scheduler sees it.

waiting (slot -1, no pages) -> running (a slot and pages) -> ended, with preemption as the way back to waiting.
"""

from __future__ import annotations

from array import array

from surefoot.config.bounds import Bounds
from surefoot.protocol.messages import NO_LOGPROBS, GenerateRequest, RefusalCause, Refused
from surefoot.protocol.step_plan import NO_COUNT_ROW

NO_SLOT = -1
MAX_TOKEN_ID = 2**31 - 1  # a page key packs token ids as 32-bit integers
MAX_LOGPROBS = 1024  # far more than any client may ask for; every sampling row of a step may have as many
MAX_INT64 = 2**63 - 1  # what the wire and the device hold


class Request:
    __slots__ = (
        "_page_keys",
        "arrival",
        "asked",
        "cached_pages",
        "cached_pages_version",
        "cached_tokens",
        "count_row",
        "end",
        "ended",
        "id",
        "num_computed",
        "num_planned",
        "num_scored",
        "overtaken",
        "pages",
        "penalises",
        "preempted",
        "priority",
        "rows_in_flight",
        "slot",
        "stop_ids",
        "tail_on_device",
        "tokens",
        "wants_logprobs",
    )

    def __init__(self, asked: GenerateRequest, arrival: int) -> None:
        self.asked = asked
        self.id = asked.id
        self.arrival = arrival  # requests accepted before it
        self.priority = asked.priority
        self.tokens = list(asked.prompt_ids)  # prompt and committed output
        self.end = len(asked.prompt_ids) + asked.max_new_tokens  # number of tokens at which it stops
        self.stop_ids = frozenset(asked.stop_ids)
        self.penalises = asked.sampling.penalises
        self.wants_logprobs = asked.logprobs != NO_LOGPROBS

        # Of its stay in a slot: void while it waits.
        self.slot = NO_SLOT
        self.count_row = NO_COUNT_ROW
        self.pages: list[list[int]] = []  # per KV group, by column; NO_PAGE: no token to come sees it
        self.num_computed = 0  # tokens whose KV a committed step has written, or that were matched
        self.num_planned = 0  # tokens whose KV is computed or in flight
        self.tail_on_device = False  # the last planned row samples: the next input token lies in the slot

        self.rows_in_flight = 0  # rows in steps that have not been committed
        # Prompt tokens that need no logprob any more; the first one never has one.
        self.num_scored = len(asked.prompt_ids) if asked.prompt_logprobs == NO_LOGPROBS else 1
        self.preempted = False  # at least once
        self.ended = False  # its terminal event is out; rows in flight mean nothing
        self.cached_tokens = 0  # prompt tokens matched at the first admission
        self.overtaken = 0  # requests behind it in the queue that were admitted before it

        self.cached_pages = 0  # pages that the prefix tree has for it, as of:
        self.cached_pages_version = -1
        self._page_keys: list[bytes] = []

    @property
    def leads(self) -> bool:
        """Whether it is the first of the requests with its group id."""
        return self.id == self.asked.group_id

    @property
    def has_output(self) -> bool:
        """Whether its first new token is known, and so its whole prompt has been computed."""
        return len(self.tokens) > len(self.asked.prompt_ids)

    @property
    def is_scored(self) -> bool:
        """Whether the logprobs of all its prompt tokens are delivered, if they are wanted at all."""
        return self.num_scored == len(self.asked.prompt_ids)

    def leave_slot(self) -> None:
        """Back to the state of a waiting request; tokens are kept."""
        self.slot = NO_SLOT
        self.count_row = NO_COUNT_ROW
        self.pages = []
        self.num_computed = self.num_planned = 0
        self.tail_on_device = False

    def page_keys(self, page_size: int, num_pages: int) -> list[bytes]:
        """Keys of the first `num_pages` full pages in the prefix tree: the page's token ids, packed.

        Each key is made once, and Python caches its hash. The namespace is part of the first one; token ids have a
        fixed length after it, so two namespaces never share a key.
        """
        made = len(self._page_keys)
        if made < num_pages:
            ids = array("i", self.tokens[made * page_size : num_pages * page_size])
            packed, width = ids.tobytes(), page_size * ids.itemsize
            self._page_keys += [packed[at : at + width] for at in range(0, len(packed), width)]
            if made == 0:
                self._page_keys[0] = self.asked.cache_namespace.encode() + self._page_keys[0]
        return self._page_keys[:num_pages]


def why_impossible(asked: GenerateRequest, bounds: Bounds) -> Refused | None:
    """The refusal of a request that this engine could not serve even if it were alone; None if it could."""
    prompt, new = len(asked.prompt_ids), asked.max_new_tokens
    cause, wrong = RefusalCause.INVALID, ""
    if not prompt:
        wrong = "the prompt is empty: give at least one token"
    elif new < 1:
        wrong = f"max_new_tokens is {new}: ask for at least one"
    elif not 0 <= asked.min_new_tokens <= new:
        wrong = f"min_new_tokens is {asked.min_new_tokens}: give 0 to max_new_tokens, which is {new}"
    elif prompt + new > bounds.max_model_len:
        cause = RefusalCause.TOO_LONG
        wrong = (
            f"{prompt} prompt tokens and {new} new ones are {prompt + new}, "
            f"the limit is {bounds.max_model_len}: shorten the prompt or ask for fewer"
        )
    elif asked.sampling.penalises and not bounds.count_rows:
        wrong = "penalties need rows of token counts, and this engine has none: ask without penalties"
    else:
        wrong = _out_of_range(asked)
        if not wrong:
            cause, wrong = RefusalCause.TOO_LONG, _too_many_pages(asked, bounds)
    return Refused(asked.id, cause, wrong) if wrong else None


def _out_of_range(asked: GenerateRequest) -> str:
    """What is wrong with an integer that the wire or the device could not hold, or that would cost others too much."""
    sampling = asked.sampling
    biased = [token for token, _ in sampling.logit_bias] or [0]
    stop_ids = asked.stop_ids or (0,)
    for name, least, most, low, high in (
        ("prompt_ids", min(asked.prompt_ids), max(asked.prompt_ids), 0, MAX_TOKEN_ID),
        ("stop_ids", min(stop_ids), max(stop_ids), 0, MAX_TOKEN_ID),
        ("logit_bias", min(biased), max(biased), 0, MAX_TOKEN_ID),
        ("top_k", sampling.top_k, sampling.top_k, 0, MAX_TOKEN_ID),
        ("seed", sampling.seed, sampling.seed, 0, MAX_INT64),
        ("logprobs", asked.logprobs, asked.logprobs, NO_LOGPROBS, MAX_LOGPROBS),
        ("prompt_logprobs", asked.prompt_logprobs, asked.prompt_logprobs, NO_LOGPROBS, MAX_LOGPROBS),
        ("priority", asked.priority, asked.priority, -MAX_INT64, MAX_INT64),
        ("group_id", asked.group_id, asked.group_id, 0, MAX_INT64),
        ("id", asked.id, asked.id, 0, MAX_INT64),
    ):
        if least < low or most > high:
            return f"{name} holds {least if least < low else most}, which is outside {low}..{high}"
    return ""


def _too_many_pages(asked: GenerateRequest, bounds: Bounds) -> str:
    prompt, new = len(asked.prompt_ids), asked.max_new_tokens
    for group in bounds.kv_groups:
        needed = bounds.most_pages(group, prompt + new - 1)  # the KV of the last token is never needed
        if needed > group.num_pages:
            layers = f" for layers with a window of {group.window} tokens" if group.window else ""
            return (
                f"{prompt} prompt tokens and {new} new ones need {needed} pages of the KV cache{layers}, "
                f"which has {group.num_pages}: shorten the prompt or ask for fewer"
            )
    return ""
