"""The compiled kernels as Python sees them: structures and functions of surefoot.h."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import weakref
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

WeightFormat = Literal["w4", "w8", "w16", "w32"]
FORMATS: dict[WeightFormat, int] = {"w4": 0, "w8": 1, "w16": 2, "w32": 3}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
HUGE_PAGE = 2 << 20

# struct row, which steps have many of.
ROW = np.dtype([("first", "i4"), ("count", "i4"), ("start", "i4"), ("pages", "u8")], align=True)


class Linear(ctypes.Structure):
    _fields_ = (
        ("format", c_int32),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("panels", c_void_p),
        ("bias", c_void_p),
    )


class Attention(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("q", "out", "keys", "values", "rows")),
        *((name, c_int32) for name in ("num_rows", "q_stride", "heads", "kv_heads", "head_dim", "page_size", "window")),
        ("scale", c_float),
        ("softcap", c_float),
    )


class Rope(ctypes.Structure):
    _fields_ = (("inverse_frequencies", c_void_p), ("size", c_int32), ("magnitude", c_float))


class KVWrite(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "qk_norm", "tables", "keys", "values", "places")),
        *((name, c_int32) for name in ("tokens", "heads", "kv_heads", "head_dim", "rotated")),
        ("norm_eps", c_float),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("attention_norm", "mlp_norm", "post_attention_norm", "post_mlp_norm", "qk_norm")
        ),
        *((name, Linear) for name in ("qkv", "attention_out", "gate_up", "down")),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("kv_group", c_int32),
        ("rope", c_int32),
    )


class Decoder(ctypes.Structure):
    _fields_ = (
        *(
            (name, c_int32)
            for name in (
                "num_layers",
                "hidden",
                "intermediate",
                "heads",
                "kv_heads",
                "head_dim",
                "page_size",
                "activation",
                "num_ropes",
            )
        ),
        *(
            (name, c_float)
            for name in ("norm_eps", "attention_scale", "attention_softcap", "embedding_scale", "logits_softcap")
        ),
        ("layers", POINTER(Layer)),
        ("ropes", POINTER(Rope)),
        ("windows", POINTER(c_int32)),
        ("norm", c_void_p),
        ("embedding", Linear),
        ("lm_head", Linear),
    )


class Step(ctypes.Structure):
    _fields_ = (
        ("tokens", c_int32),
        ("num_rows", c_int32),
        *((name, c_void_p) for name in ("token_ids", "positions", "places", "rows", "hidden", "buffer")),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pool_create": (c_void_p, (c_int32,)),
    "pool_destroy": (None, (c_void_p,)),
    "linear_bytes": (c_int64, (POINTER(Linear),)),
    "linear_pack": (None, (POINTER(Linear), c_void_p, c_int64, c_int64)),
    "linear_row": (None, (POINTER(Linear), c_int64, c_void_p)),
    "linear": (None, (c_void_p, POINTER(Linear), c_void_p, c_int32, c_void_p, c_int32)),
    "attention": (None, (c_void_p, POINTER(Attention))),
    "rms_norm": (None, (c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_float, c_void_p)),
    "activation_mul": (None, (c_void_p, c_void_p, c_int32, c_int32, c_int32, c_void_p)),
    "add": (None, (c_void_p, c_void_p, c_void_p, c_int64)),
    "soft_cap": (None, (c_void_p, c_void_p, c_int64, c_float)),
    "rope_tables": (None, (c_void_p, POINTER(Rope), c_void_p, c_int32, c_void_p)),
    "rotate_and_write": (None, (c_void_p, POINTER(KVWrite))),
    "greedy": (None, (c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_void_p)),
    "decoder_buffer_floats": (c_int64, (POINTER(Decoder), c_int32)),
    "decoder_forward": (None, (c_void_p, POINTER(Decoder), POINTER(Step))),
    "decoder_logits": (None, (c_void_p, POINTER(Decoder), c_void_p, c_int32, c_void_p)),
}


class Kernels:
    """The library with a team of threads. Calls are made from one thread at a time."""

    def __init__(self, library: Path, threads: int) -> None:
        """OSError if the library cannot be loaded, MemoryError if there is none for the team."""
        self.lib = ctypes.CDLL(str(library))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.lib, name)
            function.restype, function.argtypes = result, arguments
        self.pool: int | None = self.lib.pool_create(threads)
        if self.pool is None:
            raise MemoryError("no memory for the kernels' threads")
        weakref.finalize(self, self.lib.pool_destroy, self.pool)

    def pack(self, format: WeightFormat, rows: npt.NDArray[Any], inputs: int) -> PackedWeight:
        """rows: [outputs, ...], contiguous, of what `format` takes (see linear_pack in surefoot.h)."""
        weight = PackedWeight(self, format, inputs, len(rows))
        weight.pack(rows, 0)
        return weight


class PackedWeight:
    """A matrix [outputs, inputs] in the kernels' order; owns the memory."""

    def __init__(self, kernels: Kernels, format: WeightFormat, inputs: int, outputs: int) -> None:
        self._kernels = kernels
        self.struct = Linear(FORMATS[format], inputs, outputs, None, None)
        self._memory = zeros_in_huge_pages(kernels.lib.linear_bytes(self.struct))
        self.struct.panels = self._memory.ctypes.data

    def pack(self, rows: npt.NDArray[Any], first: int) -> None:
        assert rows.flags.c_contiguous
        self._kernels.lib.linear_pack(self.struct, rows.ctypes.data, first, len(rows))


def zeros_in_huge_pages(size: int) -> npt.NDArray[np.uint8]:
    """`size` bytes from a page's edge on, which the system hands out when they are first written. Raises MemoryError.

    In pages of 2 MiB where it has them: weights and caches are read from end to end in every step, and looking up where
    each 4 KiB of them are takes long.
    """
    whole = max(1, -(-size // HUGE_PAGE)) * HUGE_PAGE
    try:
        memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {whole} bytes") from error
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, size)
