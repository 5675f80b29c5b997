"""lm-evaluation-harness over HTTP gives the scores that it gives with the same model in transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.compat.conftest import NAME, run
from tests.e2e.server import Server

TASKS = Path(__file__).parent / "tasks"
LOGPROB_TOLERANCE = 1e-3  # of a whole answer: both compute in fp32, in another order

pytestmark = pytest.mark.compat


def evaluate(folder: Path, model: str, model_args: str) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Scores by task, and the samples of each task."""
    shutil.copytree(TASKS, folder, dirs_exist_ok=True)
    tasks = "surefoot_choices,surefoot_continuations"
    out = folder / "out"
    command = ["run", "--model", model, "--model_args", model_args, "--tasks", tasks, "--include_path", "."]
    run("lm-eval", *command, "--log_samples", "--output_path", str(out), "--batch_size", "1", cwd=folder)
    (results,) = out.rglob("results_*.json")
    samples = {}
    for task in tasks.split(","):
        (path,) = out.rglob(f"samples_{task}_*.jsonl")
        samples[task] = [json.loads(line) for line in path.read_text().splitlines()]
    return json.loads(results.read_text())["results"], samples


def test_scores_are_those_of_transformers(server: Server, checkpoint: Path, tmp_path: Path) -> None:
    ours, our_samples = evaluate(
        tmp_path / "ours",
        "local-completions",
        f"model={NAME},base_url={server.url}/v1/completions,num_concurrent=8,max_retries=1,"
        f"tokenizer_backend=huggingface,tokenizer={checkpoint}",
    )
    theirs, their_samples = evaluate(tmp_path / "theirs", "hf", f"pretrained={checkpoint},dtype=float32")
    for task, scores in theirs.items():
        for name, value in scores.items():
            if "stderr" not in name and isinstance(value, float):
                assert ours[task][name] == value, (task, name)
    assert ours["surefoot_choices"]["acc,none"] > 0.5  # chance is 0.25: the comparison is not of noise
    by_id = {sample["doc_id"]: sample for sample in our_samples["surefoot_choices"]}
    for sample in their_samples["surefoot_choices"]:
        for got, wanted in zip(by_id[sample["doc_id"]]["filtered_resps"], sample["filtered_resps"], strict=True):
            assert abs(float(got[0]) - float(wanted[0])) < LOGPROB_TOLERANCE
            assert str(got[1]) == str(wanted[1])
    by_id = {sample["doc_id"]: sample for sample in our_samples["surefoot_continuations"]}
    for sample in their_samples["surefoot_continuations"]:
        assert by_id[sample["doc_id"]]["filtered_resps"] == sample["filtered_resps"]
    assert any("/prompt" in path for path in server.paths())
