"""A parameter out of range is refused by name, value and range; what is in range reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.frontend.sampling_params import ContextTooLong, ParameterError, SamplingParams, Vocabulary
from surefoot.protocol.messages import GenerateRequest, Sampling


def request_of(params: SamplingParams, prompt: tuple[int, ...] = (5, 6, 7), max_model_len: int = 10) -> GenerateRequest:
    return params.to_request(1, prompt, Vocabulary(100, (2, 3)), max_model_len, default_seed=42)


@pytest.mark.parametrize(
    "param, value, allowed",
    [
        ("temperature", -0.1, "from 0 to 2"),
        ("temperature", 2.1, "from 0 to 2"),
        ("temperature", float("nan"), "from 0 to 2"),
        ("top_k", -2, "-1 or 0"),
        ("top_p", 0, "above 0"),
        ("top_p", 1.5, "at most 1"),
        ("min_p", -1, "from 0 to 1"),
        ("min_p", float("inf"), "from 0 to 1"),
        ("seed", -1, "from 0 to 9223372036854775807"),
        ("seed", 2**63, "from 0 to 9223372036854775807"),
        ("max_tokens", 0, "at least 1"),
        ("min_tokens", -1, "at least 0"),
        ("stop", "text", "a sequence of strings"),
        ("stop", ("a", ""), "non-empty"),
        ("stop", ("a",) * 17, "at most 16"),
    ],
)
def test_out_of_range_is_refused_by_name(param: str, value: Any, allowed: str):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{param: value})
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param} is ")
    assert allowed in str(caught.value)


def test_min_tokens_cannot_exceed_max_tokens():
    with pytest.raises(ParameterError, match="min_tokens is 5; allowed is: at most max_tokens, which is 4"):
        SamplingParams(max_tokens=4, min_tokens=5)


def test_all_values_reach_the_engine():
    params = SamplingParams(
        temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=11, max_tokens=4, min_tokens=2, stop_token_ids=(9, 3)
    )
    assert request_of(params) == GenerateRequest(
        id=1,
        prompt_ids=(5, 6, 7),
        max_new_tokens=4,
        min_new_tokens=2,
        stop_ids=(2, 3, 9),
        sampling=Sampling(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=11),
        cache_namespace="",
    )


def test_defaults():
    made = request_of(SamplingParams())
    assert made.sampling == Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=42)
    assert made.max_new_tokens == 7  # the rest of the context
    assert made.stop_ids == (2, 3)


def test_ignore_eos_keeps_the_users_own_stop_ids():
    assert request_of(SamplingParams(ignore_eos=True, stop_token_ids=(9,))).stop_ids == (9,)


def test_top_k_of_minus_one_means_no_limit():
    assert request_of(SamplingParams(top_k=-1)).sampling.top_k == 0


@pytest.mark.parametrize(
    "params, prompt_tokens, param, numbers",
    [
        (SamplingParams(), 10, "prompt", ("10", "at most 9")),
        (SamplingParams(), 11, "prompt", ("11", "holds 10")),
        (SamplingParams(max_tokens=8), 3, "max_tokens", ("3 tokens", "max_tokens is 8", "context of 10", "at most 7")),
    ],
)
def test_what_does_not_fit_is_refused_with_both_lengths(params, prompt_tokens, param, numbers):
    with pytest.raises(ContextTooLong) as caught:
        request_of(params, (5,) * prompt_tokens)
    assert caught.value.param == param
    assert all(number in str(caught.value) for number in numbers)


@pytest.mark.parametrize("max_tokens, prompt_tokens", [(1, 9), (7, 3), (None, 9)])
def test_what_just_fits_is_taken(max_tokens, prompt_tokens):
    made = request_of(SamplingParams(max_tokens=max_tokens), (5,) * prompt_tokens)
    assert len(made.prompt_ids) + made.max_new_tokens == 10


@pytest.mark.parametrize(
    "params, prompt, param",
    [
        (SamplingParams(), (5, 100), "prompt"),
        (SamplingParams(), (-1,), "prompt"),
        (SamplingParams(), (), "prompt"),
        (SamplingParams(stop_token_ids=(100,)), (5,), "stop_token_ids"),
        (SamplingParams(min_tokens=8), (5, 6, 7), "min_tokens"),
    ],
)
def test_ids_and_lengths_are_checked_against_the_model(params, prompt, param):
    with pytest.raises(ParameterError) as caught:
        request_of(params, prompt)
    assert caught.value.param == param


def request(params: SamplingParams, default_seed: int = 1) -> GenerateRequest:
    return params.to_request(1, [5], Vocabulary(50, (2, -1, 50, 7)), 100, default_seed)


def test_ids_that_the_model_does_not_have_never_reach_it() -> None:
    """A tokenizer, or its config, may name more than the embedding has."""
    assert request(SamplingParams()).stop_ids == (2, 7)
    with pytest.raises(ParameterError, match="stop_token_ids has token id 50; the model has ids from 0 to 49"):
        request(SamplingParams(stop_token_ids=[50]))
    with pytest.raises(ParameterError, match="prompt has token id 99"):
        SamplingParams().to_request(1, [99], Vocabulary(50, ()), 100, 1)


def test_numbers_that_would_overflow_on_the_way_are_brought_into_range() -> None:
    assert request(SamplingParams(top_k=2**70)).sampling.top_k == 50
    assert request(SamplingParams(temperature=1e-38)).sampling.temperature == 0
    assert request(SamplingParams(), default_seed=2**63 + 4).sampling.seed == 4


def test_stop_token_ids_are_few() -> None:
    with pytest.raises(ParameterError, match="at most 64 ids"):
        SamplingParams(stop_token_ids=list(range(65)))
