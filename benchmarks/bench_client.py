"""How many streamed tokens a second the client of `surefoot bench serve` takes, from a server that sends them at once.

    python benchmarks/bench_client.py

Server and client share the machine's CPUs. Appends to results/bench_client.csv.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from record import append

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.bench.mock_server import Behaviour, MockServer

from surefoot.bench.client import Target
from surefoot.bench.measure import Level, Measurement
from surefoot.bench.processes import LoadProcesses
from surefoot.bench.results import output_rate
from surefoot.bench.workloads import Length, Maker, RandomWorkload

# (processes of the client, clients, tokens of an answer, seconds between its tokens; 0: all at once)
LOADS = ((1, 64, 512, 0.0), (1, 512, 128, 0.0), (1, 256, 256, 0.01), (1, 256, 256, 0.02), (2, 256, 256, 0.01))


class Silent:
    def begin(self, server: str, level: str, repeat: int, requests: int) -> None: ...

    def ended(self, requests: int) -> None: ...


def serve(url: Connection, gap: float) -> None:
    with MockServer(Behaviour(gap=gap)) as server:
        url.send(server.url)
        time.sleep(3600)


def main() -> None:
    rows = []
    for processes, clients, tokens, gap in LOADS:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, gap), daemon=True)
        process.start()
        target = Target(ours.recv(), "mock", False, "", 600.0, True)
        workload = RandomWorkload(Maker("ids", 30000), Length(64, 64), Length(tokens, tokens))
        with LoadProcesses(processes) as load:
            measurement = Measurement({"mock": target}, workload, random.randrange(1 << 30), False, load, Silent())
            measurement.run_level(Level(clients, 0.0, 1.0), 4 * clients, 1)
        process.terminate()
        (run,) = measurement.runs
        rows.append(
            {
                "processes": processes,
                "clients": clients,
                "tokens": tokens,
                "gap_ms": 1000 * gap,
                "output_tok_s": f"{output_rate(run):.0f}",
                "ttft_p50_ms": f"{1000 * statistics.median(request.ttft for request in run.requests):.0f}",
                "client_busy": f"{run.client_busy:.2f}",
                "client_lag_ms": f"{1000 * run.client_lag:.1f}",
                "failed": sum(bool(request.error) for request in run.requests),
            }
        )
    append("bench_client.csv", rows)


if __name__ == "__main__":
    main()
