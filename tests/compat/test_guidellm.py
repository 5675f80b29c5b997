"""guidellm's benchmark runs against the server unmodified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.compat.conftest import NAME, run
from tests.e2e.server import Server

pytestmark = pytest.mark.compat


@pytest.mark.parametrize("request_type", ["/v1/chat/completions", "/v1/completions"])
def test_all_requests_succeed(server: Server, checkpoint: Path, tmp_path: Path, request_type: str) -> None:
    run(
        "guidellm",
        "run",
        "--backend",
        f"kind=openai_http,target={server.url},model={NAME},request_format={request_type}",
        "--profile",
        "kind=concurrent,streams=4",
        "--constraint",
        "kind=max_requests,count=12",
        "--tokenizer",
        f"kind=huggingface_auto,model={checkpoint}",
        "--data",
        "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "--output",
        f"kind=json,path={tmp_path / 'report.json'}",
        "--disable-console",
        cwd=tmp_path,
    )
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (12, 0, 0)
