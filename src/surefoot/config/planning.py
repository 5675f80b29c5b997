"""From settings to a plan, with all that has to be read for it: the checkpoint's header and the machine."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Console

from surefoot.checkpoint.default_model import DEFAULT_CACHE_DIR, fetch_default_model
from surefoot.checkpoint.errors import CheckpointError
from surefoot.checkpoint.gguf import GGMLType, GGUFFile
from surefoot.checkpoint.locate import HubModel, locate
from surefoot.config import hardware
from surefoot.config.engine_plan import CheckpointRef, EnginePlan, NativeKernels, ThreadsSpeed
from surefoot.config.model_readers import read_model_spec
from surefoot.config.resolve import resolve
from surefoot.config.settings import Settings
from surefoot.native.library import NativeError, ensure
from surefoot.native.threads import measure

DEFAULT_MODEL = "default"
NATIVE_FOLDER = DEFAULT_CACHE_DIR.parent / "kernels"
NATIVE_BLOCK_BYTES = {GGMLType.Q4_0: 20, GGMLType.Q4_1: 20, GGMLType.Q8_0: 34}  # as the kernels hold them


def plan_engine(settings: Settings, console: Console, fetch_weights: bool = True) -> EnginePlan:
    """Fetches a model that is not here; `console` shows the progress. Weights that nobody will read are not fetched.

    Raises CheckpointError or PlanError, both ValueErrors with a way out.
    """
    checkpoint = _find_checkpoint(settings, console, fetch_weights and settings.load_format == "checkpoint")
    machine = hardware.probe()
    native = _native(settings, checkpoint, machine.num_cpus, console)
    return resolve(settings, checkpoint, read_model_spec(checkpoint), machine, native)


def _native(settings: Settings, checkpoint: CheckpointRef, num_cpus: int, console: Console) -> NativeKernels:
    """Compiles the native kernels if they may be used and are not there, and measures them if that decides anything."""
    stored = settings.load_format == "checkpoint" and checkpoint.format == "gguf"
    stored_bytes = stored_matrix_bytes(GGUFFile.open(Path(checkpoint.path))) if stored else 0
    if settings.cpu_kernels == "torch":
        return NativeKernels("", "--cpu-kernels torch", stored_bytes)
    try:
        library = ensure(settings.c_compiler, NATIVE_FOLDER, console.print)
    except NativeError as error:
        return NativeKernels("", str(error), stored_bytes)
    speeds = _speeds(library, num_cpus) if settings.threads == "auto" and num_cpus > 1 else ()
    return NativeKernels(str(library), "", stored_bytes, speeds)


def _speeds(library: Path, num_cpus: int) -> tuple[ThreadsSpeed, ...]:
    """With 1, 2, 4, ... threads, and with one for each CPU."""
    counts = [*(1 << power for power in range((num_cpus - 1).bit_length())), num_cpus]
    measured = zip(counts, measure(library, counts), strict=False)  # nothing is measured on busy CPUs
    return tuple(ThreadsSpeed(count, read, flops) for count, (read, flops) in measured)


def stored_matrix_bytes(file: GGUFFile) -> int:
    """Of all matrices, if those stay quantised whose format native kernels read, and the others become float16.
    0 if none stays."""
    matrices = [tensor for tensor in file.tensors.values() if len(tensor.shape) == 2]
    if not any(tensor.type in NATIVE_BLOCK_BYTES for tensor in matrices):
        return 0
    return sum(
        math.prod(tensor.shape) * NATIVE_BLOCK_BYTES[tensor.type] // tensor.type.block_elements
        if tensor.type in NATIVE_BLOCK_BYTES
        else 2 * math.prod(tensor.shape)
        for tensor in matrices
    )


def _find_checkpoint(settings: Settings, console: Console, fetch_weights: bool) -> CheckpointRef:
    hub_model = HubModel.parse(settings.model)
    if hub_model is not None and not Path(settings.model).exists():
        from surefoot.checkpoint import hub  # takes a third of a second to import

        path, format = hub.fetch(hub_model, settings.revision, fetch_weights, console)
        return CheckpointRef(str(path), format)
    if settings.revision:
        raise CheckpointError(
            f"--revision {settings.revision} means nothing for {settings.model}, which is not a model of the Hugging "
            "Face hub: leave it out"
        )
    if settings.model == DEFAULT_MODEL:
        return CheckpointRef(str(fetch_default_model(Path(settings.model_cache).expanduser(), console)), "gguf")
    path, format = locate(settings.model)
    return CheckpointRef(str(path), format)
