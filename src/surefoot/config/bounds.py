"""The only place where a capacity is computed. Every buffer is sized from `Bounds`; a step is checked against it."""

from __future__ import annotations

from msgspec import Struct


class KVGroup(Struct, frozen=True):
    """Layers whose keys and values share pages: those of one kind (`ModelSpec.layer_kinds`, in the same order)."""

    window: int  # tokens that a token sees, itself included; 0: all up to itself
    num_pages: int


class Bounds(Struct, frozen=True):
    page_size: int  # token places in a page
    kv_groups: tuple[KVGroup, ...]
    max_model_len: int  # tokens of prompt and output of one request
    max_running_requests: int  # slots of the request table
    max_queued_requests: int  # requests that may wait before new ones are refused
    chunked_prefill_size: int  # prompt tokens that one step computes at most, over all its prefill rows
    count_rows: int  # running requests that may have penalties: rows of token counts
    logits_rows: int  # rows of logits that exist at once

    @property
    def page_table_columns(self) -> int:
        """Pages of the longest request."""
        return pages_for(self.max_model_len, self.page_size)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the largest group has places for."""
        return self.page_size * max(group.num_pages for group in self.kv_groups)

    def most_pages(self, group: KVGroup, num_tokens: int) -> int:
        """Pages of `group` that a request of so many tokens holds at once, at most."""
        return held_pages(num_tokens, group.window, self.page_size, self.chunked_prefill_size)

    def check(self, num_rows: int, prefill_tokens: int, longest_row: int) -> None:
        """Raises ValueError if a step exceeds a bound. Called before anything of it is launched."""
        for what, value, bound in (
            ("rows", num_rows, self.max_running_requests),
            ("prefill tokens", prefill_tokens, self.chunked_prefill_size),
            ("tokens in one row", longest_row, self.max_model_len),
        ):
            if value > bound:
                raise ValueError(f"a step has {value} {what}, the bound is {bound}")


def pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


def held_pages(num_tokens: int, window: int, page_size: int, chunk: int) -> int:
    """Pages that a sequence of `num_tokens` holds at once: with a window, pages that its next tokens do not see are
    released. A chunk's first token sees the `window - 1` before it, which begin anywhere in a page."""
    whole = pages_for(num_tokens, page_size)
    return min(whole, pages_for(window + chunk, page_size) + 1) if window else whole
