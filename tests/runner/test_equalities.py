"""One request's tokens do not depend on how its steps were cut, cached or batched. Logits are compared, and the path
that ran is asserted."""

from __future__ import annotations

import pytest
import torch

from surefoot.config.paths import PrefixRegime, SamplerKind, StepKind
from surefoot.runner.model_runner import ModelRunner
from tests.runner.steps import admission, chunked_logits, generate, make_runner, prefill, set_last_token, step
from tests.tiny import TinyLlama

TOLERANCE = {"rtol": 0, "atol": 2e-5}
PROMPTS = [
    [(5 * i * i + k * i + k) % 300 for i in range(length)] for k, length in enumerate((1, 15, 16, 17, 33, 64, 91))
]
PAGES = [list(range(10 * k, 10 * k + 8)) for k in range(len(PROMPTS))]


@pytest.fixture(
    params=[("torch", "float32"), ("torch", "float16"), ("native", "float32"), ("native", "float16")],
    ids=["dense", "fp16_packed", "native-float32", "native-float16"],
    scope="module",
)
def runner(request: pytest.FixtureRequest, tiny_llama: TinyLlama) -> ModelRunner:
    cpu_kernels, weight_dtype = request.param
    return make_runner(tiny_llama.path, cpu_kernels=cpu_kernels, weight_dtype=weight_dtype)


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000], ids=["one-token", "odd", "page", "whole"])
def test_chunked_prefill_gives_the_same_logits(runner: ModelRunner, chunk: int) -> None:
    whole = chunked_logits(runner, PROMPTS[6], 1000, PAGES[6])
    torch.testing.assert_close(chunked_logits(runner, PROMPTS[6], chunk, PAGES[0])[-1:], whole, **TOLERANCE)


def test_cached_prefix_gives_the_same_logits(runner: ModelRunner) -> None:
    """Another slot reads the pages that the first one wrote."""
    whole = chunked_logits(runner, PROMPTS[6], 1000, PAGES[6])
    for cached_pages in (1, 3, 5):
        start = 16 * cached_pages
        pages = PAGES[6][:cached_pages] + PAGES[5][cached_pages:]
        plan = step([admission(4)], rows=[prefill(4, start, PROMPTS[6][start:], pages)])
        logits, rows, _ = runner.forward(plan)
        torch.testing.assert_close(logits, whole, **TOLERANCE)
        assert runner.path(plan, rows).prefix is PrefixRegime.SOME


def test_a_row_of_a_mixed_batch_gives_the_logits_of_a_batch_of_one(runner: ModelRunner) -> None:
    """All rows decode but the last two, which prefill: one from the start, one in the middle of its prompt."""
    alone = [chunked_logits(runner, prompt, 1000, pages) for prompt, pages in zip(PROMPTS, PAGES, strict=True)]
    for slot, (prompt, pages) in enumerate(zip(PROMPTS[:5], PAGES, strict=False)):
        known = prompt[:-1] or prompt  # a row computes at least one token; this one is then written again
        runner.forward(step([admission(slot)], rows=[prefill(slot, 0, known, pages)]))
        set_last_token(runner, slot, prompt[-1])
    runner.forward(step([admission(6)], rows=[prefill(6, 0, PROMPTS[6][:40], PAGES[6], samples=False)]))
    decode = [(slot, len(PROMPTS[slot]) - 1) for slot in (3, 0, 4, 1, 2)]
    plan = step([admission(5)], decode, [prefill(5, 0, PROMPTS[5], PAGES[5]), prefill(6, 40, PROMPTS[6][40:])])
    logits, rows, _ = runner.forward(plan)
    torch.testing.assert_close(logits, torch.cat([alone[slot] for slot in (3, 0, 4, 1, 2, 5, 6)]), **TOLERANCE)
    path = runner.path(plan, rows)
    assert (path.kind, path.prefix, path.sampler) == (StepKind.MIXED, PrefixRegime.SOME, SamplerKind.GREEDY)


def test_a_preempted_request_resumes_with_the_same_tokens(runner: ModelRunner) -> None:
    """Its pages go to another request; later prompt and output are computed again, elsewhere."""
    whole = generate(runner, PROMPTS[4], 20, PAGES[4])
    before = generate(runner, PROMPTS[4], 9, PAGES[4])
    chunked_logits(runner, PROMPTS[6], 1000, PAGES[4])  # overwrites all pages
    after = generate(runner, PROMPTS[4] + before, 11, PAGES[2], slot=7)
    assert before + after == whole


def test_every_decode_group_size_gives_the_same_logits(runner: ModelRunner) -> None:
    """Eight rows, of which some are gathered together: as many groups as GATHER_TOKENS asks for."""
    from surefoot.attention import torch_backend

    for slot in range(8):
        prompt, pages = PROMPTS[6][: 20 + 9 * slot], range(10 * slot, 10 * slot + 8)
        runner.forward(step([admission(slot)], rows=[prefill(slot, 0, prompt, pages)]))
        set_last_token(runner, slot, 5)
    plan = step(decode=[(slot, 20 + 9 * slot) for slot in range(8)])
    wanted = runner.forward(plan)[0]
    original = torch_backend.GATHER_TOKENS
    try:
        for limit in (1, 64, 200, 10_000):
            torch_backend.GATHER_TOKENS = limit
            torch.testing.assert_close(runner.forward(plan)[0], wanted, **TOLERANCE)
    finally:
        torch_backend.GATHER_TOKENS = original
