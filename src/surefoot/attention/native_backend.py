"""The native kernels' record of a step: where each row begins, and where its pages are listed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from surefoot.attention.forward_inputs import AttentionMetadata, Rows
from surefoot.native.kernels import ROW


@dataclass(frozen=True)
class NativeMetadata(AttentionMetadata):
    rows: npt.NDArray[np.void]  # [KV groups, rows] of struct row; it points into `page_tables`
    page_tables: Tensor


def native_metadata(rows: Rows, page_tables: Tensor) -> NativeMetadata:
    """page_tables: [KV groups, slots, columns] int64, contiguous."""
    slots = (*rows.decode_slots, *(span.slot for span in rows.prefill))
    decode = len(rows.decode_slots)
    counts = np.ones(len(slots), np.int32)
    counts[decode:] = [span.num_tokens for span in rows.prefill]
    groups, num_slots, columns = page_tables.shape
    made = np.empty((groups, len(slots)), ROW)
    made["first"] = np.cumsum(counts) - counts
    made["count"] = counts
    made["start"] = [length - 1 for length in rows.decode_lengths] + [span.start for span in rows.prefill]
    of_row = np.arange(groups)[:, None] * num_slots + np.array(slots)
    made["pages"] = page_tables.data_ptr() + of_row * (columns * page_tables.itemsize)
    return NativeMetadata(made, page_tables)
