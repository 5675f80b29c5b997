"""A parameter out of range is refused by name, value and range; what is in range reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.frontend.sampling_params import (
    ContextTooLong,
    ParameterError,
    Placement,
    SamplingParams,
    Vocabulary,
    sibling_seed,
)
from surefoot.protocol.messages import NO_LOGPROBS, GenerateRequest, Sampling


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
        ("repetition_penalty", 0, "from 0.01 to 100"),
        ("repetition_penalty", float("nan"), "from 0.01 to 100"),
        ("presence_penalty", -2.1, "from -2 to 2"),
        ("frequency_penalty", 3, "from -2 to 2"),
        ("logit_bias", dict.fromkeys(range(1025), 1), "at most 1024"),
        ("logprobs", 21, "from 0 to 20"),
        ("logprobs", -1, "from 0 to 20"),
        ("prompt_logprobs", 21, "from 0 to 20"),
        ("max_tokens", -1, "at least 0"),
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
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logit_bias={4: 2, 5: 0, 6: -100},
        seed=11,
        max_tokens=4,
        min_tokens=2,
        stop_token_ids=(9, 3),
        logprobs=0,
        prompt_logprobs=5,
    )
    placement = Placement(siblings=(1, 2), priority=-3, cache_namespace="mine")
    assert params.to_request(1, (5, 6, 7), Vocabulary(100, (2, 3)), 10, 42, placement) == GenerateRequest(
        id=1,
        group_id=1,
        prompt_ids=(5, 6, 7),
        max_new_tokens=4,
        min_new_tokens=2,
        stop_ids=(2, 3, 9),
        sampling=Sampling(0.5, 7, 0.9, 0.1, 1.1, 0.2, -0.3, ((4, 2.0), (6, -100.0)), seed=11),
        logprobs=0,
        prompt_logprobs=5,
        cache_namespace="mine",
        priority=-3,
    )


def test_defaults():
    made = request_of(SamplingParams())
    assert made.sampling == Sampling(1.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), seed=42)
    assert not made.sampling.penalises
    assert (made.group_id, made.priority, made.cache_namespace) == (1, 0, "")
    assert (made.logprobs, made.prompt_logprobs) == (NO_LOGPROBS, NO_LOGPROBS)
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
        (SamplingParams(logit_bias={100: 1}), (5,), "logit_bias"),
        (SamplingParams(logit_bias={-1: 0}), (5,), "logit_bias"),
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


@pytest.mark.parametrize("bias", [100.1, -101, float("nan"), float("inf")])
def test_a_bias_out_of_range_is_refused_with_its_token(bias: float) -> None:
    with pytest.raises(ParameterError, match=r"logit_bias of token 7 is .*; allowed is: from -100 to 100") as caught:
        SamplingParams(logit_bias={5: 1, 7: bias})
    assert caught.value.param == "logit_bias"


def test_siblings_share_a_group_and_differ_by_seed() -> None:
    params, siblings = SamplingParams(seed=7), (4, 5, 6)
    made = [
        params.to_request(request_id, [5], Vocabulary(50, ()), 100, 1, Placement(siblings)) for request_id in siblings
    ]
    assert {request.group_id for request in made} == {4}
    assert [request.sampling.seed for request in made] == [7, sibling_seed(7, 1), sibling_seed(7, 2)]
    assert len({sibling_seed(2**63 - 1, index) for index in range(1000)}) == 1000
    assert all(0 <= sibling_seed(2**63 - 1, index) < 2**63 for index in range(1000))


def test_without_a_seed_siblings_keep_their_own() -> None:
    made = [SamplingParams().to_request(id_, [5], Vocabulary(50, ()), 100, id_, Placement((4, 5))) for id_ in (4, 5)]
    assert [request.sampling.seed for request in made] == [4, 5]


def test_no_output_still_takes_one_token_of_the_engine() -> None:
    assert request(SamplingParams(max_tokens=0, prompt_logprobs=0)).max_new_tokens == 1


@pytest.mark.parametrize(
    "param, options", [("priority", {"priority": 2**31}), ("cache_salt", {"cache_namespace": "x" * 257})]
)
def test_a_placement_out_of_range_is_refused_by_name(param: str, options: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        Placement(**options)
    assert caught.value.param == param
