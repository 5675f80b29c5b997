"""From what was asked, what the checkpoint is and what the machine is, to one plan; or to all conflicts at once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

from surefoot.config.bounds import Bounds
from surefoot.config.catalog import ATTENTION_BACKENDS, DTYPE_BYTES, FAMILIES, kv_pages_layout
from surefoot.config.engine_plan import CheckpointRef, EnginePlan, KVLayout, LinearKernel, Reason, ServerPlan
from surefoot.config.hardware import HardwareSpec
from surefoot.config.model_spec import ModelSpec
from surefoot.config.settings import Settings

CPU_MEM_FRACTION = 0.4  # the machine is shared with frontend, page cache and other programs
CPU_CHUNK = 256  # past it a prefill gains a few percent, and running requests wait longer for their next token
PAGE_SIZE = 16  # small enough that a prefix hit recomputes at most 15 tokens, large enough to be copied as a block
EXPECTED_TOKENS = 1024  # of a request, where only the memory says how many may run
QUEUE_FACTOR = 4  # waiting requests per running one
SAMPLING_BYTES = 32  # per logit of a sampling row: logits, noise and its integers

T = TypeVar("T")


class PlanError(ValueError):
    """Lists every conflict of a configuration, each with a way out."""


class Memory(Struct, frozen=True):
    """Bytes, before anything is allocated."""

    budget: int
    weights: int
    activations: int  # of the largest prefill chunk
    per_row: int  # of a running request, besides its KV


def resolve(settings: Settings, checkpoint: CheckpointRef, model: ModelSpec, hardware: HardwareSpec) -> EnginePlan:
    """Raises PlanError."""
    reasons: list[Reason] = []
    conflicts: list[str] = []

    def choose(field: str, asked: T | Literal["auto"], automatic: T, why: str) -> T:
        reasons.append(Reason(field, str(_pick(asked, automatic)), why if asked == "auto" else "asked for"))
        return _pick(asked, automatic)

    if model.family not in FAMILIES:
        conflicts.append(f"the model family {model.family!r} is not implemented; there is {', '.join(FAMILIES)}")
    device = choose("device", settings.device, "cpu", "the only one implemented")
    dtype = choose("dtype", settings.dtype, "float32", "CPUs compute in it, and rounding activations changes answers")
    weight_dtype = choose("weight_dtype", settings.weight_dtype, *_weight_dtype(hardware))
    linear_kernel = _linear_kernel(weight_dtype, hardware, reasons, conflicts)
    backend = choose("attention_backend", settings.attention_backend, "torch", "the portable one")
    layout = kv_pages_layout(model, dtype)
    if layout.name not in ATTENTION_BACKENDS[backend].kv_layouts or dtype not in ATTENTION_BACKENDS[backend].dtypes:
        conflicts.append(f"attention backend {backend} does not read {layout.name} in {dtype}")
    fraction = choose("mem_fraction", settings.mem_fraction, CPU_MEM_FRACTION, "leaves room for other programs")
    chunk = choose(
        "chunked_prefill_size", settings.chunked_prefill_size, CPU_CHUNK, "bounds how long running requests wait for it"
    )
    budget = int(hardware.memory_available * fraction)
    memory = Memory(
        budget=budget,
        weights=_weight_bytes(model, weight_dtype, linear_kernel),
        activations=chunk * _activation_bytes(model),
        per_row=model.vocab_size * SAMPLING_BYTES,
    )
    bounds = _bounds(settings, model, layout, memory, chunk, conflicts)
    reasons += _bounds_reasons(settings, bounds, memory, layout)
    threads = choose("num_threads", settings.threads, hardware.num_cpus, "CPUs that this process may use")
    if threads > hardware.num_cpus:
        conflicts.append(f"--threads {threads} is more than the {hardware.num_cpus} CPUs of this process: lower it")
    if settings.disable_prefix_cache:
        reasons.append(Reason("prefix_cache", "off", "asked for"))
    lookahead = choose("lookahead", settings.lookahead, 1, "planning and sending overlap with the step")
    if conflicts:
        raise PlanError("this configuration cannot work:\n" + "\n".join(f"  - {conflict}" for conflict in conflicts))
    return EnginePlan(
        checkpoint=checkpoint,
        load_format=settings.load_format,
        served_model_name=_served_name(settings, checkpoint),
        model=model,
        hardware=hardware,
        device=device,
        num_threads=threads,
        dtype=dtype,
        weight_dtype=weight_dtype,
        linear_kernel=linear_kernel,
        attention_backend=backend,
        kv_layout=layout,
        bounds=bounds,
        prefix_cache=not settings.disable_prefix_cache,
        lookahead=lookahead,
        seed=settings.seed,
        reasons=tuple(reasons),
    )


def _pick(asked: T | Literal["auto"], automatic: T) -> T:
    return automatic if asked == "auto" else asked


def server_plan(settings: Settings, engine: EnginePlan) -> ServerPlan:
    return ServerPlan(
        engine=engine,
        host=settings.host,
        port=settings.port,
        api_key=settings.api_key,
        drain_seconds=settings.drain_seconds,
        log_level=settings.log_level,
    )


def _has_fp16_kernel(hardware: HardwareSpec) -> bool:
    return hardware.machine == "x86_64" and {"avx2", "fma", "f16c"} <= set(hardware.cpu_features)


def _weight_dtype(hardware: HardwareSpec) -> tuple[Literal["float16", "float32"], str]:
    if _has_fp16_kernel(hardware):
        return "float16", "this CPU has AVX2 and F16C: half the bytes, activations and sums stay float32"
    return "float32", "float16 weights need AVX2 and F16C, which this CPU lacks"


def _linear_kernel(
    weight_dtype: str, hardware: HardwareSpec, reasons: list[Reason], conflicts: list[str]
) -> LinearKernel:
    if weight_dtype == "float32":
        reasons.append(Reason("linear_kernel", "dense", "torch's own product for float32 weights"))
        return "dense"
    if not _has_fp16_kernel(hardware):
        conflicts.append(
            f"--weight-dtype float16 needs an x86 CPU with AVX2 and F16C, this is {hardware.cpu_name}: use float32"
        )
    reasons.append(Reason("linear_kernel", "fp16_packed", "the product for float16 weights on x86"))
    return "fp16_packed"


def _weight_bytes(model: ModelSpec, weight_dtype: str, linear_kernel: LinearKernel) -> int:
    # The packed head is a copy of the embedding that rows are looked up in.
    tables = 1 if model.tied_embeddings and linear_kernel == "dense" else 2
    elements = model.num_linear_weights + tables * model.vocab_size * model.hidden_size
    return elements * DTYPE_BYTES[weight_dtype]


def _activation_bytes(model: ModelSpec) -> int:
    """Of one token, generously: the tensors of a layer that live at once are a few times the widest one."""
    return 16 * max(2 * model.intermediate_size, model.q_size + 2 * model.kv_size, model.hidden_size)


def _bounds(
    settings: Settings, model: ModelSpec, layout: KVLayout, memory: Memory, chunk: int, conflicts: list[str]
) -> Bounds:
    page_size = _pick(settings.page_size, PAGE_SIZE)
    left = memory.budget - memory.weights - memory.activations
    fitting = left // (EXPECTED_TOKENS * layout.bytes_per_token + memory.per_row)
    if settings.kv_cache_tokens != "auto":
        fitting = min(fitting, settings.kv_cache_tokens // EXPECTED_TOKENS)
    running = _pick(settings.max_running_requests, max(1, fitting))
    fitting_pages = max(0, left - running * memory.per_row) // (page_size * layout.bytes_per_token)
    num_pages = _pick(settings.kv_cache_tokens, fitting_pages * page_size) // page_size
    max_len = _pick(settings.max_model_len, max(2, min(model.max_context, num_pages * page_size)))
    if max_len > model.max_context:
        conflicts.append(f"--max-model-len {max_len} is more than the model's context of {model.max_context}: lower it")
    if num_pages > fitting_pages:
        conflicts.append(
            f"--kv-cache-tokens {settings.kv_cache_tokens} is more than the {fitting_pages * page_size} that fit "
            f"{_gib(memory.budget)} of memory: lower it, or raise --mem-fraction"
        )
    needed = max(running, math.ceil(max_len / page_size))
    if num_pages == 0:
        conflicts.append(
            f"{_gib(memory.budget)} of memory hold the weights ({_gib(memory.weights)}) and not one page of "
            f"{page_size} tokens: raise --mem-fraction"
        )
    elif num_pages < needed:
        conflicts.append(
            f"the KV cache has {num_pages} pages of {page_size} tokens ({_gib(memory.budget)} of memory, less "
            f"{_gib(memory.weights)} of weights), and --max-model-len {max_len} with --max-running-requests {running} "
            f"needs {needed}: raise --mem-fraction or --kv-cache-tokens, or lower these"
        )
    return Bounds(
        page_size=page_size,
        num_pages=num_pages,
        max_model_len=max_len,
        max_running_requests=running,
        max_queued_requests=QUEUE_FACTOR * running
        if settings.max_queued_requests == "auto"
        else settings.max_queued_requests,
        chunked_prefill_size=chunk,
    )


def _bounds_reasons(settings: Settings, bounds: Bounds, memory: Memory, layout: KVLayout) -> list[Reason]:
    budget = f"{_gib(memory.budget)} less {_gib(memory.weights)} of weights, at {layout.bytes_per_token} bytes a token"
    whys = {
        "page_size": "a prefix hit recomputes less than one page",
        "max_model_len": "the model's context, if the KV cache holds it",
        "max_running_requests": f"what the KV cache holds at {EXPECTED_TOKENS} tokens each",
        "max_queued_requests": f"{QUEUE_FACTOR} per running one",
    }
    asked = msgspec.structs.asdict(settings)
    values = msgspec.structs.asdict(bounds)
    why_pages = f"{bounds.kv_tokens} tokens: {budget}" if settings.kv_cache_tokens == "auto" else "asked for"
    reasons = [Reason("num_pages", str(bounds.num_pages), why_pages)]
    for field, why in whys.items():
        reasons.append(Reason(field, str(values[field]), why if asked[field] == "auto" else "asked for"))
    return reasons


def _served_name(settings: Settings, checkpoint: CheckpointRef) -> str:
    if settings.served_model_name != "auto":
        return settings.served_model_name
    if settings.model == "default":
        return "SmolLM2-135M-Instruct"
    path = Path(checkpoint.path)
    return path.stem if checkpoint.format == "gguf" else path.name


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
