"""From what was asked, what the checkpoint is and what the machine is, to one plan; or to all conflicts at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

from surefoot.checkpoint.locate import HubModel
from surefoot.config import cpu_choices
from surefoot.config.bounds import Bounds, KVGroup, held_pages
from surefoot.config.catalog import ATTENTION_BACKENDS, DTYPE_BYTES, FAMILIES, kv_pages_layout
from surefoot.config.engine_plan import (
    CheckpointRef,
    EnginePlan,
    KVLayout,
    LinearKernel,
    NativeKernels,
    Reason,
    ServerPlan,
)
from surefoot.config.hardware import HardwareSpec
from surefoot.config.model_spec import ModelSpec, context_conflict, for_context
from surefoot.config.settings import OF_SERVER, Settings, in_words

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
ASKED_FOR = "asked for"

T = TypeVar("T")


class PlanError(ValueError):
    """Lists every conflict of a configuration, each with a way out."""

    def __init__(self, conflicts: Iterable[str]) -> None:
        self.conflicts = tuple(conflicts)
        listed = "\n".join(f"  - {conflict}" for conflict in self.conflicts)
        super().__init__(f"this configuration cannot work:\n{listed}")


class _Choices:
    """Takes what was asked for, else what is automatic, and writes down why."""

    def __init__(self) -> None:
        self.reasons: list[Reason] = []

    def choose(self, setting: str, asked: T | Literal["auto"], automatic: T, why: str) -> T:
        chosen = _pick(asked, automatic)
        self.reasons.append(Reason(setting, in_words(chosen), why if asked == "auto" else ASKED_FOR))
        return chosen


def _pick(asked: T | Literal["auto"], automatic: T) -> T:
    return automatic if asked == "auto" else asked


def given(settings: Settings, names: Container[str]) -> Iterator[Reason]:
    """Of settings that are not decided here: they have the value that was asked for, or their default."""
    for field in msgspec.structs.fields(Settings):
        if field.name in names:
            value = msgspec.structs.asdict(settings)[field.name]
            yield Reason(field.name, in_words(value), "default" if value == field.default else ASKED_FOR)


def resolve(
    settings: Settings,
    checkpoint: CheckpointRef,
    model: ModelSpec,
    hardware: HardwareSpec,
    native: NativeKernels,
) -> EnginePlan:
    """Raises PlanError."""
    choices = _Choices()
    choose = choices.choose
    served_model_name = choose(
        "served_model_name", settings.served_model_name, _model_name(settings, checkpoint), "what the model is called"
    )
    device = choose("device", settings.device, "cpu", "the only one implemented")
    dtype = choose("dtype", settings.dtype, "float32", "CPUs compute in it, and rounding activations changes answers")
    kernels = choose("cpu_kernels", settings.cpu_kernels, *cpu_choices.kernels(native))
    weight_dtype = choose("weight_dtype", settings.weight_dtype, *cpu_choices.weight_dtype(kernels, native, hardware))
    linear_kernel: LinearKernel = "fp16_packed" if weight_dtype == "float16" else "dense"
    if kernels == "native":
        linear_kernel = "native"
    threads = choose("threads", settings.threads, *cpu_choices.threads(kernels, native, hardware))
    lookahead = choose("lookahead", settings.lookahead, 1, "planning and sending overlap with the step")
    fraction = choose("mem_fraction", settings.mem_fraction, CPU_MEM_FRACTION, "leaves room for other programs")
    page_size = choose("page_size", settings.page_size, PAGE_SIZE, "a prefix hit recomputes less than one page")
    chunk = choose(
        "chunked_prefill_size", settings.chunked_prefill_size, CPU_CHUNK, "bounds how long running requests wait for it"
    )
    layout = kv_pages_layout(model, dtype)
    longest = _pick(settings.max_model_len, model.max_context)
    pages = _Pages(model, layout, page_size, chunk, longest)
    memory = _Memory(
        budget=int(hardware.memory_available * fraction),
        weights=weight_bytes(model, weight_dtype, linear_kernel, native.stored_bytes),
        activations=chunk * activation_bytes(model, longest),
        sampling_row=model.vocab_size * SAMPLING_BYTES,
        count_row=model.vocab_size * COUNT_BYTES,
    )
    bounds = _bounds(settings, model, memory, pages, choices)
    decided = {reason.field for reason in choices.reasons}
    undecided = {field.name for field in msgspec.structs.fields(Settings)} - decided - OF_SERVER
    plan = EnginePlan(
        checkpoint=checkpoint,
        load_format=settings.load_format,
        served_model_name=served_model_name,
        model=for_context(model, bounds.max_model_len),
        hardware=hardware,
        device=device,
        num_threads=threads,
        dtype=dtype,
        weight_dtype=weight_dtype,
        weight_bytes=memory.weights,
        linear_kernel=linear_kernel,
        attention_backend=kernels,
        native_library=native.library if kernels == "native" else "",
        kv_layout=layout,
        bounds=bounds,
        prefix_cache=not settings.disable_prefix_cache,
        lookahead=lookahead,
        seed=settings.seed,
        reasons=(*choices.reasons, *given(settings, undecided)),
    )
    if conflicts := [*_conflicts(plan, native), *_memory_conflicts(settings, bounds, memory, pages)]:
        raise PlanError(conflicts)
    return plan


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


def weight_bytes(model: ModelSpec, weight_dtype: str, linear_kernel: LinearKernel, stored_bytes: int) -> int:
    if weight_dtype == "stored":
        return stored_bytes
    # FBGEMM's packed head is a copy of the embedding that rows are looked up in.
    tables = 1 if model.tied_embeddings and linear_kernel != "fp16_packed" else 2
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
        self.page_size = page_size
        self.chunk = chunk
        self._longest = longest
        widest = max(self._windows)
        self._is_whole = [window == 0 or (0 not in self._windows and window == widest) for window in self._windows]

    def held(self, num_tokens: int) -> tuple[int, ...]:
        """Pages that one request of so many tokens holds at once in each group, at most."""
        return tuple(held_pages(num_tokens, window, self.page_size, self.chunk) for window in self._windows)

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


class _Memory(Struct, frozen=True):
    """Bytes, before anything is allocated. What requests do not need besides their KV is for pages."""

    budget: int
    weights: int
    activations: int  # of the largest prefill chunk
    sampling_row: int  # of a running request
    count_row: int  # of a running request with penalties

    @property
    def for_requests(self) -> int:
        return self.budget - self.weights - self.activations

    def rows(self, running: int, penalised: int) -> int:
        return running * self.sampling_row + penalised * self.count_row

    def for_pages(self, running: int, penalised: int) -> int:
        return self.for_requests - self.rows(running, penalised)


def _bounds(settings: Settings, model: ModelSpec, memory: _Memory, pages: _Pages, choices: _Choices) -> Bounds:
    choose = choices.choose
    running = choose(
        "max_running_requests",
        settings.max_running_requests,
        _expected_requests(settings, memory, pages),
        f"what the KV cache holds at {EXPECTED_TOKENS} tokens each",
    )
    penalised = choose(
        "max_penalised_requests",
        settings.max_penalised_requests,
        min(running, COUNT_ROWS),
        f"at most {COUNT_ROWS}: each has a row of counts",
    )
    left = memory.for_pages(running, penalised)
    kv_tokens = choose(
        "kv_cache_tokens",
        settings.kv_cache_tokens,
        pages.fitting(left, running) * pages.page_size,
        f"fills the {_gib(left)} that weights, activations and sampling leave of {_gib(memory.budget)}",
    )
    num_pages = kv_tokens // pages.page_size
    return Bounds(
        page_size=pages.page_size,
        kv_groups=pages.groups(num_pages, running),
        max_model_len=choose(
            "max_model_len",
            settings.max_model_len,
            max(2, min(model.max_context, num_pages * pages.page_size)),
            "the model's context, if the KV cache holds it",
        ),
        max_running_requests=running,
        max_queued_requests=choose(
            "max_queued_requests",
            settings.max_queued_requests,
            QUEUE_FACTOR * running,
            f"{QUEUE_FACTOR} per running one",
        ),
        chunked_prefill_size=pages.chunk,
        count_rows=penalised,
        logits_rows=max(running, LOGITS_ROWS),
    )


def _expected_requests(settings: Settings, memory: _Memory, pages: _Pages) -> int:
    """How many requests of EXPECTED_TOKENS fit, at least one."""
    fitting = memory.for_requests // (pages.bytes_of(pages.held(EXPECTED_TOKENS)) + memory.sampling_row)
    if settings.kv_cache_tokens != "auto":
        fitting = min(fitting, settings.kv_cache_tokens // EXPECTED_TOKENS)
    return max(1, fitting)


def _conflicts(plan: EnginePlan, native: NativeKernels) -> Iterator[str]:
    """All but those about memory."""
    bounds, hardware = plan.bounds, plan.hardware
    if plan.model.family not in FAMILIES:
        yield f"the model family {plan.model.family!r} is not implemented; there is {', '.join(FAMILIES)}"
    if plan.linear_kernel == "native" and not native.library:
        yield f"--cpu-kernels native: {native.problem}"
    if plan.weight_dtype == "stored" and plan.linear_kernel != "native":
        yield "--weight-dtype stored needs --cpu-kernels native: use float16 or float32"
    elif plan.weight_dtype == "stored" and not native.stored_bytes:
        yield "--weight-dtype stored: no matrix of this checkpoint is in Q4_0, Q4_1 or Q8_0: use float16 or float32"
    if plan.linear_kernel == "fp16_packed" and not cpu_choices.has_fp16_kernel(hardware):
        yield f"--weight-dtype float16 needs an x86 CPU with AVX2 and F16C, this is {hardware.cpu_name}: use float32"
    backend, layout = ATTENTION_BACKENDS[plan.attention_backend], plan.kv_layout
    if (
        plan.device not in backend.devices
        or layout.name not in backend.kv_layouts
        or layout.dtype not in backend.dtypes
    ):
        yield f"attention backend {backend.name} does not read {layout.name} in {layout.dtype} on {plan.device}"
    if conflict := context_conflict(plan.model, bounds.max_model_len):
        yield conflict
    if bounds.count_rows > bounds.max_running_requests:
        yield (
            f"--max-penalised-requests {bounds.count_rows} is more than the {bounds.max_running_requests} requests "
            "that may run: lower it"
        )
    if plan.num_threads > hardware.num_cpus:
        yield f"--threads {plan.num_threads} is more than the {hardware.num_cpus} CPUs of this process: lower it"


def _memory_conflicts(settings: Settings, bounds: Bounds, memory: _Memory, pages: _Pages) -> Iterator[str]:
    """Nobody runs for ever without a page: one request of the longest kind fits, and so do all running ones."""
    running = bounds.max_running_requests
    rows = memory.rows(running, bounds.count_rows)
    uses = (
        f"{_gib(memory.budget)} of memory, less {_gib(memory.weights)} of weights, {_gib(memory.activations)} of "
        f"activations and {_gib(rows)} for sampling rows of {running} request{'s' if running > 1 else ''}"
    )
    fitting = pages.fitting(memory.for_pages(running, bounds.count_rows), running)
    if fitting == 0:
        _, way_out = max(
            (memory.weights, "raise --mem-fraction"),
            (memory.activations, "lower --chunked-prefill-size or --max-model-len, or raise --mem-fraction"),
            (rows, "lower --max-running-requests, or raise --mem-fraction"),
        )
        yield f"{uses}, hold not one page of {bounds.page_size} tokens: {way_out}"
        return
    if settings.kv_cache_tokens != "auto" and settings.kv_cache_tokens // bounds.page_size > fitting:
        yield (
            f"--kv-cache-tokens {settings.kv_cache_tokens} is more than the {fitting * bounds.page_size} that fit "
            f"{uses}: lower it, or raise --mem-fraction"
        )
    for group in bounds.kv_groups:
        needed = max(running, bounds.most_pages(group, bounds.max_model_len))
        if group.num_pages < needed:
            cache = f"KV cache of window {group.window}" if group.window else "KV cache"
            more = "--mem-fraction" if settings.kv_cache_tokens == "auto" else "--kv-cache-tokens"
            yield (
                f"the {cache} has {group.num_pages} pages of {bounds.page_size} tokens ({uses}), and --max-model-len "
                f"{bounds.max_model_len} with --max-running-requests {running} needs {needed}: lower these, or "
                f"raise {more}"
            )


def _model_name(settings: Settings, checkpoint: CheckpointRef) -> str:
    if settings.model == "default":
        return "SmolLM2-135M-Instruct"
    path = Path(checkpoint.path)
    hub_model = HubModel.parse(settings.model)
    if hub_model is not None and not path.match(settings.model):  # it lies in the cache, under the name of its commit
        return hub_model.repo
    return path.stem if checkpoint.format == "gguf" else path.name


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
