"""Executes step plans on one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from surefoot.attention.forward_inputs import AttentionMetadata, ForwardInputs, Rows
from surefoot.attention.kv_cache import KVCache
from surefoot.attention.native_backend import native_metadata
from surefoot.attention.torch_backend import TorchBackend
from surefoot.config.catalog import ATTENTION_BACKENDS
from surefoot.config.engine_plan import EnginePlan
from surefoot.config.paths import ExecutionPath, LogprobsKind, PrefixRegime, StepKind
from surefoot.layers.linear import LinearScheme
from surefoot.models.decoder import Decoder
from surefoot.models.native_decoder import NativeDecoder
from surefoot.native.kernels import Kernels
from surefoot.protocol.step_plan import StepDone, StepPlan
from surefoot.runner import input_builder
from surefoot.runner.logprobs import output_logprobs, prompt_logprobs
from surefoot.runner.request_table import RequestTable
from surefoot.runner.sampler import SamplingRows, sample
from surefoot.runner.weight_loader import open_weights

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Model(Protocol):
    """See models.decoder.Decoder."""

    def forward(self, inputs: ForwardInputs[Any], kv: KVCache) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]: ...


def _model(
    plan: EnginePlan, kv: KVCache, progress: Callable[[int, int], None]
) -> tuple[Model, Callable[[Rows, Tensor], AttentionMetadata]]:
    """The model that the plan names, and what makes its attention's record of a step."""
    weights = open_weights(plan, progress)
    if plan.native_library:
        library = Kernels(Path(plan.native_library), plan.num_threads)
        most_tokens = plan.bounds.chunked_prefill_size + plan.bounds.max_running_requests
        page_size = plan.bounds.page_size
        return NativeDecoder(
            plan.model, weights, plan.weight_dtype, kv, page_size, most_tokens, library
        ), native_metadata
    dtype = TORCH_DTYPES[plan.dtype]
    backend = TorchBackend(plan.bounds.page_size, plan.bounds.kv_groups, dtype)
    scheme = LinearScheme(plan.linear_kernel, TORCH_DTYPES[plan.weight_dtype])
    return Decoder(plan.model, weights, scheme, backend, dtype), backend.make


class ModelRunner:
    def __init__(self, plan: EnginePlan, progress: Callable[[int, int], None]) -> None:
        """Loads the weights and allocates the cache, for steps that run in the calling thread.

        `progress`: see CheckpointWeights.
        """
        # The native kernels have threads of their own, and a second team that waits for work would take their CPUs.
        torch.set_num_threads(1 if plan.native_library else plan.num_threads)
        self._plan = plan
        device = torch.device(plan.device)
        self._clears_pages = ATTENTION_BACKENDS[plan.attention_backend].reads_unseen
        with torch.inference_mode():
            self._kv = KVCache.allocate(plan.model, plan.bounds, TORCH_DTYPES[plan.kv_layout.dtype])
            self._model, self._make_metadata = _model(plan, self._kv, progress)
            self._table = RequestTable(plan.bounds, plan.model.vocab_size, device)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepDone:
        """Raises what the step raises; ValueError, before anything is launched, if the plan exceeds a bound."""
        try:
            return self._run(plan)
        except Exception:
            self._table.disown((*plan.decode_slots, *(row.slot for row in plan.prefill)))
            raise

    def _run(self, plan: StepPlan) -> StepDone:
        logits, rows, hidden = self.forward(plan)
        scored_logits = logits[list(rows.scored)] if rows.scored else logits[:0]  # a copy: sampling overwrites logits
        token_ids, finite = sample(logits, rows, self._table, self._model.greedy)
        self._table.append(rows.slots, token_ids)
        logprobs = output_logprobs(scored_logits, rows, token_ids)
        del logits, scored_logits  # Bounds.logits_rows is for all that exist at once
        return StepDone(
            step_id=plan.step_id,
            token_ids=tuple(token_ids.tolist()),
            finite=tuple(finite.tolist()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs(
                plan, self._table, hidden, self._model.logits, self._plan.bounds.logits_rows
            ),
            path=self.path(plan, rows).key,
        )

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> tuple[Tensor, SamplingRows, Tensor]:
        """The step without its last part. Returns fp32 logits [sampling rows, vocab], what these rows are, and the
        last hidden states of all tokens, [tokens, hidden]."""
        input_builder.check(plan, self._plan.bounds)
        self._table.apply(plan)
        if self._clears_pages:
            for group in range(len(self._plan.bounds.kv_groups)):
                self._kv.clear(group, input_builder.new_pages(plan, group, self._plan.bounds.page_size))
        inputs = input_builder.build(plan, self._table, self._plan.bounds.page_size, self._make_metadata)
        hidden = self._model.forward(inputs, self._kv)
        logits = self._model.logits(hidden.index_select(0, inputs.sample_rows))
        return logits, SamplingRows(plan, self._table), hidden

    def path(self, plan: StepPlan, rows: SamplingRows) -> ExecutionPath:
        """The path that `plan` takes; `rows`: its sampling rows."""
        kind = StepKind.MIXED if plan.decode_slots else StepKind.PREFILL
        if not plan.prefill:
            kind = StepKind.DECODE
        prefix = PrefixRegime.SOME if any(row.start for row in plan.prefill) else PrefixRegime.NONE
        logprobs = LogprobsKind.OUTPUT if rows.scored else LogprobsKind.NONE
        if any(row.targets for row in plan.prefill):
            logprobs = LogprobsKind.PROMPT
        return ExecutionPath(kind, prefix, self._plan.attention_backend, self._plan.linear_kernel, rows.kind, logprobs)
