"""(settings, model, machine) -> plan, as a table; conflicts are listed together."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from surefoot.config import settings
from surefoot.config.engine_plan import CheckpointRef, EnginePlan, NativeKernels, ThreadsSpeed
from surefoot.config.hardware import HardwareSpec
from surefoot.config.model_spec import LayerKind, ModelSpec, NoRopeScaling, Rope
from surefoot.config.resolve import PlanError, resolve
from tests.config.specs import SPEC

GIB = 2**30
ROPE = Rope(100000.0, NoRopeScaling(), 64)
SMOLLM2 = msgspec.structs.replace(
    SPEC,
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    layer_kinds=(LayerKind(0, ROPE),),
    layers=(0,) * 30,
    max_context=8192,
    tied_embeddings=True,
    attention_scale=64**-0.5,
)
DESKTOP = HardwareSpec(
    machine="x86_64", cpu_name="a desktop", cpu_features=("avx2", "fma", "f16c"), num_cpus=8, memory_available=16 * GIB
)
ARM = msgspec.structs.replace(DESKTOP, machine="aarch64", cpu_name="an Arm", cpu_features=("asimd",))
SMALL = msgspec.structs.replace(DESKTOP, memory_available=1 * GIB)


NO_NATIVE = NativeKernels(library="", problem="there is no C compiler", stored_bytes=0)
NATIVE = NativeKernels(library="/cache/kernels.so", problem="", stored_bytes=96_436_224)


def plan(
    model: ModelSpec = SMOLLM2,
    hardware: HardwareSpec = DESKTOP,
    native: NativeKernels = NO_NATIVE,
    **asked: Any,
) -> EnginePlan:
    return resolve(settings.load(asked), CheckpointRef("/models/m.gguf", "gguf"), model, hardware, native)


@pytest.mark.parametrize(
    "hardware, native, asked, expected",
    [
        (DESKTOP, NO_NATIVE, {}, ("float16", "fp16_packed", "torch")),
        (DESKTOP, NO_NATIVE, {"weight_dtype": "float32"}, ("float32", "dense", "torch")),
        (ARM, NO_NATIVE, {}, ("float32", "dense", "torch")),
        (DESKTOP, NATIVE, {}, ("stored", "native", "native")),
        (ARM, NATIVE, {}, ("stored", "native", "native")),
        (DESKTOP, msgspec.structs.replace(NATIVE, stored_bytes=0), {}, ("float16", "native", "native")),
        (DESKTOP, NATIVE, {"weight_dtype": "float32"}, ("float32", "native", "native")),
        (DESKTOP, NATIVE, {"cpu_kernels": "torch"}, ("float16", "fp16_packed", "torch")),
    ],
)
def test_weights(
    hardware: HardwareSpec, native: NativeKernels, asked: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    made = plan(hardware=hardware, native=native, **asked)
    assert (made.weight_dtype, made.linear_kernel, made.attention_backend) == expected
    assert made.native_library == (native.library if made.linear_kernel == "native" else "")
    if made.weight_dtype == "stored":
        assert made.weight_bytes == native.stored_bytes


@pytest.mark.parametrize(
    "native, asked, conflict",
    [
        (NO_NATIVE, {"cpu_kernels": "native"}, "there is no C compiler"),
        (NO_NATIVE, {"weight_dtype": "stored"}, "needs --cpu-kernels native"),
        (msgspec.structs.replace(NATIVE, stored_bytes=0), {"weight_dtype": "stored"}, "in Q4_0, Q4_1 or Q8_0"),
    ],
)
def test_native_kernels_that_cannot_be_had(native: NativeKernels, asked: dict[str, Any], conflict: str) -> None:
    with pytest.raises(PlanError, match=conflict):
        plan(native=native, **asked)


@pytest.mark.parametrize(
    "speeds, threads",
    [
        ([(1, 10, 50), (2, 20, 100)], 2),
        ([(1, 10, 50), (2, 10.1, 51)], 1),  # two hyper-threads of one core
        ([(1, 10, 50), (2, 20, 100), (4, 20, 100), (6, 19, 98)], 2),  # a quota of two CPUs
        ([(1, 10, 50), (2, 18, 100), (4, 20, 200), (8, 19, 400)], 8),  # the bus is full, but arithmetic gains
        ([(1, 10, 50), (2, 5, 20)], 1),
    ],
)
def test_threads_are_the_fewest_of_the_fastest(speeds: list[tuple[int, float, float]], threads: int) -> None:
    native = msgspec.structs.replace(NATIVE, speeds=tuple(ThreadsSpeed(n, r * 1e9, f * 1e9) for n, r, f in speeds))
    made = plan(native=native)
    assert made.num_threads == threads
    (why,) = (reason.why for reason in made.reasons if reason.field == "threads")
    assert why.startswith("the fewest of the fastest; with 1: 10 GB/s and 50 GFLOP/s, with 2: ")
    assert plan(native=native, threads=3).num_threads == 3
    assert plan(native=native, cpu_kernels="torch").num_threads == DESKTOP.num_cpus


def test_the_reason_for_torch_is_said() -> None:
    assert [reason.why for reason in plan().reasons if reason.field == "cpu_kernels"] == [
        "the native ones cannot be used: there is no C compiler"
    ]


def test_memory_adds_up() -> None:
    """Pages, weights and what running rows need stay within the budget, and use nearly all of it."""
    for memory in (2 * GIB, 16 * GIB, 700 * GIB):
        made = plan(hardware=msgspec.structs.replace(DESKTOP, memory_available=memory))
        (kv_bytes,) = made.kv_layout.bytes_per_token
        kv = made.bounds.kv_tokens * kv_bytes
        weights = 2 * (SMOLLM2.num_linear_weights + 2 * SMOLLM2.vocab_size * SMOLLM2.hidden_size)
        rows = (made.bounds.max_running_requests * 32 + made.bounds.count_rows * 5) * SMOLLM2.vocab_size
        budget = 0.4 * memory
        assert 0.95 * budget < kv + weights + rows < budget
        assert made.kv_layout.bytes_per_token == (46080,)


GEMMA = msgspec.structs.replace(
    SMOLLM2, layer_kinds=(LayerKind(512, ROPE), LayerKind(0, ROPE)), layers=(0, 0, 0, 0, 0, 1) * 5
)


def test_a_window_needs_fewer_pages() -> None:
    """Of 30 layers, 25 see 512 tokens: far more tokens fit, the windowed group has pages for windows and chunks, and
    all groups stay within the budget and use nearly all of it."""
    for memory in (16 * GIB, 700 * GIB):
        hardware = msgspec.structs.replace(DESKTOP, memory_available=memory)
        plain, made = (
            plan(hardware=hardware, max_running_requests=8),
            plan(model=GEMMA, hardware=hardware, max_running_requests=8),
        )
        windowed, whole = made.bounds.kv_groups
        assert whole.num_pages > 4 * plain.bounds.kv_groups[0].num_pages
        assert windowed.num_pages == 2 * 8 * made.bounds.most_pages(windowed, 8192)
        assert made.bounds.most_pages(windowed, 8192) == (512 + 256) // 16 + 1
        assert made.bounds.most_pages(whole, 8192) == 512
        of_windowed, of_whole = made.kv_layout.bytes_per_token
        assert (of_windowed, of_whole) == (25 * 1536, 5 * 1536)
        kv = 16 * (windowed.num_pages * of_windowed + whole.num_pages * of_whole)
        weights = 2 * (SMOLLM2.num_linear_weights + 2 * SMOLLM2.vocab_size * SMOLLM2.hidden_size)
        rows = (8 * 32 + made.bounds.count_rows * 5) * SMOLLM2.vocab_size
        assert 0.95 * 0.4 * memory < kv + weights + rows < 0.4 * memory


def test_windows_alone_get_the_whole_memory() -> None:
    only = msgspec.structs.replace(SMOLLM2, layer_kinds=(LayerKind(4096, ROPE),))
    assert plan(model=only).bounds.kv_groups[0].num_pages == plan().bounds.kv_groups[0].num_pages


def test_a_small_cache_is_not_larger_for_windows() -> None:
    made = plan(model=GEMMA, kv_cache_tokens=1024, max_model_len=1024, max_running_requests=8)
    assert [group.num_pages for group in made.bounds.kv_groups] == [64, 64]


def test_running_requests_follow_the_pages() -> None:
    few, many = plan(mem_fraction=0.1), plan(mem_fraction=0.8)
    assert few.bounds.max_running_requests < many.bounds.max_running_requests
    assert abs(many.bounds.kv_tokens / many.bounds.max_running_requests - 1024) < 32
    assert plan(max_running_requests=3).bounds.max_running_requests == 3


def test_the_context_shrinks_to_what_the_cache_holds() -> None:
    made = plan(hardware=SMALL, max_running_requests=1)
    assert made.bounds.max_model_len == min(8192, made.bounds.kv_tokens)
    assert plan(kv_cache_tokens=1000, max_running_requests=1).bounds.max_model_len == 992
    assert plan().bounds.max_model_len == 8192


def test_every_value_has_a_reason() -> None:
    made = plan(page_size=32)
    reasons = {reason.field: reason for reason in made.reasons}
    assert reasons["page_size"].value == "32"
    assert reasons["page_size"].why == "asked for"
    assert len(reasons) == len(made.reasons)
    assert set(reasons) == {info.name for info in settings.infos()} - settings.OF_SERVER | {"served_model_name"}
    assert {name for name, reason in reasons.items() if reason.why == "asked for"} == {"page_size"}
    undecided = {"model", "revision", "load_format", "model_cache", "c_compiler", "disable_prefix_cache", "seed"}
    assert {name for name, reason in reasons.items() if reason.why == "default"} == undecided
    assert {reason.value for reason in plan(disable_prefix_cache=True, seed=3).reasons} >= {"true", "3"}


def test_conflicts_come_together_each_with_a_way_out() -> None:
    with pytest.raises(PlanError) as caught:
        plan(hardware=ARM, weight_dtype="float16", max_model_len=9000, kv_cache_tokens=10**9)
    message = str(caught.value)
    assert "--weight-dtype float16 needs an x86 CPU with AVX2 and F16C, this is an Arm: use float32" in message
    assert "--max-model-len 9000 is more than the model's context of 8192: lower it" in message
    assert "--kv-cache-tokens 1000000000 is more than the" in message
    with pytest.raises(PlanError, match="'qwen9' is not implemented; there is llama"):
        plan(model=msgspec.structs.replace(SMOLLM2, family="qwen9"))
    with pytest.raises(PlanError, match=r"needs 512: lower these, or raise --kv-cache-tokens"):
        plan(max_model_len=8192, kv_cache_tokens=4096, max_running_requests=1)
    with pytest.raises(PlanError, match="not one page of 16 tokens: raise --mem-fraction"):
        plan(hardware=msgspec.structs.replace(DESKTOP, memory_available=GIB // 4))


@pytest.mark.parametrize(
    "memory, asked, said",
    [
        (
            16 * GIB,
            {"max_running_requests": 5000},
            "6.40 GiB of memory, less 0.30 GiB of weights, 0.02 GiB of activations and 7.34 GiB for sampling rows of "
            "5000 requests, hold not one page of 16 tokens: lower --max-running-requests, or raise --mem-fraction",
        ),
        (
            16 * GIB,
            {"max_running_requests": 4000, "kv_cache_tokens": 4000 * 16},
            "--kv-cache-tokens 64000 is more than the 4720 that fit 6.40 GiB of memory, less 0.30 GiB of weights, "
            "0.02 GiB of activations and 5.87 GiB for sampling rows of 4000 requests: lower it, or raise "
            "--mem-fraction",
        ),
        (
            2 * GIB,
            {"chunked_prefill_size": 8192},
            "0.80 GiB of memory, less 0.30 GiB of weights, 0.62 GiB of activations and 0.00 GiB for sampling rows of "
            "1 request, hold not one page of 16 tokens: lower --chunked-prefill-size or --max-model-len, or raise "
            "--mem-fraction",
        ),
        (
            16 * GIB,
            {"max_running_requests": 1, "kv_cache_tokens": 8},
            "the KV cache has 0 pages of 16 tokens (6.40 GiB of memory, less 0.30 GiB of weights, 0.02 GiB of "
            "activations and 0.00 GiB for sampling rows of 1 request), and --max-model-len 2 with "
            "--max-running-requests 1 needs 1: lower these, or raise --kv-cache-tokens",
        ),
    ],
    ids=["rows", "rows-and-pages", "activations", "less-than-a-page"],
)
def test_what_takes_the_memory_is_named(memory: int, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(hardware=msgspec.structs.replace(DESKTOP, memory_available=memory), **asked)
    assert caught.value.conflicts == (said,)


def test_more_penalised_than_running_requests_are_refused() -> None:
    with pytest.raises(PlanError, match="--max-penalised-requests 9 is more than the 8 requests that may run"):
        plan(max_running_requests=8, max_penalised_requests=9)
    assert plan(max_running_requests=8).bounds.count_rows == 8


def test_more_threads_than_cpus_are_refused() -> None:
    with pytest.raises(PlanError, match="--threads 9 is more than the 8 CPUs of this process: lower it"):
        plan(threads=9)


def test_a_plan_survives_the_way_to_another_process() -> None:
    made = plan()
    assert msgspec.json.decode(msgspec.json.encode(made), type=EnginePlan) == made


def test_the_served_name() -> None:
    assert plan(model=SMOLLM2).served_model_name == "SmolLM2-135M-Instruct"
    named = settings.load({"model": "/models/m.gguf"})
    assert resolve(named, CheckpointRef("/models/m.gguf", "gguf"), SMOLLM2, DESKTOP, NO_NATIVE).served_model_name == "m"
    assert plan(served_model_name="mine").served_model_name == "mine"
