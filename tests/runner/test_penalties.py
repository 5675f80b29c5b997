"""Bias, penalties and bans over many steps, against a sampler in double precision that keeps its tokens in lists."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from unittest.mock import Mock

import pytest
import torch

from surefoot.config.paths import SamplerKind
from surefoot.kernels.sampling import greedy
from surefoot.protocol.messages import Sampling
from surefoot.runner.model_runner import ModelRunner
from surefoot.runner.sampler import SamplingRows, sample
from tests.runner.steps import GREEDY, admission, generate, make_runner, make_table, prefill, sampling, step
from tests.tiny import TinyLlama

PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(30)]
HEAVY = sampling(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7, logit_bias=((3, 4.0), (9, -2.0)))
DRAWN = sampling(temperature=0.9, seed=4, top_p=0.95, repetition_penalty=0.8, frequency_penalty=1.5)


@pytest.fixture(scope="module")
def runner(tiny_llama: TinyLlama) -> ModelRunner:
    return make_runner(tiny_llama.path, max_running_requests=32, kv_cache_tokens=8192)


@dataclass
class Row:
    asked: Sampling
    prompt: list[int]
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    output: list[int] = field(default_factory=list)

    def next_token(self, logits: torch.Tensor) -> int:
        """The greedy one."""
        asked, out = self.asked, logits.double()
        for token, bias in asked.logit_bias:
            out[token] += bias
        for token in set(self.prompt + self.output):
            value = float(out[token])
            out[token] = value / asked.repetition_penalty if value > 0 else value * asked.repetition_penalty
        for token in set(self.output):
            out[token] -= asked.presence_penalty + asked.frequency_penalty * self.output.count(token)
        if len(self.prompt) + len(self.output) < self.min_tokens:
            out[list(self.stop_ids)] = -torch.inf
        return int(out.argmax())


def combinations(vocab_size: int) -> list[Row]:
    """All of them, with and without a bias, and with stop ids that are banned for the first four tokens."""
    last = vocab_size - 1
    rows = []
    for repetition, presence, frequency, bias, stops in itertools.product(
        (1, 1.2, 0.8), (0, 0.5, -0.5), (0, 0.3, -0.3), ((), ((last, 2.5), (1, -100.0))), ((), (last, 2))
    ):
        asked = sampling(
            repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias
        )
        prompt = [len(rows), last, 2]
        rows.append(Row(asked, prompt, stops, len(prompt) + 4))
    return rows


@pytest.mark.parametrize("vocab_size", [301, 49153])
def test_all_combinations_in_one_batch_over_many_steps(vocab_size: int) -> None:
    """Logits are the same at every step but for a little noise, so that repetition is what decides."""
    rows = combinations(vocab_size)
    table = make_table(vocab_size, len(rows))
    n, generator = len(rows), torch.Generator().manual_seed(6)
    base = torch.randn(n, vocab_size, generator=generator)
    base[:, [0, 2, vocab_size - 1]] += base.amax(-1, keepdim=True)
    admissions = [
        admission(slot, row.asked, 3, stop_ids=row.stop_ids, min_tokens=row.min_tokens, history=tuple(row.prompt))
        for slot, row in enumerate(rows)
    ]
    for number in range(12):
        plan = step([] if number else admissions, decode=[(slot, 2 + number) for slot in range(n)])
        table.apply(plan)
        logits = base + 0.2 * torch.randn(n, vocab_size, generator=generator)
        wanted = [row.next_token(row_logits) for row, row_logits in zip(rows, logits, strict=True)]
        sampling_rows = SamplingRows(plan, table)
        tokens, finite = sample(logits.clone(), sampling_rows, table, greedy)
        table.append(sampling_rows.slots, tokens)
        assert sampling_rows.kind is SamplerKind.FULL
        assert tokens.tolist() == wanted
        assert bool(finite.all())
        for row, token in zip(rows, wanted, strict=True):
            row.output.append(token)
    assert len({tuple(row.output) for row in rows}) > n // 2  # the penalties did decide


@pytest.mark.parametrize("bias, token", [((9, 100.0), 9), ((250, 60.0), 250)])
def test_a_large_bias_forces_a_token_and_a_small_one_bans_it(
    runner: ModelRunner, bias: tuple[int, float], token: int
) -> None:
    assert generate(runner, PROMPT, 3, range(4), asked=sampling(logit_bias=(bias,))) == [token] * 3
    assert generate(runner, PROMPT, 3, range(4), asked=sampling(temperature=1, logit_bias=(bias,))) == [token] * 3
    plain = generate(runner, PROMPT, 6, range(4), asked=sampling(temperature=1.5, seed=1))
    banned = sampling(temperature=1.5, seed=1, logit_bias=tuple((token, -100.0) for token in set(plain)))
    assert not set(plain) & set(generate(runner, PROMPT, 6, range(4), asked=banned))


@pytest.mark.parametrize("asked", [HEAVY, DRAWN], ids=["greedy", "drawn"])
def test_a_preempted_request_resumes_with_the_same_tokens(runner: ModelRunner, asked: Sampling) -> None:
    """In another slot with another count row, which somebody else has used; its own was used by somebody else, too."""
    whole = generate(runner, PROMPT, 24, range(4), asked=asked)
    unpenalised = sampling(temperature=asked.temperature, seed=asked.seed, top_p=asked.top_p)
    assert whole != generate(runner, PROMPT, 24, range(4), asked=unpenalised)
    for cut in (1, 9, 23):
        before = generate(runner, PROMPT, cut, range(4), asked=asked)
        for slot in (0, 5):
            generate(runner, whole, 9, range(8, 12), slot=slot, asked=HEAVY)
        resumed = PROMPT + before
        after = generate(runner, resumed, 24 - cut, range(4), slot=5, asked=asked, prompt_length=len(PROMPT))
        assert before + after == whole


def test_a_row_gives_the_same_tokens_alone_and_in_a_batch_of_32(runner: ModelRunner) -> None:
    kinds = [
        GREEDY,
        HEAVY,
        DRAWN,
        sampling(temperature=1.0, seed=7),
        sampling(temperature=1.2, seed=8, top_k=5),
        sampling(temperature=1.0, seed=9, min_p=0.05, presence_penalty=-0.5),
        sampling(temperature=0.7, seed=10, logit_bias=((40, 3.0),)),
        sampling(temperature=2.0, seed=11, top_p=0.8, top_k=40, repetition_penalty=1.1),
    ]
    rows = [(slot, kinds[slot % 8], PROMPT[slot % 5 : 20 + slot % 7]) for slot in range(32)]
    alone = [generate(runner, prompt, 10, range(4), slot=slot, asked=asked) for slot, asked, prompt in rows]
    together: list[list[int]] = [[] for _ in rows]
    for first in range(0, 32, 8):  # in four steps, as a chunk is 256 tokens
        part = rows[first : first + 8]
        plan = step(
            [admission(slot, asked, len(prompt), history=tuple(prompt)) for slot, asked, prompt in part],
            rows=[prefill(slot, 0, prompt, range(4 * slot, 4 * slot + 4)) for slot, _, prompt in part],
        )
        for (slot, _, _), token in zip(part, runner.run(plan).token_ids, strict=True):
            together[slot].append(token)
    for number in range(9):
        done = runner.run(step(decode=[(slot, len(prompt) + number) for slot, _, prompt in rows]))
        for out, token in zip(together, done.token_ids, strict=True):
            out.append(token)
    assert together == alone


def test_a_slot_of_a_failed_step_does_not_count_for_its_last_owner(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slot 0 had count row 0, which is slot 1's now. A step that admits slot 0 raises before it has said so, and the
    next one, already in flight, decodes slot 0."""
    wanted = generate(runner, PROMPT, 8, range(4, 8), slot=1, asked=HEAVY)
    generate(runner, PROMPT, 2, range(4), asked=HEAVY)
    admitted = admission(1, HEAVY, len(PROMPT), history=tuple(PROMPT), count_row=0)
    tokens = list(runner.run(step([admitted], rows=[prefill(1, 0, PROMPT, range(4, 8))])).token_ids)
    with monkeypatch.context() as patch:
        patch.setattr(runner._table, "apply", Mock(side_effect=RuntimeError("planted")))
        with pytest.raises(RuntimeError, match="planted"):
            runner.run(step([admission(0, GREEDY)], rows=[prefill(0, 0, PROMPT, range(4))]))
    for number in range(7):
        done = runner.run(step(decode=[(0, len(PROMPT) + 1), (1, len(PROMPT) + number)]))
        tokens.append(done.token_ids[1])
    assert tokens == wanted
    counted = [token for token in range(301) for _ in range(int(runner._table.token_counts.counts[0, token]))]
    assert counted == sorted(wanted)


