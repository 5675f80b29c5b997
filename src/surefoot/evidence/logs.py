"""How every process of the tree writes its log: lines on standard error, alike in all of them."""

from __future__ import annotations

import logging
import sys


def set_up(level: str) -> None:
    """level: "debug", "info", "warning" or "error"."""
    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level.upper(), format=line, stream=sys.stderr)
