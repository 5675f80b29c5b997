"""A decoder with a cache, driven without scheduler and runner: sequences in slots, any rows in a step.

Pages are dealt at random. Columns that no later token sees are released at once, and columns that have no page yet
name the poison page, full of NaN: whatever reads one of them shows. Pages are handed out full of old numbers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from surefoot.attention.forward_inputs import ForwardInputs, PrefillSpan, Rows
from surefoot.attention.kv_cache import KVCache
from surefoot.attention.native_backend import native_metadata
from surefoot.attention.torch_backend import TorchBackend, TorchMetadata
from surefoot.checkpoint.locate import CheckpointFormat
from surefoot.config.bounds import Bounds, KVGroup
from surefoot.config.engine_plan import CheckpointRef, LinearKernel
from surefoot.config.model_readers import read_model_spec
from surefoot.config.model_spec import ModelSpec, for_context
from surefoot.layers.linear import LinearScheme
from surefoot.models.decoder import Decoder
from surefoot.models.native_decoder import NativeDecoder
from surefoot.models.registry import weight_rules
from surefoot.native.kernels import Kernels
from surefoot.runner.weight_loader import CheckpointWeights, GGUFTensors, SafetensorsTensors
from tests.native_kernels import native_library

SLOTS = 6
PAGES = 160  # of a group


def format_of(path: Path) -> CheckpointFormat:
    return "gguf" if path.suffix == ".gguf" else "safetensors"


def read_spec(path: Path) -> ModelSpec:
    return read_model_spec(CheckpointRef(str(path), format_of(path)))


class Sequences:
    def __init__(
        self,
        path: Path,
        max_model_len: int = 0,
        kernels: LinearKernel = "dense",
        weight_dtype: str = "float32",
        page_size: int = 16,
        seed: int = 0,
    ) -> None:
        spec = read_spec(path)
        self.spec = for_context(spec, max_model_len or spec.max_context)
        self.page_size = page_size
        self.random = random.Random(seed)
        groups = tuple(KVGroup(kind.window, PAGES) for kind in self.spec.layer_kinds)
        self.bounds = Bounds(
            page_size=page_size,
            kv_groups=groups,
            max_model_len=self.spec.max_context,
            max_running_requests=SLOTS,
            max_queued_requests=1,
            chunked_prefill_size=self.spec.max_context,
            count_rows=1,
            logits_rows=1,
        )
        format = format_of(path)
        file = GGUFTensors(path) if format == "gguf" else SafetensorsTensors(path)
        weights = CheckpointWeights(file, weight_rules(self.spec, format), lambda *_: None)
        with torch.inference_mode():
            self.cache = KVCache.allocate(self.spec, self.bounds, torch.float32)
            self.model: Decoder[TorchMetadata] | NativeDecoder
            if kernels == "native":
                library = Kernels(native_library(), threads=2)
                most_tokens = self.spec.max_context + SLOTS
                self.model = NativeDecoder(
                    self.spec, weights, weight_dtype, self.cache, page_size, most_tokens, library
                )
                self.make_metadata = native_metadata
            else:
                scheme = LinearScheme(kernels, {"float32": torch.float32, "float16": torch.float16}[weight_dtype])
                backend = TorchBackend(page_size, groups, torch.float32)
                self.model = Decoder(self.spec, weights, scheme, backend, torch.float32)
                self.make_metadata = backend.make
            for layer in self.cache.layers:
                layer.keys.normal_(std=10)
                layer.values.normal_(std=10)
                layer.keys[PAGES] = torch.nan
                layer.values[PAGES] = torch.nan
        self.tables = torch.full((len(groups), SLOTS, self.bounds.page_table_columns), PAGES)
        self.free = [self.random.sample(range(PAGES), PAGES) for _ in groups]
        self.lengths = [0] * SLOTS

    @torch.inference_mode()
    def step(self, decode: Sequence[tuple[int, int]] = (), prefill: Sequence[tuple[int, list[int]]] = ()) -> Tensor:
        """(slot, token) of each decode row, (slot, tokens) of each prefill row. Returns the logits of all tokens,
        [tokens, vocab]."""
        rows = [(slot, [token]) for slot, token in decode] + list(prefill)
        starts = {slot: self.lengths[slot] for slot, _ in rows}
        for slot, tokens in rows:
            self._grow(slot, len(tokens))
        slots = torch.tensor([slot for slot, tokens in rows for _ in tokens])
        positions = torch.tensor([starts[slot] + i for slot, tokens in rows for i in range(len(tokens))])
        pages = self.tables[:, slots, positions // self.page_size]
        attended = Rows(
            decode_slots=tuple(slot for slot, _ in decode),
            decode_lengths=tuple(starts[slot] + 1 for slot, _ in decode),
            prefill=tuple(PrefillSpan(slot, starts[slot], len(tokens)) for slot, tokens in prefill),
        )
        inputs = ForwardInputs(
            token_ids=torch.tensor([token for _, tokens in rows for token in tokens]),
            positions=positions,
            places=pages * self.page_size + positions % self.page_size,
            sample_rows=torch.arange(len(slots)),
            attention=self.make_metadata(attended, self.tables),
        )
        logits = self.model.logits(self.model.forward(inputs, self.cache)).clone()
        for slot, _ in rows:
            self._release(slot)
        return logits

    def _grow(self, slot: int, count: int) -> None:
        """Gives pages to all columns that the slot's next `count` tokens see or are written to."""
        start = self.lengths[slot]
        self.lengths[slot] += count
        for group, free in enumerate(self.free):
            first = self._first_seen(group, start) // self.page_size
            for column in range(first, -(-self.lengths[slot] // self.page_size)):
                if self.tables[group, slot, column] == PAGES:
                    self.tables[group, slot, column] = free.pop()
                    self.cache.clear(group, [int(self.tables[group, slot, column])])

    def _release(self, slot: int) -> None:
        for group, free in enumerate(self.free):
            for column in range(self._first_seen(group, self.lengths[slot]) // self.page_size):
                page = int(self.tables[group, slot, column])
                if page != PAGES:
                    free.append(page)
                    self.tables[group, slot, column] = PAGES

    def _first_seen(self, group: int, position: int) -> int:
        window = self.bounds.kv_groups[group].window
        return max(0, position + 1 - window) if window else 0

    def chunked(self, tokens: list[int], chunk: int, slot: int = 0) -> Tensor:
        """All logits of a new sequence that is prefilled in chunks."""
        self.forget(slot)
        chunks = [tokens[start : start + chunk] for start in range(0, len(tokens), chunk)]
        return torch.cat([self.step(prefill=[(slot, part)]) for part in chunks])

    def forget(self, slot: int) -> None:
        for group, free in enumerate(self.free):
            free += [page for page in self.tables[group, slot].tolist() if page != PAGES]
        self.tables[:, slot] = PAGES
        self.lengths[slot] = 0

    def greedy(self, tokens: list[int], count: int, slot: int = 0) -> list[int]:
        """`count` tokens after `tokens`, one decode step each."""
        out = [int(self.chunked(tokens, len(tokens), slot)[-1].argmax())]
        while len(out) < count:
            out.append(int(self.step(decode=[(slot, out[-1])])[-1].argmax()))
        return out
