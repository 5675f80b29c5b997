"""Logits and perplexity of the native kernels beside the fp32 engine's, on a fixed text and the default model.

    python benchmarks/quality.py FILE [TOKENS]

Appends to results/quality.csv: perplexity, the largest difference of a logprob of the text, and the largest one of
logits relative to the largest logit of their row.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from record import append
from rich.console import Console

from surefoot.config import settings
from surefoot.config.planning import plan_engine
from surefoot.frontend.tokenizer import load_tokenizer
from surefoot.protocol.messages import GREEDY, NO_LOGPROBS
from surefoot.protocol.step_plan import NO_COUNT_ROW, Admission, PageRun, PrefillRow, StepPlan
from surefoot.runner.model_runner import ModelRunner

CHUNK = 256
WAYS = {
    "fp32, torch": {"cpu_kernels": "torch", "weight_dtype": "float32"},
    "fp16_packed, torch": {"cpu_kernels": "torch", "weight_dtype": "float16"},
    "stored, native": {"cpu_kernels": "native", "weight_dtype": "stored"},
    "stored, native, chunks of 4": {"cpu_kernels": "native", "weight_dtype": "stored"},
}


def main() -> None:
    text = Path(sys.argv[1]).read_text()
    length = int(sys.argv[2]) if len(sys.argv) > 2 else 2048
    rows = []
    reference = torch.empty(0)
    for name, wanted in WAYS.items():
        plan = plan_engine(settings.load({**wanted, "max_running_requests": 2}), Console(stderr=True))
        tokens = load_tokenizer(plan.checkpoint).encode(text, add_special_tokens=False)[:length]
        logits = all_logits(ModelRunner(plan, lambda *_: None), tokens, 4 if name.endswith("4") else CHUNK)
        if not len(reference):
            reference = logits
        targets = torch.tensor(tokens[1:])
        scores, right = (x.log_softmax(-1)[torch.arange(len(targets)), targets] for x in (logits, reference))
        relative = (logits - reference).abs().amax(-1) / reference.abs().amax(-1)
        rows.append(
            {
                "kernels": name,
                "text": Path(sys.argv[1]).name,
                "tokens": len(tokens),
                "perplexity": f"{math.exp(-float(scores.double().mean())):.5f}",
                "largest_logprob_difference": f"{float((scores - right).abs().max()):.1e}",
                "largest_relative_logit_difference": f"{float(relative.max()):.1e}",
                "same_best_token": f"{float((logits.argmax(-1) == reference.argmax(-1)).float().mean()):.4f}",
            }
        )
    append("quality.csv", rows, "torch")


def all_logits(runner: ModelRunner, tokens: list[int], chunk: int) -> torch.Tensor:
    """[tokens - 1, vocab]: of each token but the last."""
    admission = Admission(0, 0, GREEDY, (), 0, NO_LOGPROBS, NO_LOGPROBS, NO_COUNT_ROW, len(tokens), ())
    parts = []
    for start in range(0, len(tokens) - 1, chunk):
        some = tuple(tokens[start : min(start + chunk, len(tokens) - 1)])
        first, last = start // 16, -(-(start + len(some)) // 16)
        pages = PageRun(0, first, tuple(range(first, last)))
        row = PrefillRow(0, 0, start, some, (pages,), samples=False, targets=())
        plan = StepPlan(0, (admission,) if start == 0 else (), (), (), (), (row,))
        _, _, hidden = runner.forward(plan)
        with torch.inference_mode():
            parts.append(runner._model.logits(hidden).clone())
    return torch.cat(parts)


if __name__ == "__main__":
    main()
