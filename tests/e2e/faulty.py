"""A server whose engine fails on demand (faulty_server.Fault), and whose dead processes come back without delay."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.e2e.server import Server

MODULE = "tests.e2e.faulty_server"


class FaultyServer(Server):
    def __init__(self, log: Path, **settings: Any) -> None:
        super().__init__(log, **settings)
        # Children find no modules in the current folder.
        self._environment["PYTHONPATH"] = f"{Path.cwd()}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self._command = [sys.executable, "-m", MODULE, *self._command[self._command.index("serve") :]]

    def engine(self) -> int:
        """Process id."""
        return self.child(MODULE)
