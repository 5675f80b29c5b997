"""The offline API: the same scheduler, loop and runner as the server, in this process.

with LLM() as llm:
    for completion in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16)):
        print(completion.text)
"""

from __future__ import annotations

import itertools
import queue
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from rich.console import Console

from surefoot.config import settings as settings_module
from surefoot.config.planning import plan_engine
from surefoot.config.settings import Settings, SettingsError
from surefoot.engine.executor import ThreadExecutor
from surefoot.engine.flight_recorder import FlightRecorder
from surefoot.engine.loop import Inbox, Outbox, run
from surefoot.frontend.output import Output, Score, ScoredToken, scores
from surefoot.frontend.sampling_params import SamplingParams, Vocabulary
from surefoot.frontend.tokenizer import load_tokenizer
from surefoot.protocol.messages import (
    Abort,
    Event,
    Finished,
    Logprobs,
    Refused,
    Submit,
    TokenBatch,
)
from surefoot.runner.model_runner import ModelRunner
from surefoot.scheduler.scheduler import Scheduler

Prompt = str | Sequence[int]
Message = Mapping[str, str]


class GenerationError(RuntimeError):
    """The engine refused a request, or ended it without an answer."""


@dataclass(frozen=True)
class Completion:
    prompt_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]  # a stop id that ended it is the last one
    finish_reason: Literal["stop", "length"]
    cached_tokens: int  # prompt tokens that came from the prefix cache
    logprobs: tuple[ScoredToken, ...]  # one for each of `token_ids`, if they were asked for
    prompt_logprobs: tuple[Score, ...]  # one for each of `prompt_ids` from the second on, if they were asked for


class _Sequence:
    """One request on its way."""

    def __init__(self, output: Output, on_text: Callable[[str], None]) -> None:
        self.output = output
        self.prompt_logprobs: list[Logprobs] = []
        self._on_text = on_text
        self._pieces: list[str] = []
        self._logprobs: list[ScoredToken] = []

    def push(self, tokens: Sequence[int], logprobs: Sequence[Logprobs], finished: Finished | None) -> None:
        piece = self.output.push(tokens, logprobs, finished)
        self._logprobs += piece.tokens
        if piece.text:
            self._pieces.append(piece.text)
            self._on_text(piece.text)

    def completion(self, finished: Finished) -> Completion:
        return Completion(
            prompt_ids=self.output.request.prompt_ids,
            text="".join(self._pieces),
            token_ids=tuple(self.output.token_ids),
            finish_reason=self.output.finish_reason(finished),
            cached_tokens=finished.cached_tokens,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(scores(self.prompt_logprobs)),
        )


class AnswerStream(Iterator[str]):
    """The text of one answer as it comes. Closing it, or leaving the loop over it, aborts the request."""

    def __init__(self, pieces: Generator[str, None, None], sequence: _Sequence) -> None:
        self._pieces = pieces
        self._sequence = sequence

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        self._pieces.close()

    @property
    def prompt_tokens(self) -> int:
        return len(self._sequence.output.request.prompt_ids)

    @property
    def output_tokens(self) -> int:
        """So far; a stop id counts."""
        return len(self._sequence.output.token_ids)


