"""A step that raises costs its own requests, and nothing else."""

from __future__ import annotations

import pytest

from surefoot import LLM, SamplingParams
from surefoot.llm import GenerationError
from surefoot.protocol.step_plan import StepDone, StepPlan
from surefoot.scheduler import invariants
from tests.tiny import TinyLlama

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_requests_of_other_steps_live_on(
    tiny_llama: TinyLlama, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"weight_dtype": "float32", "max_running_requests": 2, "kv_cache_tokens": 512, "lookahead": lookahead}
    with LLM(str(tiny_llama.path), **settings) as llm:
        prompts = [list(range(20 + k, 50 + k)) for k in range(6)]
        wanted = [completion.token_ids for completion in llm.generate(prompts, GREEDY)]
        run_step = llm._executor.runner.run
        calls = 0

        def fail_once(plan: StepPlan) -> StepDone:
            nonlocal calls
            calls += 1
            if calls == 5:
                raise RuntimeError("planted")
            return run_step(plan)

        monkeypatch.setattr(llm._executor.runner, "run", fail_once)
        with pytest.raises(GenerationError, match="2 requests failed; the first: RuntimeError: planted"):
            llm.generate(prompts, GREEDY)
        invariants.check(llm.scheduler)
        assert not llm.scheduler.has_work
        assert [completion.token_ids for completion in llm.generate(prompts, GREEDY)] == wanted
