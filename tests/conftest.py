"""Fixtures that more than one folder of tests uses: the default model, and tiny checkpoints."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest

from surefoot.checkpoint.default_model import fetch_default_model
from surefoot.config.planning import NATIVE_FOLDER
from surefoot.native.library import NativeError, ensure
from tests.tiny import TinyLlama, write_tiny_llama

# Shells start jobs in the background with SIGINT ignored, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Before any test: the command that compiles them says so, and tests read what commands say."""
    with contextlib.suppress(NativeError):
        ensure("", NATIVE_FOLDER, lambda _: None)


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    return fetch_default_model()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    """A random Llama with a tokenizer and a chat template, for everything that needs no sense in the answers."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
