"""The one mutable record of the engine: a request as the scheduler sees it.

waiting (slot -1, no pages) -> running (a slot and pages) -> ended, with preemption as the way back to waiting.
"""

from __future__ import annotations

from array import array

from surefoot.config.bounds import Bounds
from surefoot.protocol.messages import GenerateRequest, RefusalCause, Refused

NO_SLOT = -1
MAX_TOKEN_ID = 2**31 - 1  # a page key packs token ids as 32-bit integers


class Request:
    __slots__ = (
        "_page_keys",
        "asked",
        "cached_pages",
        "cached_pages_version",
        "cached_tokens",
        "end",
        "ended",
        "id",
        "num_computed",
        "num_planned",
        "overtaken",
        "pages",
        "preempted",
        "rows_in_flight",
        "slot",
        "stop_ids",
        "tail_on_device",
        "tokens",
    )

    def __init__(self, asked: GenerateRequest) -> None:
        self.asked = asked
        self.id = asked.id
        self.tokens = list(asked.prompt_ids)  # prompt and committed output
        self.end = len(asked.prompt_ids) + asked.max_new_tokens  # number of tokens at which it stops
        self.stop_ids = frozenset(asked.stop_ids)

        # Of its stay in a slot: void while it waits.
        self.slot = NO_SLOT
        self.pages: list[int] = []
        self.num_computed = 0  # tokens whose KV a committed step has written, or that were matched
        self.num_planned = 0  # tokens whose KV is computed or in flight
        self.tail_on_device = False  # the last planned row samples: the next input token lies in the slot

        self.rows_in_flight = 0  # rows in steps that have not been committed
        self.preempted = False  # at least once
        self.ended = False  # its terminal event is out; rows in flight mean nothing
        self.cached_tokens = 0  # prompt tokens matched at the first admission
        self.overtaken = 0  # requests behind it in the queue that were admitted before it

        self.cached_pages = 0  # pages that the prefix tree has for it, as of:
        self.cached_pages_version = -1
        self._page_keys: list[bytes] = []

    def leave_slot(self) -> None:
        """Back to the state of a waiting request; tokens are kept."""
        self.slot = NO_SLOT
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
    pages = -(-(prompt + new - 1) // bounds.page_size)  # the KV of the last token is never needed
    cause, wrong = RefusalCause.INVALID, ""
    if not prompt:
        wrong = "the prompt is empty: give at least one token"
    elif min(asked.prompt_ids) < 0 or max(asked.prompt_ids) > MAX_TOKEN_ID:
        wrong = f"prompt_ids holds a token id outside 0..{MAX_TOKEN_ID}"
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
    elif pages > bounds.num_pages:
        cause = RefusalCause.TOO_LONG
        wrong = (
            f"{prompt} prompt tokens and {new} new ones need {pages} pages of the KV cache, "
            f"which has {bounds.num_pages}: shorten the prompt or ask for fewer"
        )
    return Refused(asked.id, cause, wrong) if wrong else None
