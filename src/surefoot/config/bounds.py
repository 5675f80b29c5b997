"""The only place where a capacity is computed. Every buffer is sized from `Bounds`; a step is checked against it."""

from __future__ import annotations

from msgspec import Struct


class Bounds(Struct, frozen=True):
    page_size: int  # token places in a page
    num_pages: int  # pages of the KV cache
    max_model_len: int  # tokens of prompt and output of one request
    max_running_requests: int  # slots of the request table
    max_queued_requests: int  # requests that may wait before new ones are refused
    chunked_prefill_size: int  # prompt tokens that one step computes at most, over all its prefill rows

    @property
    def page_table_columns(self) -> int:
        """Pages of the longest request."""
        return -(-self.max_model_len // self.page_size)

    @property
    def kv_tokens(self) -> int:
        return self.num_pages * self.page_size

    def check(self, num_rows: int, prefill_tokens: int, longest_row: int) -> None:
        """Raises ValueError if a step exceeds a bound. Called before anything of it is launched."""
        for what, value, bound in (
            ("rows", num_rows, self.max_running_requests),
            ("prefill tokens", prefill_tokens, self.chunked_prefill_size),
            ("tokens in one row", longest_row, self.max_model_len),
        ):
            if value > bound:
                raise ValueError(f"a step has {value} {what}, the bound is {bound}")
