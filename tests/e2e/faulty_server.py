"""`surefoot` with an engine that fails when it is asked to: a prompt whose first token is in `Fault` sets it off.

python -m tests.e2e.faulty_server serve ...          the server
python -m tests.e2e.faulty_server                    its engine
"""

from __future__ import annotations

import os
import sys
import time
from enum import IntEnum
from typing import Any

WEDGED_SECONDS = 3  # instead of minutes


class Fault(IntEnum):
    RAISE = 290
    OUT_OF_MEMORY = 291
    EXIT = 292
    WEDGE = 293


def happen(fault: Fault) -> None:
    match fault:
        case Fault.RAISE:
            raise AttributeError("'PrefillMetadata' object has no attribute 'page_table_1_flattened'")
        case Fault.OUT_OF_MEMORY:
            raise MemoryError("planted")
        case Fault.EXIT:
            os._exit(7)
        case Fault.WEDGE:
            time.sleep(1000)


def main() -> int:
    if len(sys.argv) > 1:
        from surefoot import cli
        from surefoot.launch import restarts, supervisor

        restarts.MAX_DELAY_SECONDS = 0.1  # instead of a minute
        supervisor.MODULES[supervisor.Role.ENGINE] = "tests.e2e.faulty_server"
        supervisor.WEDGED_SECONDS = WEDGED_SECONDS
        return cli.main()

    from surefoot.engine import process
    from surefoot.scheduler.scheduler import Scheduler

    process.BEAT_SECONDS = 0.5
    submit = Scheduler._submit

    def fail_or_submit(scheduler: Scheduler, asked: Any) -> Any:
        if asked.prompt_ids[0] in set(Fault):
            happen(Fault(asked.prompt_ids[0]))
        return submit(scheduler, asked)

    Scheduler._submit = fail_or_submit  # type: ignore[method-assign]
    return process.main()


if __name__ == "__main__":
    sys.exit(main())
