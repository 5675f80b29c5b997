"""What the command line says about itself, and about a word that it does not know."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot import SamplingParams, __version__, cli
from surefoot.commands import flags
from surefoot.config import settings as settings_module
from tests.cli.terminal import surefoot
from tests.tiny import TinyLlama


@pytest.fixture(autouse=True)
def terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def help_of(*command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def error_of(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_the_first_page_has_every_command_with_an_example_and_says_where_docs_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = help_of(capsys=capsys)
    for command, what in cli.COMMANDS.items():
        assert re.search(rf"^  {command} +{re.escape(what)}$", page, re.MULTILINE)
        assert f"surefoot {command}" in page[page.index("examples:") :]
    assert "docs/settings.md" in page
    assert max(map(len, page.splitlines())) <= 80


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_command_shows_examples_first_then_flags_in_groups(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = help_of(command, capsys=capsys)
    titles = re.findall(r"^(\S.*):$", page, re.MULTILINE)
    assert titles[0] == "examples"
    assert titles[-1] == "more"
    if command in ("serve", "plan"):
        assert set(settings_module.GROUPS) < set(titles)
    assert max(map(len, page.splitlines())) <= 80


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_examples_parse(command: str) -> None:
    lines = [line for line in cli.EXAMPLES[command].splitlines() if re.search(rf"surefoot {command}\b", line)]
    assert 2 <= len(lines) <= 4
    for line in lines:
        written = re.sub(r'^.*?surefoot |  +\S.*$| [<>|].*$|\)"$', "", re.sub(r'\)"  .*$', "", line))
        cli.parser().parse_args(shlex.split(written))


def test_defaults_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    page = " ".join(help_of("generate", capsys=capsys).split())
    assert "new tokens at most [256]" in page
    assert "steps planned ahead of the one whose result is known [auto]" in page


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "plan"])
def test_the_setting_that_explains_others_is_one_of_the_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = help_of(command, capsys=capsys)
    variables = re.findall(
        rf"{settings_module.ENVIRONMENT_PREFIX}(\w+)=", page[page.index("settings from elsewhere") :]
    )
    assert variables
    assert all(f"--{name.lower().replace('_', '-')}" in page for name in variables)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_among_examples_are_only_commands(command: str) -> None:
    assert all(re.search(rf"surefoot {command}\b", line) for line in cli.EXAMPLES[command].splitlines())


def test_every_setting_has_one_group() -> None:
    grouped = [name for names in settings_module.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(settings_module.Settings.__struct_fields__)
    assert {info.group for info in settings_module.infos()} == set(settings_module.GROUPS)
    assert {info.name for info in settings_module.infos() if info.of_server} == set(settings_module.GROUPS["server"])


def test_every_sampling_flag_is_a_parameter_and_reaches_it() -> None:
    given = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.4,
        "min_p": 0.1,
        "min_tokens": 2,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 7,
    }
    assert set(flags.SAMPLING_FLAGS) == {*given, "stop"}
    words = [f"{flags.SAMPLING_FLAGS[name].spelled(name)}={value}" for name, value in given.items()]
    arguments = cli.parser().parse_args(["generate", "x", *words, "--stop=a", "--stop=b"])
    params = flags.sampling_params(flags.given_sampling(vars(arguments)))
    assert params == SamplingParams(**given, stop=("a", "b"))


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["sreve"], "there is no command sreve: did you mean serve?"),
        (["--prot", "serve"], "there is no --prot: did you mean --port?"),
        (["serve", "--prot", "80"], "there is no --prot: did you mean --port?"),
        (["chat", "--port", "80"], "--port means nothing to chat, it is a flag of serve, plan"),
        (["serve", "a.gguf", "b.gguf"], "unexpected argument 'b.gguf'"),
        (["serve", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["completion", "csh"], "invalid choice: 'csh'"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_is_wrong_is_named_with_what_was_meant(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = error_of(*arguments, capsys=capsys)
    assert says in message
    assert len(message.splitlines()) == 2  # how to use the command, and the error


def test_without_arguments_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "surefoot chat" in capsys.readouterr().err


def test_the_model_may_be_an_argument() -> None:
    for command in ("serve", "chat", "plan"):
        arguments = vars(cli.parser().parse_args([command, "model.gguf"]))
        assert flags.settings_of(arguments).model == "model.gguf"
        twice = vars(cli.parser().parse_args([command, "model.gguf", "--model", "other.gguf"]))
        with pytest.raises(ValueError, match=r"given twice, as 'model.gguf' and as --model 'other.gguf'"):
            flags.settings_of(twice)


def test_an_empty_model_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def is_refused(*words: str) -> bool:
        return cli.main(words) == 2 and "the model is an empty text" in capsys.readouterr().err

    for command in ("serve", "chat", "plan"):
        assert is_refused(command, "")
    assert is_refused("generate", "x", "--model=")
    monkeypatch.setenv("SUREFOOT_MODEL", "")
    assert is_refused("plan")


def test_the_first_prompt_is_the_model_if_it_looks_like_one(tmp_path: Path) -> None:
    def split(*words: str) -> tuple[str, list[str]]:
        arguments = flags.split_model(vars(cli.parser().parse_args(["generate", *words])))
        return flags.settings_of(arguments).model, list(arguments["prompts"])

    with contextlib.chdir(tmp_path):
        (tmp_path / "llama").mkdir()
        assert split("model.gguf", "a") == ("model.gguf", ["a"])
        assert split("org/name", "a") == ("org/name", ["a"])
        assert split("llama", "a") == ("llama", ["a"])
        assert split("a", "org/name") == ("default", ["a", "org/name"])
        assert split("this or/and that") == ("default", ["this or/and that"])
        assert split("and/or", "--model", "m.gguf") == ("m.gguf", ["and/or"])
        assert split() == ("default", [])


def test_a_model_among_the_prompts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(tmp_path):
        Path("model.gguf").touch()
        for words in (["hello", "model.gguf"], ["hello", "--max-tokens", "4", "model.gguf"]):
            assert cli.main(["generate", *words]) == 2
            assert "model.gguf is a model, not a prompt: the model comes first" in capsys.readouterr().err
        given = vars(cli.parser().parse_args(["generate", "hello", "model.gguf", "--model", "m.gguf"]))
        assert flags.split_model(given)["prompts"] == ["hello", "model.gguf"]


def test_ctrl_c_is_no_traceback_even_before_the_command_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_parsers", interrupted)
    assert cli.main(["serve"]) == cli.EXIT_INTERRUPTED


def test_python_m_surefoot_is_surefoot() -> None:
    ended = surefoot("--version")
    assert (ended.returncode, ended.stdout) == (0, f"surefoot {__version__}\n")


def test_help_and_plan_load_no_torch(tiny_llama: TinyLlama) -> None:
    script = "import sys; from surefoot import cli; cli.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", script, "plan", str(tiny_llama.path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    root = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=False)
    assert root.returncode == 0


def test_a_reader_that_leaves_is_no_error(tiny_llama: TinyLlama) -> None:
    command = f"{sys.executable} -m surefoot plan {tiny_llama.path} --json | head -c 1"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout == "{"
    assert ended.stderr == ""
