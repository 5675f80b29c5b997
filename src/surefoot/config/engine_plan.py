"""Everything resolved: the one record that every process below `launch` works from. Never written to."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from surefoot.checkpoint.locate import CheckpointFormat
from surefoot.config.bounds import Bounds
from surefoot.config.hardware import HardwareSpec
from surefoot.config.model_spec import ModelSpec

LoadFormat = Literal["checkpoint", "dummy"]
LinearKernel = Literal["native", "fp16_packed", "dense"]


class CheckpointRef(Struct, frozen=True):
    path: str  # the GGUF file, or the Hugging Face directory
    format: CheckpointFormat


class Reason(Struct, frozen=True, array_like=True):
    """Why a setting has its value."""

    field: str
    value: str
    why: str


class KVLayout(Struct, frozen=True):
    """How keys and values lie in memory: declared here, owned by `attention.kv_cache`."""

    name: str
    dtype: str  # name of a torch dtype
    bytes_per_token: tuple[int, ...]  # over all layers of a KV group, for each group


class ThreadsSpeed(Struct, frozen=True):
    """Of the native kernels with so many threads, measured here."""

    threads: int
    bytes_per_second: float  # of weights that a product of one row reads
    flops: float  # of a product of many rows


class NativeKernels(Struct, frozen=True):
    """What a plan must know of the native kernels and of what they would hold."""

    library: str  # path of the library that was compiled for this machine; empty: there is none
    problem: str  # why there is none
    stored_bytes: int  # of the checkpoint's matrices if those stay quantised that kernels read; 0: none is quantised
    speeds: tuple[ThreadsSpeed, ...] = ()  # ascending numbers; empty: there is one CPU, or they are busy


class EnginePlan(Struct, frozen=True):
    checkpoint: CheckpointRef
    load_format: LoadFormat
    served_model_name: str
    model: ModelSpec
    hardware: HardwareSpec
    device: Literal["cpu"]
    num_threads: int
    dtype: str  # of activations: name of a torch dtype
    weight_dtype: str  # in which matrices are held; "stored": as the checkpoint has them, where a kernel reads that
    weight_bytes: int  # of all matrices
    linear_kernel: LinearKernel
    attention_backend: str  # key of config.catalog.ATTENTION_BACKENDS
    native_library: str  # path of the compiled kernels; empty if torch's compute
    kv_layout: KVLayout
    bounds: Bounds
    prefix_cache: bool
    lookahead: int  # 0 or 1
    seed: int  # of dummy weights, and of requests that bring none
    reasons: tuple[Reason, ...]


class ServerPlan(Struct, frozen=True):
    """What the frontend works from: the engine's plan, and how it is offered."""

    engine: EnginePlan
    host: str
    port: int
    api_key: str  # empty: no key is asked for
    max_body_bytes: int  # of a request
    drain_seconds: float  # how long running requests may go on after SIGTERM
    max_restarts: int  # of a dead process, within 10 minutes
    log_level: str
    log_format: Literal["text", "json"]