class _Session:
    """Inbox and outbox of one call: submits as many requests as the engine takes, collects their tokens."""

    def __init__(self, sequences: Iterable[_Sequence], places: int) -> None:
        self._todo = deque(sequences)
        self._places = places
        self._alive: dict[int, _Sequence] = {}
        self._aborts: deque[Abort] = deque()
        self.completions: dict[int, Completion] = {}
        self.failures: list[str] = []

    @property
    def is_open(self) -> bool:
        return bool(self._todo)

    def cancel(self) -> None:
        """Ends all that is left; called from another thread."""
        self._todo.clear()
        self._aborts.extend(Abort(request_id) for request_id in tuple(self._alive))

    def drain(self, block: bool) -> Iterator[Submit | Abort]:
        while self._aborts:
            yield self._aborts.popleft()
        while self._todo and len(self._alive) < self._places:
            sequence = self._todo.popleft()
            self._alive[sequence.output.request.id] = sequence
            yield Submit(sequence.output.request)

    def send(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Refused(request_id, _, detail):
                    del self._alive[request_id]
                    self.failures.append(detail)
                case TokenBatch():
                    self._take(event)

    def _take(self, batch: TokenBatch) -> None:
        ended = {finished.request_id: finished for finished in batch.finished}
        logprobs = {part.request_id: part for part in batch.logprobs}
        for part in batch.prompt_logprobs:
            self._alive[part.request_id].prompt_logprobs.append(part)
        for request_id, token in zip(batch.request_ids, batch.token_ids, strict=True):
            sequence = self._alive[request_id]
            if sequence.output.stopped:
                continue  # its abort is on the way
            scored = [logprobs[request_id]] if request_id in logprobs else []
            sequence.push([token], scored, ended.get(request_id))
            if sequence.output.stopped and request_id not in ended:
                self._aborts.append(Abort(request_id))
        for finished in batch.finished:
            sequence = self._alive.pop(finished.request_id)
            if sequence.output.is_complete(finished):
                self.completions[finished.request_id] = sequence.completion(finished)
            else:
                self.failures.append(finished.detail or "aborted")


class LLM:
    """A loaded model. Settings are those of `surefoot serve`, by field name: `LLM("model.gguf", max_model_len=2048)`;
    or one `Settings` with all of them.

    Raises ValueError if a setting, the checkpoint or their combination is wrong. One call at a time. Ctrl-C during a
    download from the hub ends the process at once, without its `finally` clauses, unless it handles SIGINT itself.
    """

    def __init__(self, model: str | Settings = "default", **settings: Any) -> None:
        if wrong := sorted(settings_module.OF_SERVER & settings.keys()):
            raise SettingsError(f"{', '.join(wrong)}: means nothing without a server")
        asked = model if isinstance(model, Settings) else settings_module.load({"model": model, **settings})
        self.plan = plan_engine(asked, Console(stderr=True))
        self.tokenizer = load_tokenizer(self.plan.checkpoint)
        self._vocabulary = Vocabulary(self.plan.model.vocab_size, self.tokenizer.eos_ids)
        self.scheduler = Scheduler(self.plan.bounds, self.plan.prefix_cache)
        self._folder = tempfile.TemporaryDirectory(prefix="surefoot-")
        self._recorder = FlightRecorder(Path(self._folder.name) / "steps.ring")
        self._executor = ThreadExecutor(lambda: ModelRunner(self.plan, lambda done, total: None), self._recorder)
        self._ids = itertools.count(1)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008  (frozen)
    ) -> list[Completion]:
        """Continues each prompt (text or token ids), all at once; `params` is for all, or one for each.

        Raises ParameterError before anything runs, GenerationError if a request ended without an answer.
        """
        many = _as_list(prompts)
        each = [params] * len(many) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise ValueError(f"{len(many)} prompts and {len(each)} sampling parameters: give one, or one for each")
        sequences = [
            self._sequence(prompt, wanted, lambda text: None) for prompt, wanted in zip(many, each, strict=True)
        ]
        session = self._run(_Session(sequences, self.places))
        return [session.completions[sequence.output.request.id] for sequence in sequences]

    def chat(self, messages: Sequence[Message], params: SamplingParams = SamplingParams()) -> Completion:  # noqa: B008
        """Answers a conversation: messages with `role` and `content`."""
        return self.generate([self._chat_ids(messages)], params)[0]

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams) -> AnswerStream:
        """The same as it comes. Raises what `generate` raises before anything runs; GenerationError from its pieces."""
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        sequence = self._sequence(self._chat_ids(messages), params, pieces.put)
        return AnswerStream(self._pieces(_Session([sequence], self.places), pieces), sequence)

    def _pieces(self, session: _Session, pieces: queue.SimpleQueue[str | None]) -> Generator[str, None, None]:
        failures: list[BaseException] = []

        def work() -> None:
            try:
                self._run(session)
            except BaseException as error:
                failures.append(error)
            finally:
                pieces.put(None)

        worker = threading.Thread(target=work)
        worker.start()
        try:
            while (piece := pieces.get()) is not None:
                yield piece
        except BaseException:
            session.cancel()
            failures.clear()
            raise
        finally:
            worker.join()
        if failures:
            raise failures[0]

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """Tokens of the prompt that a conversation becomes."""
        return len(self._chat_ids(messages))

    def serve(self, inbox: Inbox, outbox: Outbox) -> None:
        """Runs the engine's loop in this thread over commands from elsewhere, until `inbox` has closed."""
        run(inbox, self.scheduler, self._executor, outbox, self.plan.lookahead)

    def close(self) -> None:
        self._executor.close()
        self._recorder.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def places(self) -> int:
        """Requests that the engine takes at once: running and waiting ones."""
        return self.plan.bounds.max_running_requests + self.plan.bounds.max_queued_requests

    def _run(self, session: _Session) -> _Session:
        try:
            self.serve(session, session)
        except BaseException:
            # Ctrl-C, say: requests are left half done. A step in flight cannot hurt those of the next scheduler, which
            # come after it on the same stream.
            self.scheduler = Scheduler(self.plan.bounds, self.plan.prefix_cache)
            raise
        if session.failures:
            raise GenerationError(f"{len(session.failures)} requests failed; the first: {session.failures[0]}")
        return session

    def _chat_ids(self, messages: Sequence[Message]) -> list[int]:
        return self.tokenizer.encode(self.tokenizer.apply_chat_template(messages), add_special_tokens=False)

    def _sequence(self, prompt: Prompt, params: SamplingParams, on_text: Callable[[str], None]) -> _Sequence:
        prompt_ids = self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        request_id = next(self._ids)
        default_seed = self.plan.seed + request_id
        request = params.to_request(
            request_id, prompt_ids, self._vocabulary, self.plan.bounds.max_model_len, default_seed
        )
        return _Sequence(Output(request, params, self.tokenizer), on_text)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, text or token ids, is a list of one."""
    if isinstance(prompts, str) or (prompts and all(isinstance(item, int) for item in prompts)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
