"""Log lines, as text and as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

SCRIPT = """
import logging, sys, warnings
from surefoot.evidence import logs
logs.set_up("info", sys.argv[1], "engine")
log = logging.getLogger("surefoot.test")
log.debug("not shown")
log.warning("two\\nlines of %s \\ud800", "gr\\u00fcn")
log.info("one request", extra={"request_id": "abc"})
warnings.warn("take care")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("it failed")
"""


def lines(log_format: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, log_format], capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


def test_json() -> None:
    entries: list[dict[str, Any]] = [json.loads(line) for line in lines("json")]
    two_lines, request, warning, failure = entries
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", two_lines.pop("time"))
    assert two_lines == {
        "level": "warning",
        "logger": "surefoot.test",
        "process": "engine",
        "message": "two\nlines of grün \\ud800",
    }
    assert (request["request_id"], request["message"]) == ("abc", "one request")
    assert "take care" in warning["message"]
    assert failure["message"] == "it failed"
    assert "ZeroDivisionError: division by zero" in failure["exception"]


def test_text() -> None:
    found = lines("text")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO surefoot.test: one request", found[2])
    assert "not shown" not in "\n".join(found)
