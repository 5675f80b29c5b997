"""What is done with the limits of the shell, and what is said about them."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator

import pytest

from surefoot.launch.limits import memory_limit, raise_file_limit


@pytest.fixture
def hard() -> Iterator[int]:
    """The limit of open files that can be had. What the test sets is taken back."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] == resource.RLIM_INFINITY:
        pytest.skip("there is no limit of open files")
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_as_many_files_as_are_allowed(hard: int, caplog: pytest.LogCaptureFixture) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    raise_file_limit(num_requests=8)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    assert not caplog.records


def test_too_few_files_are_said_beforehand(hard: int, caplog: pytest.LogCaptureFixture) -> None:
    raise_file_limit(num_requests=hard - 1)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"a process may open {hard} files" in record.getMessage()
    assert f"{hard - 1} running and waiting requests" in record.getMessage()


@pytest.mark.parametrize(
    "limit, says",
    [(resource.RLIM_INFINITY, ""), (600 * 2**20, "; its memory is limited to 600 MiB (ulimit -v)")],
)
def test_the_limit_of_memory(monkeypatch: pytest.MonkeyPatch, limit: int, says: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, resource.RLIM_INFINITY))
    assert memory_limit() == says
