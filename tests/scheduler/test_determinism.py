"""The scheduler is a deterministic function of its commands and results, in plain Python."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.scheduler import scheduler

from .fuzz import run_scenario


def digest_of_plans(seeds: range) -> str:
    """Of every plan that the scenarios lead to, byte for byte."""
    digest = hashlib.sha256()
    for seed in seeds:
        for plan in run_scenario(seed).device.plans:
            digest.update(plan)
    return digest.hexdigest()


def run_python(code: str, hash_seed: str = "0") -> str:
    source = Path(scheduler.__file__).parents[2]
    root = Path(__file__).parents[2]
    paths = [str(source), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_the_same_commands_give_the_same_plans(hash_seed: str) -> None:
    code = "from tests.scheduler.test_determinism import digest_of_plans; print(digest_of_plans(range(20)))"
    assert run_python(code, hash_seed) == digest_of_plans(range(20))


def test_neither_scheduler_nor_loop_imports_torch() -> None:
    code = "import sys, surefoot.engine.loop, surefoot.scheduler.invariants; print('torch' in sys.modules)"
    assert run_python(code) == "False"
