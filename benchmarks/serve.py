"""`surefoot bench serve`, with its summary kept in results/bench_serve.csv.

    python benchmarks/serve.py surefoot=http://127.0.0.1:8000 llama-server=http://127.0.0.1:8080 \
        --settings "how they were started" --concurrency 1 --requests 6 --repeat 3

A row for each server and level; a peer's row has the ratio of the first server's rate to its own. All other flags are
those of `surefoot bench serve`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import msgspec
from record import append

from surefoot import cli
from surefoot.bench.results import BenchResult, summaries


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("servers", nargs="+", metavar="NAME=URL")
    options.add_argument("--settings", default="", help="how the servers were started, for the record")
    args, flags = options.parse_known_args()
    servers = [server.split("=", 1) for server in args.servers]
    named = [word for name, _ in servers for word in ("--name", name)]
    against = [word for _, url in servers[1:] for word in ("--against", url)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        code = cli.main(["bench", "serve", servers[0][1], *named, *against, *flags, "--json", str(file)])
        if not file.exists():
            return code
        result = msgspec.json.decode(file.read_bytes(), type=BenchResult)
    rows = [
        {
            "server": summary.server,
            "settings": args.settings,
            "concurrency": summary.level.removeprefix("c"),
            "workload": result.workload.description,
            "prompts": result.workload.prompts,
            "requests": summary.requests,
            "output_tok_s": f"{summary.output_rate:.1f}",
            "ttft_p50_ms": f"{1000 * summary.ttft.p50:.0f}",
            "inter_token_p50_ms": f"{1000 * summary.inter_token.p50:.1f}",
            "hit_rate": "" if summary.hit_rate < 0 else f"{summary.hit_rate:.2f}",
            "failed": sum(summary.errors.values()) + summary.short,
            "first_over_this": "" if summary.server == result.servers[0].name else f"{summary.ratio:.2f}",
            "ratio_spread": f"{summary.ratio_low:.2f}-{summary.ratio_high:.2f}",
        }
        for summary in summaries(result)
    ]
    append("bench_serve.csv", rows, "torch")
    return code


if __name__ == "__main__":
    sys.exit(main())
