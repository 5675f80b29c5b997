"""What operators and tools read: metrics under every engine's names, the OpenAPI document, the log."""

from __future__ import annotations

import asyncio
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from surefoot.http.answer_schema import Model, ModelList, State, Version
from surefoot.http.edge import OPEN_PATHS
from surefoot.http.metrics import OTHER_NAMES
from tests.http.conftest import MODEL
from tests.http.fake_engine import CACHED_TOKENS
from tests.http.test_endings import call, until


def test_the_same_figures_under_other_names(with_server):
    async def test(server):
        usage = (await server.chat()).json()["usage"]
        await server.chat(stream=True, max_tokens=3)
        for own, others in (
            ("num_requests_running", ("vllm:num_requests_running", "sglang:num_running_reqs")),
            ("num_requests_waiting", ("vllm:num_requests_waiting", "sglang:num_queue_reqs")),
            ("kv_cache_usage_perc", ("vllm:kv_cache_usage_perc", "sglang:token_usage")),
            ("prefix_cache_hit_rate", ("sglang:cache_hit_rate",)),
            ("prompt_tokens_total", ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total")),
            ("prompt_tokens_cached_total", ("vllm:prompt_tokens_cached_total", "sglang:cached_tokens_total")),
            ("generation_tokens_total", ("vllm:generation_tokens_total", "sglang:generation_tokens_total")),
            ("time_to_first_token_seconds_sum", ("vllm:time_to_first_token_seconds_sum",)),
            ("e2e_request_latency_seconds_count", ("sglang:e2e_request_latency_seconds_count",)),
        ):
            value = await server.metric(f"surefoot_{own}")
            for other in others:
                assert await server.metric(other, f"/metrics/{other.partition(':')[0]}") == value
        finished = {"finished_reason": "stop"}
        assert await server.metric("vllm:request_success_total", "/metrics/vllm", **finished) == 1
        assert await server.metric("vllm:generation_tokens_total", "/metrics/vllm") == usage["completion_tokens"] + 3
        assert await server.metric("sglang:cached_tokens_total", "/metrics/sglang") == 2 * CACHED_TOKENS
        assert await server.metric("surefoot_prefix_cache_hit_rate") == 30 / 120

    with_server(test)


@pytest.mark.parametrize("path, column", [("/metrics/vllm", 0), ("/metrics/sglang", 1)])
def test_each_name_of_the_table_is_told_and_no_other(with_server, path, column):
    async def test(server):
        own = {family.name for family in text_string_to_metric_families((await server.http.get("/metrics")).text)}
        assert {f"surefoot_{name}" for name in OTHER_NAMES} <= own
        text = (await server.http.get(path)).text
        told = {family.name for family in text_string_to_metric_families(text)}
        assert told == {names[column] for names in OTHER_NAMES.values()} - {""}
        assert "_created" not in text

    with_server(test)


def test_a_restart_is_counted(with_server):
    async def test(server):
        server.client.engine_died("a test", restarting=True)
        server.engine.die()
        server.engine.ready()
        await until(lambda: server.client.state == "ready")
        assert await server.metric("surefoot_engine_restarts_total") == 1

    with_server(test)


def test_those_whose_client_left_are_counted(with_server):
    async def test(server):
        leave = asyncio.Event()
        request = asyncio.create_task(call(server.app, {"n": 2}, leave))
        await until(lambda: server.engine.tokens_sent > 3)
        leave.set()
        await request
        assert await server.metric("surefoot_request_success_total", finished_reason="abort") == 2

    with_server(test)


def test_bodies_of_operations(with_server):
    async def test(server):
        ModelList.model_validate((await server.http.get("/v1/models")).json())
        Model.model_validate((await server.http.get(f"/v1/models/{MODEL}")).json())
        Version.model_validate((await server.http.get("/version")).json())
        assert (await server.http.get("/")).json()["api"] == "/openapi.json"
        State.model_validate((await server.http.get("/ready")).json())
        server.client.engine_died("a test", restarting=False)
        health = await server.http.get("/health")
        State.model_validate(health.json())
        assert health.headers["retry-after"] == str(server.client.retry_seconds)

    with_server(test)


@pytest.mark.parametrize("key", ["", "secret"])
def test_the_openapi_document(with_server, key):
    async def test(server):
        server.http.headers["Authorization"] = "Bearer secret"
        document = (await server.http.get("/openapi.json")).json()
        tokens = {"/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"}
        asked = {"/v1/chat/completions", "/v1/completions"} | tokens
        read = {"/v1/models", "/v1/models/{name}", "/plan"}
        assert set(document["paths"]) == asked | read | OPEN_PATHS
        assert "HTTPValidationError" not in document["components"]["schemas"]
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                assert ("security" in operation) == (bool(key) and path not in OPEN_PATHS)
                for status, response in operation["responses"].items():
                    assert status in {"200", "4XX", "500", "503"}
                    [(kind, content)] = [item for item in response["content"].items() if "event-stream" not in item[0]]
                    assert content["schema"], (method, path, status)
                    assert kind == ("text/plain" if path.startswith("/metrics") else "application/json")
        chat = document["paths"]["/v1/chat/completions"]["post"]
        assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("ChatBody")
        assert set(chat["responses"]) == {"200", "4XX", "500", "503"}
        assert "text/event-stream" in chat["responses"]["200"]["content"]
        assert document["components"]["schemas"]["ChatChunk"]["properties"]["model"]["enum"] == [MODEL]

    with_server(test, api_key=key)


def test_lines_about_a_request_carry_its_id(with_server, caplog):
    async def test(server):
        server.http.headers["X-Request-Id"] = "abc"
        await server.chat(max_tokens=1)
        await server.chat(temperature=9)
        server.engine.script = lambda request: [5]
        await server.chat(stream=True)

    with caplog.at_level(logging.INFO, logger="surefoot.http"):
        with_server(test)
    records = [record for record in caplog.records if record.name == "surefoot.http"]
    assert len(records) == 4  # the stream that fails has a line for the error, and its own
    assert {vars(record)["request_id"] for record in records} == {"abc"}
    assert all(record.getMessage().startswith("abc ") for record in records)


def test_a_client_cannot_write_lines_of_the_log(with_server, caplog):
    async def test(server):
        await server.chat(**{"a\nERROR forged": 1})

    with caplog.at_level(logging.INFO, logger="surefoot.http"):
        with_server(test)
    [line] = [record.getMessage() for record in caplog.records if record.name == "surefoot.http"]
    assert "forged" in line
    assert "\n" not in line
