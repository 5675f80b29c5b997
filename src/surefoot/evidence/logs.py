"""How every process of the tree writes its log: lines on standard error, alike in all of them.

As text, or as one JSON object a line: time (ISO 8601, UTC), level, logger, process, message; request_id where a
record concerns one request (`log.info(..., extra={"request_id": ...})`); exception where there is one.
"""

from __future__ import annotations

import datetime
import logging
import sys

import msgspec

TALKATIVE = ("httpx", "httpx2", "huggingface_hub")  # libraries that log every request

TEXT_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        entry = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage().encode(errors="backslashreplace").decode(),
        }
        request_id = vars(record).get("request_id")  # `extra` becomes attributes
        if request_id is not None:
            entry["request_id"] = str(request_id)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


def set_up(level: str, log_format: str, process: str) -> None:
    """level: "debug", "info", "warning" or "error". log_format: "text" or "json". process: its name in the log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else logging.Formatter(TEXT_LINE))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    logging.getLogger("huggingface_hub").handlers.clear()  # its own one says everything a second time
    logging.captureWarnings(log_format == "json")