def test_a_failed_step_leaves_no_counts_behind(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises after its tokens were counted. A step already in flight has rows of its slots: they count nothing, and
    those beside them go on. The next owner of the count row starts afresh."""
    wanted = {slot: generate(runner, PROMPT, 8, range(4), asked=HEAVY) for slot in (0, 1)}
    rows = [prefill(slot, 0, PROMPT, range(4 * slot, 4 * slot + 4)) for slot in (0, 1)]
    admissions = [admission(slot, HEAVY, len(PROMPT), history=tuple(PROMPT)) for slot in (0, 1)]
    tokens = list(runner.run(step(admissions, rows=rows)).token_ids[1:])
    with monkeypatch.context() as patch:
        patch.setattr("surefoot.runner.model_runner.output_logprobs", Mock(side_effect=RuntimeError("planted")))
        with pytest.raises(RuntimeError, match="planted"):
            runner.run(step(decode=[(0, len(PROMPT))]))
    counts = runner._table.token_counts.counts
    before = counts[0].clone()
    for number in range(7):
        done = runner.run(step(decode=[(0, len(PROMPT) + 1), (1, len(PROMPT) + number)]))
        tokens.append(done.token_ids[1])
    assert torch.equal(counts[0], before)
    assert int(before.sum()) == 2  # the failed step had counted
    assert tokens == wanted[1]
    assert generate(runner, PROMPT, 8, range(4), asked=HEAVY) == wanted[0]
