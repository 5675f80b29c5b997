"""What the device knows of each slot: pages, last token, sampling, counts of its tokens. Written by step plans, and by
what they sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from surefoot.config.bounds import Bounds
from surefoot.protocol.messages import GREEDY, NO_LOGPROBS
from surefoot.protocol.step_plan import NO_COUNT_ROW, NO_PAGE, Admission, StepPlan
from surefoot.runner.token_counts import TokenCounts

NO_OWNER = Admission(
    slot=-1,
    request_id=-1,
    sampling=GREEDY,
    stop_ids=(),
    min_tokens=0,
    logprobs=NO_LOGPROBS,
    prompt_logprobs=NO_LOGPROBS,
    count_row=NO_COUNT_ROW,
    prompt_length=0,
    history=(),
)
NO_BIAS = (torch.empty(0, dtype=torch.int64), torch.empty(0))


class RequestTable:
    def __init__(self, bounds: Bounds, vocab_size: int, device: torch.device) -> None:
        self._sink_pages = [group.num_pages for group in bounds.kv_groups]
        slots = bounds.max_running_requests

        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(slots, dtype=dtype, device=device)

        shape = (len(bounds.kv_groups), slots, bounds.page_table_columns)
        self.page_tables = torch.zeros(shape, dtype=torch.int64, device=device)
        self.last_token = column(torch.int64)  # sampled last, input of the slot's next decode row
        self.temperature = column(torch.float32)
        self.top_k = column(torch.int64)
        self.top_p = column(torch.float32)
        self.min_p = column(torch.float32)
        self.repetition_penalty = column(torch.float32)
        self.presence_penalty = column(torch.float32)
        self.frequency_penalty = column(torch.float32)
        self.seed = column(torch.int64)
        self.count_row = column(torch.int64)  # of token_counts; means something for slots with penalties only
        self.token_counts = TokenCounts(bounds.count_rows, vocab_size, device)
        self.biases = [NO_BIAS] * slots  # token ids [n] int64, and what is added to their logits [n] fp32
        # The host's copy: which sampler a step needs is decided without asking the device.
        self.owners = [NO_OWNER] * slots

    def apply(self, plan: StepPlan) -> None:
        """Takes over all that `plan` says about slots and pages."""
        for admission in plan.admissions:
            self._admit(admission)
        if plan.page_appends:
            groups, slots, columns, pages = torch.tensor(plan.page_appends).unbind(-1)
            self.page_tables[groups, slots, columns] = pages
        for row in plan.prefill:
            for run in row.pages:
                sink = self._sink_pages[run.group]
                pages = torch.tensor([sink if page == NO_PAGE else page for page in run.pages])
                self.page_tables[run.group, row.slot, run.column : run.column + len(pages)] = pages

    def _admit(self, admission: Admission) -> None:
        slot, sampling = admission.slot, admission.sampling
        self.owners[slot] = admission
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.repetition_penalty[slot] = sampling.repetition_penalty
        self.presence_penalty[slot] = sampling.presence_penalty
        self.frequency_penalty[slot] = sampling.frequency_penalty
        self.seed[slot] = sampling.seed
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            self.biases[slot] = (torch.tensor(ids), torch.tensor(values, dtype=torch.float32))
        if sampling.penalises:
            self.count_row[slot] = admission.count_row
            prompt, output = admission.history[: admission.prompt_length], admission.history[admission.prompt_length :]
            self.token_counts.rewrite(admission.count_row, prompt, output)

    def append(self, slots: Sequence[int], token_ids: Tensor) -> None:
        """Each slot has sampled a token: token_ids [slots] int64. It is counted before the next step samples."""
        index = torch.tensor(slots, dtype=torch.int64)
        self.last_token[index] = token_ids
        counted = [row for row, slot in enumerate(slots) if self.owners[slot].sampling.penalises]
        if counted:
            self.token_counts.add(self.count_row[index[counted]], token_ids[counted])

    def disown(self, slots: Iterable[int]) -> None:
        """After a step that raised, half applied perhaps: rows of its slots may already be in flight. Until a slot is
        admitted anew, they write to the sink page, and what they sample means nothing. It is not counted either: the
        count row of the slot's last owner may be somebody else's by now."""
        for slot in slots:
            self.owners[slot] = NO_OWNER
            for table, sink_page in zip(self.page_tables, self._sink_pages, strict=True):
                table[slot] = sink_page
