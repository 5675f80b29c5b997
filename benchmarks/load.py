"""What starting costs: each part of loading the default model. Steps are measured by `surefoot bench step`.

    python benchmarks/load.py

Appends to results/load.csv.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from record import append

T = TypeVar("T")


def main() -> None:
    parts: dict[str, float] = {}

    def timed(name: str, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = work()
        parts[name] = time.perf_counter() - began
        return result

    timed("import torch", lambda: __import__("torch"))
    from rich.console import Console

    from surefoot.checkpoint.gguf import GGUFFile
    from surefoot.config import settings
    from surefoot.config.planning import plan_engine
    from surefoot.frontend.tokenizer import load_tokenizer
    from surefoot.quant.gguf import dequantize
    from surefoot.runner.model_runner import ModelRunner

    for kernels, weight_dtype in (("native", "stored"), ("torch", "float16"), ("torch", "float32")):
        asked = {"cpu_kernels": kernels, "weight_dtype": weight_dtype, "max_running_requests": 64}
        plan = plan_engine(settings.load(asked), Console())
        file = timed("open GGUF", lambda path=plan.checkpoint.path: GGUFFile.open(path))
        timed("tokenizer", lambda ref=plan.checkpoint: load_tokenizer(ref))
        tensors = file.tensors.items()
        timed("dequantise", lambda f=file, ts=tensors: [dequantize(f.raw(n), t.type, t.shape) for n, t in ts])
        timed(f"model runner, {kernels}, {weight_dtype}", lambda plan=plan: ModelRunner(plan, lambda done, total: None))
    append("load.csv", [{"part": name, "seconds": f"{seconds:.2f}"} for name, seconds in parts.items()], "torch")


if __name__ == "__main__":
    main()
