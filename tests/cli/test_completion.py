"""The script for bash, asked as bash asks it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cli.terminal import surefoot

ASK = """
source ./surefoot.bash
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_shtab_surefoot
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion")
    ended = surefoot("completion", "bash")
    assert (ended.returncode, ended.stderr) == (0, "")
    (path / "surefoot.bash").write_text(ended.stdout)
    (path / "model.gguf").touch()
    (path / "models").mkdir()
    return path


def replies(folder: Path, *words: str) -> set[str]:
    command = ["bash", "-c", ASK, "bash", "surefoot", *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=True)
    assert ended.stderr == ""
    return set(ended.stdout.split())


@pytest.mark.parametrize(
    "words, expected",
    [
        ([""], {"serve", "chat", "generate", "plan", "bench", "completion"}),
        (["pl"], {"plan"}),
        (["serve", "--max-b"], {"--max-body-mib"}),
        (["chat", "--max-b"], set()),
        (["serve", "--load-format", ""], {"checkpoint", "dummy"}),
        (["serve", "--port", "80", "--log-format", "j"], {"json"}),
        (["serve", "mod"], {"model.gguf", "models"}),
        (["generate", "-i", "mod"], {"model.gguf", "models"}),
        (["serve", "--record-dir", "mod"], {"models"}),
        (["completion", "z"], {"zsh"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bash(folder: Path, words: list[str], expected: set[str]) -> None:
    assert replies(folder, *words) == expected


@pytest.mark.parametrize("shell, begins", [("zsh", "#compdef surefoot\n"), ("fish", "# ")])
def test_other_shells_have_a_script(shell: str, begins: str) -> None:
    ended = surefoot("completion", shell)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(begins)
    assert "max-model-len" in ended.stdout
