"""Streamed completions against OpenAI-compatible servers, in turns, so that ratios come from one run.

    python benchmarks/serve.py surefoot=http://127.0.0.1:8000 llama-server=http://127.0.0.1:8080

Random token ids, every prompt used once (no prefix is ever cached), exactly `--output` tokens each, temperature 0,
closed loop: each of `--concurrency` clients sends its next request when its last one has ended. Output tokens per
second are counted over the whole run, prefill included. One row for each server and concurrency goes to
results/serve.csv; a peer's row has the ratio of the first server's rate to its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass
from urllib.parse import urlparse

from record import append


@dataclass(frozen=True)
class Request:
    output_tokens: int
    first: float  # seconds until the first text
    total: float


async def complete(url: str, model: str, prompt: list[int], output: int) -> Request:
    """One streamed request over a connection of its own, with as little work per event as possible."""
    place = urlparse(url)
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
    began = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    first, last = 0.0, b""
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - began
            last = line
    writer.close()
    usage = json.loads(last[6:]).get("usage") if last else None
    if not usage:
        raise RuntimeError(f"{url} ended without usage: {last!r}")
    return Request(usage["completion_tokens"], first, time.perf_counter() - began)


async def closed_loop(url: str, model: str, prompts: list[list[int]], concurrency: int, output: int) -> list[Request]:
    left = iter(prompts)

    async def client() -> list[Request]:
        return [await complete(url, model, prompt, output) for prompt in left]

    return [request for done in await asyncio.gather(*(client() for _ in range(concurrency))) for request in done]


def prompts(rng: random.Random, count: int, length: int) -> list[list[int]]:
    return [[rng.randrange(1000, 40000) for _ in range(length)] for _ in range(count)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("servers", nargs="+", metavar="NAME=URL")
    options.add_argument("--model", default="SmolLM2-135M-Instruct")
    options.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    options.add_argument("--input", type=int, default=128)
    options.add_argument("--output", type=int, default=128)
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--settings", default="", help="how the servers were started, for the record")
    args = options.parse_args()
    servers = dict(server.split("=", 1) for server in args.servers)
    rng = random.Random(time.time_ns())
    for url in servers.values():  # warm-up
        asyncio.run(closed_loop(url, args.model, prompts(rng, 2, args.input), 2, 8))
    for concurrency in args.concurrency:
        runs: dict[str, list[tuple[float, list[Request]]]] = {name: [] for name in servers}
        for _ in range(args.repeat):
            for name, url in servers.items():
                count = max(2, concurrency)
                began = time.perf_counter()
                work = closed_loop(url, args.model, prompts(rng, count, args.input), concurrency, args.output)
                done = asyncio.run(work)
                seconds = time.perf_counter() - began
                runs[name].append((sum(request.output_tokens for request in done) / seconds, done))
                print(f"c{concurrency} {name}: {runs[name][-1][0]:.1f} tok/s", flush=True)
        record(args, concurrency, runs)


def record(args: argparse.Namespace, concurrency: int, runs: dict[str, list[tuple[float, list[Request]]]]) -> None:
    rates = {name: statistics.median(rate for rate, _ in results) for name, results in runs.items()}
    first = next(iter(rates))
    rows = []
    for name, results in runs.items():
        requests = [request for _, done in results for request in done]
        gaps = [(r.total - r.first) / max(1, r.output_tokens - 1) for r in requests]
        rows.append(
            {
                "server": name,
                "settings": args.settings,
                "concurrency": concurrency,
                "input": args.input,
                "output": args.output,
                "requests": len(requests),
                "output_tok_s": f"{rates[name]:.1f}",
                "ttft_p50_ms": f"{1000 * statistics.median(r.first for r in requests):.0f}",
                "inter_token_p50_ms": f"{1000 * statistics.median(gaps):.1f}",
                "first_over_this": "" if name == first else f"{rates[first] / rates[name]:.2f}",
            }
        )
    append("serve.csv", rows, "torch")


if __name__ == "__main__":
    main()
