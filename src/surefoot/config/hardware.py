"""What the machine is: read once, without torch."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from msgspec import Struct


class HardwareSpec(Struct, frozen=True):
    machine: str  # "x86_64", "aarch64"
    cpu_name: str
    cpu_features: tuple[str, ...]  # those of FEATURES that it has
    num_cpus: int  # that this process may use: affinity and cgroup quota
    memory_available: int  # bytes free for this process now: the system's figure and the cgroup's limit


# What decides which kernels are used, and how fast they are.
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_tile", "amx_bf16", "asimd")


def probe() -> HardwareSpec:
    info = _read("/proc/cpuinfo")
    flags = set(_field(info, "flags").split()) | set(_field(info, "Features").split())
    return HardwareSpec(
        machine=platform.machine(),
        cpu_name=_field(info, "model name") or platform.processor() or "unknown CPU",
        cpu_features=tuple(name for name in FEATURES if name in flags),
        num_cpus=num_cpus(),
        memory_available=memory_available(),
    )


def num_cpus() -> int:
    """CPUs this process may use: its affinity mask, cut by the cgroup's quota (rounded up)."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = _cpu_quota()
    return allowed if quota == 0 else max(1, min(allowed, quota))


def _cpu_quota() -> int:
    """Whole CPUs of the cgroup's quota, 0 if there is none. cgroup v2 has cpu.max, v1 two files."""
    limit, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if not period:
        limit = _read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").strip()
        period = _read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if not limit.isdigit() or not period.strip().isdigit():
        return 0
    return -(-int(limit) // int(period))


def memory_available() -> int:
    """Bytes that can still be allocated: MemAvailable, cut by what is left of the cgroup's limit."""
    found = [int(words[0]) * 1024 for words in [_field(_read("/proc/meminfo"), "MemAvailable").split()] if words]
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, usage = _read(limit_file).strip(), _read(usage_file).strip()
        if limit.isdigit() and usage.isdigit():
            found.append(max(0, int(limit) - int(usage)))
    # Without procfs (macOS) the whole memory is the best that the standard library tells.
    return min(found) if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _field(text: str, name: str) -> str:
    """The value of the first `name : value` line of a procfs file."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
