"""The offline API: what it takes, what it gives, and that it goes on after an interruption."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot import LLM, SamplingParams
from surefoot.frontend.sampling_params import ContextTooLong, ParameterError
from surefoot.protocol.step_plan import StepDone, StepPlan
from surefoot.scheduler import invariants
from tests.tiny import TinyLlama
from tests.tiny_families import write_tiny

LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.05 * i for i in range(6)],
        "long_factor": [1.5 + 0.9 * i for i in range(6)],
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 64,
    },
    "original_max_position_embeddings": 64,
}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_llama: TinyLlama) -> Iterator[LLM]:
    settings = {
        "weight_dtype": "float32",
        "max_running_requests": 2,
        "max_queued_requests": 1,
        "kv_cache_tokens": 512,
        "threads": 1,
    }
    with LLM(str(tiny_llama.path), **settings) as made:
        yield made


def test_more_prompts_than_places_text_and_ids(llm: LLM, tiny_llama: TinyLlama) -> None:
    prompts = ["the lazy dog", [30, 31, 32], *([40 + k, 50] for k in range(9))]
    completions = llm.generate(prompts, GREEDY)
    assert [list(completion.token_ids) for completion in completions] == [
        tiny_llama.greedy(list(completion.prompt_ids), 10) for completion in completions
    ]
    assert completions[1].prompt_ids == (30, 31, 32)
    assert {completion.finish_reason for completion in completions} == {"length"}
    invariants.check(llm.scheduler)


@pytest.mark.parametrize("longest", [64, 256], ids=["short", "long"])
def test_longrope_is_chosen_by_max_model_len(tmp_path: Path, longest: int) -> None:
    """transformers chooses by the sequence, which here is within the original context, or beyond it."""
    tiny = write_tiny("phi3", tmp_path, **LONGROPE)
    prompt = [(7 * i) % 290 + 5 for i in range(80 if longest > 64 else 40)]
    wanted = {"weight_dtype": "float32", "max_model_len": longest, "kv_cache_tokens": 512, "threads": 1}
    with LLM(str(tiny.path), **wanted) as llm:
        (completion,) = llm.generate([prompt], GREEDY)
    assert list(completion.token_ids) == tiny.greedy(prompt, 10)


def test_one_prompt_is_a_list_of_one_and_none_is_none(llm: LLM) -> None:
    assert llm.generate([30, 31, 32], GREEDY) == llm.generate([[30, 31, 32]], GREEDY)
    assert len(llm.generate("the lazy dog", GREEDY)) == 1
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    assert [len(c.token_ids) for c in llm.generate([[30], [30]], [short, GREEDY])] == [3, 10]
    with pytest.raises(ValueError, match="2 prompts and 1 sampling parameters"):
        llm.generate([[30], [30]], [short])


def test_a_stop_string_ends_the_text_before_it_and_the_request_with_it(llm: LLM) -> None:
    whole = llm.generate([[30, 31]], GREEDY)[0]
    middle = llm.tokenizer.decode(whole.token_ids[4:6])
    stopped = llm.generate([[30, 31]], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, stop=(middle,)))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text[: whole.text.index(middle)]
    assert whole.token_ids[: len(stopped.token_ids)] == stopped.token_ids
    assert len(stopped.token_ids) <= 6
    assert not llm.scheduler.has_work


def test_what_does_not_fit_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ContextTooLong, match="600 tokens and the context of this server holds 512"):
        llm.generate([[30], list(range(10, 300)) * 2 + [5] * 20], GREEDY)
    with pytest.raises(ParameterError, match="ids from 0 to"):
        llm.generate([[10**6]], GREEDY)
    assert not llm.scheduler.has_work


def test_an_interruption_leaves_a_model_that_works(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = llm.generate([[30, 31], [32]], GREEDY)
    run_step, steps = llm._executor.runner.run, 0

    def interrupted(plan: StepPlan) -> StepDone:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt
        return run_step(plan)

    with monkeypatch.context() as patch:
        patch.setattr(llm._executor.runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[30, 31], [32]], GREEDY)
    again = llm.generate([[30, 31], [32]], GREEDY)
    assert [c.token_ids for c in again] == [c.token_ids for c in wanted]


def test_a_streamed_chat_is_the_chat_and_may_be_left(llm: LLM) -> None:
    messages = [{"role": "user", "content": "the lazy dog"}]
    assert "".join(llm.stream_chat(messages, GREEDY)) == llm.chat(messages, GREEDY).text
    stream = llm.stream_chat(messages, SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    assert next(stream)
    stream.close()
    assert list(stream) == []
    assert not llm.scheduler.has_work
    invariants.check(llm.scheduler)
    assert llm.chat(messages, GREEDY).text


def test_a_streamed_chat_counts_its_tokens(llm: LLM) -> None:
    messages = [{"role": "user", "content": "the lazy dog"}]
    whole = llm.chat(messages, GREEDY)
    stream = llm.stream_chat(messages, GREEDY)
    assert (stream.prompt_tokens, stream.output_tokens) == (len(whole.prompt_ids), 0)
    assert "".join(stream) == whole.text
    assert stream.output_tokens == len(whole.token_ids)
    assert llm.count_tokens(messages) == len(whole.prompt_ids)


def test_a_stream_that_cannot_be_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ContextTooLong):
        llm.stream_chat([{"role": "user", "content": "the lazy dog" * 400}], GREEDY)
    assert not llm.scheduler.has_work


def test_logprobs_are_those_of_the_model(llm: LLM, tiny_llama: TinyLlama) -> None:
    prompt = [30, 31, 32]
    asked = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    (completion,) = llm.generate([prompt], asked)
    tokens = [*prompt, *completion.token_ids]
    expected = tiny_llama.logits(tokens[:-1]).log_softmax(-1)
    assert [token.id for token in completion.logprobs] == list(completion.token_ids)
    told = [score.logprob for score in completion.prompt_logprobs]
    told += [token.score.logprob for token in completion.logprobs]
    assert told == pytest.approx([float(expected[at, token]) for at, token in enumerate(tokens[1:])], abs=1e-3)
    assert all(token.score.top[0][0] == token.id and len(token.score.top) == 2 for token in completion.logprobs)
    plain = llm.generate([prompt], GREEDY)[0]
    assert (plain.logprobs, plain.prompt_logprobs) == ((), ())


def test_how_special_tokens_and_stop_strings_are_shown_is_the_callers_choice(llm: LLM) -> None:
    stop_id = llm.generate([[30, 31]], GREEDY)[0].token_ids[2]
    until = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, stop_token_ids=(stop_id,))
    shown = replace(until, include_stop_str_in_output=True)
    hidden, whole = (llm.generate([[30, 31]], params)[0] for params in (until, shown))
    assert hidden.token_ids == whole.token_ids
    assert whole.text == llm.tokenizer.decode(whole.token_ids)
    assert hidden.text == llm.tokenizer.decode(whole.token_ids[:-1])
