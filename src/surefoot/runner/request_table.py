"""What the device knows of each slot: pages, last token, sampling. Written by step plans alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from surefoot.config.bounds import Bounds
from surefoot.protocol.messages import Sampling
from surefoot.protocol.step_plan import Admission, StepPlan

NO_OWNER = Admission(
    slot=-1,
    request_id=-1,
    sampling=Sampling(temperature=0, top_k=0, top_p=1, min_p=0, seed=0),
    stop_ids=(),
    min_tokens=0,
)


class RequestTable:
    def __init__(self, bounds: Bounds, sink_page: int, device: torch.device) -> None:
        self._sink_page = sink_page
        slots = bounds.max_running_requests

        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(slots, dtype=dtype, device=device)

        self.page_table = torch.zeros(slots, bounds.page_table_columns, dtype=torch.int64, device=device)
        self.last_token = column(torch.int64)  # sampled last, input of the slot's next decode row
        self.temperature = column(torch.float32)
        self.top_k = column(torch.int64)
        self.top_p = column(torch.float32)
        self.min_p = column(torch.float32)
        self.seed = column(torch.int64)
        # The host's copy: which sampler a step needs is decided without asking the device.
        self.owners = [NO_OWNER] * slots

    def apply(self, plan: StepPlan) -> None:
        """Takes over all that `plan` says about slots and pages."""
        for admission in plan.admissions:
            slot, sampling = admission.slot, admission.sampling
            self.owners[slot] = admission
            self.temperature[slot] = sampling.temperature
            self.top_k[slot] = sampling.top_k
            self.top_p[slot] = sampling.top_p
            self.min_p[slot] = sampling.min_p
            self.seed[slot] = sampling.seed
        if plan.page_appends:
            slots, columns, pages = torch.tensor(plan.page_appends).unbind(-1)
            self.page_table[slots, columns] = pages
        for row in plan.prefill:
            if row.pages:
                self.page_table[row.slot, row.first_page : row.first_page + len(row.pages)] = torch.tensor(row.pages)

    def disown(self, slots: Iterable[int]) -> None:
        """After a step that raised, half applied perhaps: rows of its slots may already be in flight. Until a slot is
        admitted anew, they write to the sink page, and what they sample means nothing."""
        for slot in slots:
            self.owners[slot] = NO_OWNER
            self.page_table[slot] = self._sink_page
