"""Streamed completions in threads of their own, as tests of deaths and endings watch them."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import httpx

from tests.e2e.server import Server


class Stream(threading.Thread):
    """One streamed completion, read to its end: its events, and the status it began with."""

    def __init__(self, server: Server, max_tokens: int = 100, prompt: Sequence[int] = ()) -> None:
        super().__init__()
        self._url = f"{server.url}/v1/completions"
        self._body = {
            "model": server.model_name,
            "prompt": prompt or list(range(20, 40)),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        self.answered = threading.Event()  # the headers have come, or nothing will
        self.began = threading.Event()  # a first event has come, or nothing will
        self.events: list[Any] = []
        self.status = 0
        self.broken = ""
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as response:
                self.status = response.status_code
                self.answered.set()
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
                        self.began.set()
        except httpx.TransportError as error:  # the frontend has ended
            self.broken = str(error)
        finally:
            self.answered.set()
            self.began.set()

    def finish_reasons(self) -> list[str]:
        chunks = [event for event in self.events if isinstance(event, dict) and "choices" in event]
        return [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]

    def errors(self) -> list[Any]:
        return [event for event in self.events if isinstance(event, dict) and "error" in event]

    def check_ended_once(self) -> None:
        """With a reason and [DONE], or with one error and nothing after it; or it was refused before it began."""
        assert not self.is_alive()
        assert not self.broken
        if self.status == 503:
            assert not self.events
        elif self.errors():
            assert len(self.errors()) == 1
            assert self.events[-1] == self.errors()[0]
            assert not self.finish_reasons()
        else:
            assert len(self.finish_reasons()) == 1
            assert self.events[-1] == "[DONE]"


def open_streams(server: Server, count: int, max_tokens: int = 100) -> list[Stream]:
    """All of them answered, the first one with an event."""
    streams = [Stream(server, max_tokens) for _ in range(count)]
    streams[0].began.wait(30)
    for stream in streams:
        assert stream.answered.wait(30)
    return streams
