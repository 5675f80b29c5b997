"""From what was asked, what the checkpoint is and what the machine is, to one plan; or to all conflicts at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

from surefoot.checkpoint.locate import HubModel
from surefoot.config.bounds import Bounds, KVGroup, held_pages
from surefoot.config.catalog import ATTENTION_BACKENDS, DTYPE_BYTES, FAMILIES, kv_pages_layout
from surefoot.config.engine_plan import CheckpointRef, EnginePlan, KVLayout, LinearKernel, Reason, ServerPlan
from surefoot.config.hardware import HardwareSpec
from surefoot.config.model_spec import ModelSpec, context_conflict, for_context
from surefoot.config.settings import Settings

CPU_MEM_FRACTION = 0.4  # the machine is shared with frontend, page cache and other programs
CPU_CHUNK = 256  # past it a prefill gains a few percent, and running requests wait longer for their next token
PAGE_SIZE = 16  # small enough that a prefix hit recomputes at most 15 tokens, large enough to be copied as a block
EXPECTED_TOKENS = 1024  # of a request, where only the memory says how many may run
QUEUE_FACTOR = 4  # waiting requests per running one
SAMPLING_BYTES = 32  # per logit of a sampling row: logits, noise and its integers
COUNT_ROWS = 64  # running requests with penalties
COUNT_BYTES = 5  # per token of the vocabulary: its count in the output, and whether it is in the prompt
CACHED_WINDOWS = 2  # pages of a windowed KV group per page that running requests hold of it
LOGITS_ROWS = 64  # at least: prompt logprobs are taken in slices of so many rows

T = TypeVar("T")


class PlanError(ValueError):
    """Lists every conflict of a configuration, each with a way out."""

    def __init__(self, conflicts: Iterable[str]) -> None:
        self.conflicts = tuple(conflicts)
        listed = "\n".join(f"  - {conflict}" for conflict in self.conflicts)
        super().__init__(f"this configuration cannot work:\n{listed}")


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
        weights=weight_bytes(model, weight_dtype, linear_kernel),
        activations=chunk * activation_bytes(model, _pick(settings.max_model_len, model.max_context)),
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
        raise PlanError(conflicts)
    return EnginePlan(
        checkpoint=checkpoint,
        load_format=settings.load_format,
        served_model_name=_served_name(settings, checkpoint),
        model=for_context(model, bounds.max_model_len),
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
        max_body_bytes=settings.max_body_mib << 20,
        drain_seconds=settings.drain_seconds,
        max_restarts=settings.max_restarts,
        log_level=settings.log_level,
        log_format=settings.log_format,
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


def weight_bytes(model: ModelSpec, weight_dtype: str, linear_kernel: LinearKernel) -> int:
    # The packed head is a copy of the embedding that rows are looked up in.
    tables = 1 if model.tied_embeddings and linear_kernel == "dense" else 2
    elements = model.num_linear_weights + tables * model.vocab_size * model.hidden_size
    return elements * DTYPE_BYTES[weight_dtype]


def activation_bytes(model: ModelSpec, longest: int) -> int:
    """Of one token of a prefill chunk, generously: the tensors of a layer that live at once are a few times the widest
    one; and attention masks the places of up to `longest` tokens, and holds their scores if it caps them."""
    layer = 16 * max(2 * model.intermediate_size, model.q_size + 2 * model.kv_size, model.hidden_size)
    scores = 3 * model.num_heads if model.attention_softcap else 0
    return layer + 4 * (1 + scores) * longest


class _Pages:
    """How many pages each KV group gets when the largest one has so many.

    A group with a window needs no more than its running requests hold at once, twice that so that prefixes stay
    cached. If no layer sees everything, the widest windows count as everything.
    """

    def __init__(self, model: ModelSpec, layout: KVLayout, page_size: int, chunk: int, longest: int) -> None:
        self._windows = tuple(kind.window for kind in model.layer_kinds)
        self._bytes_per_page = [count * page_size for count in layout.bytes_per_token]
        self._page_size = page_size
        self._chunk = chunk
        self._longest = longest
        widest = max(self._windows)
        self._is_whole = [window == 0 or (0 not in self._windows and window == widest) for window in self._windows]

    def held(self, num_tokens: int) -> tuple[int, ...]:
        """Pages that one request of so many tokens holds at once in each group, at most."""
        return tuple(held_pages(num_tokens, window, self._page_size, self._chunk) for window in self._windows)

    def groups(self, largest: int, running: int) -> tuple[KVGroup, ...]:
        held = self.held(self._longest)
        return tuple(
            KVGroup(window, largest if whole else min(largest, CACHED_WINDOWS * running * pages))
            for window, whole, pages in zip(self._windows, self._is_whole, held, strict=True)
        )

    def bytes_of(self, pages: Iterable[int]) -> int:
        return sum(count * size for count, size in zip(pages, self._bytes_per_page, strict=True))

    def fitting(self, memory: int, running: int) -> int:
        """Pages of the largest group with which all groups fit `memory` bytes."""

        def needed(largest: int) -> int:
            return self.bytes_of(group.num_pages for group in self.groups(largest, running))

        return max(0, bisect_right(range(memory // min(self._bytes_per_page) + 2), memory, key=needed) - 1)


def _bounds(
    settings: Settings, model: ModelSpec, layout: KVLayout, memory: Memory, chunk: int, conflicts: list[str]
) -> Bounds:
    page_size = _pick(settings.page_size, PAGE_SIZE)
    pages = _Pages(model, layout, page_size, chunk, _pick(settings.max_model_len, model.max_context))
    left = memory.budget - memory.weights - memory.activations
    fitting = left // (pages.bytes_of(pages.held(EXPECTED_TOKENS)) + memory.per_row)
    if settings.kv_cache_tokens != "auto":
        fitting = min(fitting, settings.kv_cache_tokens // EXPECTED_TOKENS)
    running = _pick(settings.max_running_requests, max(1, fitting))
    count_rows = _pick(settings.max_penalised_requests, min(running, COUNT_ROWS))
    left -= running * memory.per_row + count_rows * model.vocab_size * COUNT_BYTES
    fitting_pages = pages.fitting(left, running)
    num_pages = _pick(settings.kv_cache_tokens, fitting_pages * page_size) // page_size
    max_len = _pick(settings.max_model_len, max(2, min(model.max_context, num_pages * page_size)))
    bounds = Bounds(
        page_size=page_size,
        kv_groups=pages.groups(num_pages, running),
        max_model_len=max_len,
        max_running_requests=running,
        max_queued_requests=_pick(settings.max_queued_requests, QUEUE_FACTOR * running),
        chunked_prefill_size=chunk,
        count_rows=count_rows,
        logits_rows=max(running, LOGITS_ROWS),
    )
    if conflict := context_conflict(model, max_len):
        conflicts.append(conflict)
    if count_rows > running:
        conflicts.append(
            f"--max-penalised-requests {count_rows} is more than the {running} requests that may run: lower it"
        )
    if num_pages > fitting_pages:
        conflicts.append(
            f"--kv-cache-tokens {settings.kv_cache_tokens} is more than the {fitting_pages * page_size} that fit "
            f"{_gib(memory.budget)} of memory: lower it, or raise --mem-fraction"
        )
    conflicts += _page_conflicts(bounds, memory)
    return bounds


def _page_conflicts(bounds: Bounds, memory: Memory) -> Iterator[str]:
    """Nobody runs for ever without a page: one request of the longest kind fits, and so do all running ones."""
    if bounds.kv_tokens == 0:
        yield (
            f"{_gib(memory.budget)} of memory hold the weights ({_gib(memory.weights)}) and not one page of "
            f"{bounds.page_size} tokens: raise --mem-fraction"
        )
        return
    for group in bounds.kv_groups:
        needed = max(bounds.max_running_requests, bounds.most_pages(group, bounds.max_model_len))
        if group.num_pages < needed:
            yield (
                f"the KV cache has {group.num_pages} pages of {bounds.page_size} tokens ({_gib(memory.budget)} of "
                f"memory, less {_gib(memory.weights)} of weights), and --max-model-len {bounds.max_model_len} with "
                f"--max-running-requests {bounds.max_running_requests} needs {needed}: raise --mem-fraction or "
                "--kv-cache-tokens, or lower these"
            )


def _bounds_reasons(settings: Settings, bounds: Bounds, memory: Memory, layout: KVLayout) -> list[Reason]:
    per_token = " + ".join(map(str, layout.bytes_per_token))
    budget = f"{_gib(memory.budget)} less {_gib(memory.weights)} of weights, at {per_token} bytes a token"
    whys = {
        "page_size": "a prefix hit recomputes less than one page",
        "max_model_len": "the model's context, if the KV cache holds it",
        "max_running_requests": f"what the KV cache holds at {EXPECTED_TOKENS} tokens each",
        "max_queued_requests": f"{QUEUE_FACTOR} per running one",
    }
    asked = msgspec.structs.asdict(settings)
    values = msgspec.structs.asdict(bounds)
    reasons = []
    for group in bounds.kv_groups:
        name = f"num_pages (window {group.window})" if group.window else "num_pages"
        why = f"{group.num_pages * bounds.page_size} tokens: {budget}"
        if settings.kv_cache_tokens != "auto":
            why = "asked for"
        elif group.num_pages * bounds.page_size < bounds.kv_tokens:
            why = f"{CACHED_WINDOWS} times what running requests hold of their window"
        reasons.append(Reason(name, str(group.num_pages), why))
    for field, why in whys.items():
        reasons.append(Reason(field, str(values[field]), why if asked[field] == "auto" else "asked for"))
    why = (
        f"at most {COUNT_ROWS}: each has a row of counts" if settings.max_penalised_requests == "auto" else "asked for"
    )
    reasons.append(Reason("count_rows", str(bounds.count_rows), why))
    return reasons


def _served_name(settings: Settings, checkpoint: CheckpointRef) -> str:
    if settings.served_model_name != "auto":
        return settings.served_model_name
    if settings.model == "default":
        return "SmolLM2-135M-Instruct"
    path = Path(checkpoint.path)
    hub_model = HubModel.parse(settings.model)
    if hub_model is not None and not path.match(settings.model):  # it lies in the cache, under the name of its commit
        return hub_model.repo
    return path.stem if checkpoint.format == "gguf" else path.name


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
