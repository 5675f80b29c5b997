"""An output's texts and scored tokens add up to the same, however its tokens came."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from surefoot.config.engine_plan import CheckpointRef
from surefoot.frontend.output import NO_SCORE, Output, ScoredToken, scores
from surefoot.frontend.sampling_params import SamplingParams, Vocabulary
from surefoot.frontend.tokenizer import Tokenizer, load_tokenizer
from surefoot.protocol.messages import Finished, FinishReason, Logprobs
from tests.tiny import write_tokenizer

TEXT = "Grüße 👋 from the fox. " * 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return load_tokenizer(CheckpointRef(str(path), "safetensors"))


def output_of(tokenizer: Tokenizer, params: SamplingParams) -> Output:
    request = params.to_request(1, [5], Vocabulary(301, tokenizer.eos_ids), 200, default_seed=1)
    return Output(request, params, tokenizer)


def logprobs(token_ids: list[int]) -> list[Logprobs]:
    return [Logprobs(1, (-token / 8,), ((token, 7),), ((-token / 8, -1.0),)) for token in token_ids]


def run(output: Output, token_ids: list[int], sizes: list[int], finished: Finished) -> tuple[str, list[ScoredToken]]:
    """Pushes the tokens in portions of these sizes, as long as the output wants more."""
    text, tokens = "", []
    rest = list(token_ids)
    wants_scores = output.request.logprobs >= 0
    for size in [*sizes, len(token_ids)]:
        portion, rest = rest[:size], rest[size:]
        shown = len(text)
        piece = output.push(portion, logprobs(portion) if wants_scores else [], None if rest else finished)
        text += piece.text
        tokens += piece.tokens
        is_last = output.stopped or not rest
        assert all(shown <= token.offset for token in piece.tokens)  # no token later than its text
        assert is_last or all(token.offset < len(text) for token in piece.tokens)  # and none earlier
        if is_last:
            return text, tokens
    raise AssertionError


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logprobs=2),
        SamplingParams(logprobs=0, stop=[" from"]),
        SamplingParams(logprobs=0, stop=["ß", "👋 f"]),
        SamplingParams(logprobs=0, stop=["fox. G"]),
        SamplingParams(logprobs=0, stop=["fox. Q"]),
        SamplingParams(logprobs=0, stop=["fox."], include_stop_str_in_output=True),
        SamplingParams(logprobs=0, skip_special_tokens=False, include_stop_str_in_output=True),
    ],
    ids=str,
)
def test_portions_change_nothing(tokenizer, params):
    token_ids = [*tokenizer.encode(TEXT, add_special_tokens=False), tokenizer.eos_ids[0]]
    token_ids.insert(5, 0)  # a special token in the middle
    finished = Finished(1, FinishReason.STOP, 0, "")
    whole = output_of(tokenizer, params)
    expected = run(whole, token_ids, [], finished)
    generator = random.Random(3)
    for _ in range(30):
        output = output_of(tokenizer, params)
        sizes = [generator.choice([0, 1, 1, 2, 5]) for _ in range(200)]
        assert run(output, token_ids, sizes, finished) == expected
        assert output.token_ids == whole.token_ids
        assert [token.id for token in expected[1]] == output.token_ids  # each that counts is scored once
    text, tokens = expected
    assert [token.score for token in tokens] == list(scores(logprobs(whole.token_ids)))
    stops = [(TEXT.index(stop) + len(stop), TEXT.index(stop)) for stop in params.stop if stop in TEXT]
    if stops and params.include_stop_str_in_output:
        assert text == TEXT[: min(stops)[0]]
    elif stops:
        assert text == TEXT[: min(stops)[1]]


def test_offsets_are_those_of_the_text(tokenizer):
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    finished = Finished(1, FinishReason.LENGTH, 0, "")
    text, tokens = run(output_of(tokenizer, SamplingParams(logprobs=0)), token_ids, [1] * 100, finished)
    assert text == TEXT
    for position, token in enumerate(tokens):
        before = tokenizer.decode(token_ids[:position]).rstrip("\ufffd")
        assert token.offset == len(before)


@pytest.mark.parametrize("stop_id_shown", [False, True])
@pytest.mark.parametrize("special_shown", [False, True])
def test_a_stop_id_is_text_only_if_asked_for(tokenizer, stop_id_shown, special_shown):
    params = SamplingParams(include_stop_str_in_output=stop_id_shown, skip_special_tokens=not special_shown)
    output = output_of(tokenizer, params)
    token_ids = [*tokenizer.encode("fox", add_special_tokens=False), tokenizer.eos_ids[0]]
    finished = Finished(1, FinishReason.STOP, 0, "")
    text, _ = run(output, token_ids, [], finished)
    assert text == ("fox<|im_end|>" if stop_id_shown and special_shown else "fox")
    assert output.token_ids == token_ids
    assert output.finish_reason(finished) == "stop"


def test_of_several_stop_strings_the_one_complete_first_is_shown(tokenizer):
    params = SamplingParams(stop=["e quick", "he q"], include_stop_str_in_output=True)
    output = output_of(tokenizer, params)
    token_ids = tokenizer.encode("the quick brown", add_special_tokens=False)
    text, _ = run(output, token_ids, [1] * 20, Finished(1, FinishReason.LENGTH, 0, ""))
    assert text == "the q"


def test_without_output_tokens_nothing_is_told(tokenizer):
    output = output_of(tokenizer, SamplingParams(max_tokens=0, prompt_logprobs=0, logprobs=0))
    finished = Finished(1, FinishReason.STOP, 0, "")
    piece = output.push([2], logprobs([2]), finished)
    assert (piece.text, piece.tokens, output.token_ids) == ("", (), [])
    assert output.finish_reason(finished) == "length"


@pytest.mark.parametrize(
    "reason, is_complete",
    [
        (FinishReason.STOP, True),
        (FinishReason.LENGTH, True),
        (FinishReason.ABORTED, False),
        (FinishReason.ERROR, False),
    ],
)
def test_an_answer_is_complete_unless_the_engine_gave_up(tokenizer, reason, is_complete):
    finished = Finished(1, reason, 0, "")
    assert output_of(tokenizer, SamplingParams()).is_complete(finished) == is_complete
    stopped = output_of(tokenizer, SamplingParams(stop=["f"]))
    stopped.push(tokenizer.encode("fox", add_special_tokens=False), [], None)
    assert stopped.is_complete(finished)
    assert stopped.finish_reason(finished) == "stop"


def test_scores_are_read_by_position():
    parts = [Logprobs(1, (-1.0, -2.0), ((5, 6), (7,)), ((-0.5, -3.0), (-2.0,))), Logprobs(1, (-4.0,), ((),), ((),))]
    told = list(scores(parts))
    assert [score.logprob for score in told] == [-1.0, -2.0, -4.0]
    assert [score.top for score in told] == [((5, -0.5), (6, -3.0)), ((7, -2.0),), ()]
    assert NO_SCORE.logprob != NO_SCORE.logprob  # not a number
