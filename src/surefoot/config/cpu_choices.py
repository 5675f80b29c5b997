"""What is automatic on a CPU, each choice with its reason: kernels, format of weights, number of threads."""

from __future__ import annotations

from typing import Literal

from surefoot.config.engine_plan import NativeKernels
from surefoot.config.hardware import HardwareSpec

THREADS_TOLERANCE = 1.03  # more threads must gain more than that

Kernels = Literal["native", "torch"]


def has_fp16_kernel(hardware: HardwareSpec) -> bool:
    return hardware.machine == "x86_64" and {"avx2", "fma", "f16c"} <= set(hardware.cpu_features)


def kernels(native: NativeKernels) -> tuple[Kernels, str]:
    if native.library:
        return "native", "compiled for this CPU and tested"
    return "torch", f"the native ones cannot be used: {native.problem}"


def weight_dtype(
    chosen: Kernels, native: NativeKernels, hardware: HardwareSpec
) -> tuple[Literal["stored", "float16", "float32"], str]:
    if chosen == "native" and native.stored_bytes:
        return "stored", "fewest bytes to read; activations and sums stay float32"
    if chosen == "native":
        return "float16", "half the bytes; activations and sums stay float32"
    if has_fp16_kernel(hardware):
        return "float16", "this CPU has AVX2 and F16C: half the bytes, activations and sums stay float32"
    return "float32", "float16 weights need AVX2 and F16C, which this CPU lacks"


def threads(chosen: Kernels, native: NativeKernels, hardware: HardwareSpec) -> tuple[int, str]:
    """The fewest that are as fast as any, where reading weights and computing take as long."""
    speeds = native.speeds
    if chosen == "torch" or hardware.num_cpus == 1:
        return hardware.num_cpus, "CPUs that this process may use"
    if not speeds:
        return hardware.num_cpus, "CPUs that this process may use; too busy to measure whether fewer are as fast"
    best_read, best_flops = max(speed.bytes_per_second for speed in speeds), max(speed.flops for speed in speeds)
    seconds = {s.threads: best_read / s.bytes_per_second + best_flops / s.flops for s in speeds}
    fewest = next(count for count in seconds if seconds[count] <= THREADS_TOLERANCE * min(seconds.values()))
    figures = ", ".join(
        f"with {s.threads}: {s.bytes_per_second / 1e9:.0f} GB/s and {s.flops / 1e9:.0f} GFLOP/s" for s in speeds
    )
    return fewest, f"the fewest of the fastest; {figures}"
