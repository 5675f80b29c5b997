"""What a server tells of itself over HTTP: software, model, configuration, prefix hits. Any of them may be missing."""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.request
from typing import Any

from surefoot.bench.results import ServerInfo

SECONDS = 10.0
# Of cached and of all prompt tokens: the counters of surefoot, vLLM and SGLang.
HIT_COUNTERS = (
    ("surefoot_prompt_tokens_cached_total", "surefoot_prompt_tokens_total"),
    ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    ("sglang:cached_tokens_total", "sglang:prompt_tokens_total"),
)


class UnreachableError(ValueError):
    """A server that cannot be asked, with the way out."""


def look_at(name: str, url: str, model: str, api_key: str) -> ServerInfo:
    """model: empty for the first that the server lists. Raises UnreachableError."""
    models = [entry.get("id", "") for entry in _json(url, "/v1/models", api_key).get("data", [])]
    if not model and not models:
        raise UnreachableError(f"{url}/v1/models lists no model: name one with --model")
    plan = _maybe(url, "/plan", api_key)
    return ServerInfo(
        name=name,
        url=url,
        software=_software(url, api_key, has_plan=isinstance(plan, dict)),
        model=model or models[0],
        plan_hash=plan_hash(plan) if isinstance(plan, dict) else "unknown",
    )


def plan_hash(plan: dict[str, Any]) -> str:
    """Of a surefoot server's plan, but for how much memory was free when it was made."""
    hardware = {key: value for key, value in plan.get("hardware", {}).items() if key != "memory_available"}
    reasons = [reason[:2] for reason in plan.get("reasons", [])]  # why they are so tells of the memory too
    stated = json.dumps({**plan, "hardware": hardware, "reasons": reasons}, sort_keys=True)
    return hashlib.sha256(stated.encode()).hexdigest()[:12]


def hits(url: str, api_key: str) -> tuple[float, float] | None:
    """(cached, all) prompt tokens that the server has counted since it began; None if it does not say."""
    try:
        text = _get(url, "/metrics", api_key).decode()
    except (UnreachableError, UnicodeDecodeError):
        return None
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        if any(name in counters for counters in HIT_COUNTERS):
            sums[name] = sums.get(name, 0.0) + float(rest.split()[-1])
    for cached, total in HIT_COUNTERS:
        if total in sums:
            return sums.get(cached, 0.0), sums[total]
    return None


def _software(url: str, api_key: str, has_plan: bool) -> str:
    version = _maybe(url, "/version", api_key)
    if isinstance(version, dict) and "version" in version:
        return f"{'surefoot' if has_plan else 'vLLM'} {version['version']}"
    props = _maybe(url, "/props", api_key)
    if isinstance(props, dict) and "build_info" in props:
        return f"llama.cpp {props['build_info']}"
    info = _maybe(url, "/get_server_info", api_key)
    if isinstance(info, dict) and "version" in info:
        return f"SGLang {info['version']}"
    return "unknown"


def _maybe(url: str, path: str, api_key: str) -> Any:
    try:
        return json.loads(_get(url, path, api_key))
    except ValueError:  # UnreachableError too
        return None


def _json(url: str, path: str, api_key: str) -> Any:
    try:
        return json.loads(_get(url, path, api_key))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UnreachableError(f"{url}{path} answers with something that is no JSON: is it an OpenAI API?") from error


def _get(url: str, path: str, api_key: str) -> bytes:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{url}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        raise UnreachableError(f"{url}{path} answers with HTTP status {error.code}") from error
    except (OSError, ValueError) as error:
        raise UnreachableError(f"{url} does not answer: {error}") from error
