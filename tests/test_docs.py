"""Docs say what is so: paths, names, links, flags, tables and examples are held against the code.

`PYTHONPATH=src python -m tests.test_docs` writes docs/settings.md anew.
"""

from __future__ import annotations

import ast
import builtins
import csv
import functools
import importlib
import json
import re
import runpy
import subprocess
import tomllib
from pathlib import Path
from typing import Any, get_args

import httpx
import pydantic
import pytest

from surefoot import cli, launch
from surefoot.checkpoint.gguf import GGMLType
from surefoot.commands import chat, generate
from surefoot.config import gguf_readers, hf_readers, model_spec
from surefoot.config import settings as settings_module
from surefoot.config.catalog import FAMILIES
from surefoot.config.engine_plan import ServerPlan
from surefoot.engine.flight_recorder import RING_BYTES
from surefoot.frontend import chat_template, sampling_params
from surefoot.frontend.engine_client import EngineClient
from surefoot.frontend.gguf_words import PRE_TOKENIZERS
from surefoot.http import edge, errors, json_body, service
from surefoot.http.app import create_app
from surefoot.http.metrics import OTHER_NAMES, Metrics
from surefoot.http.openai_schema import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    StreamOptions,
    TokenizeBody,
)
from surefoot.launch import records
from tests.e2e.server import Server
from tests.http.conftest import server_plan
from tests.http.fake_engine import FakeEngine
from tests.tiny import TinyLlama

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "surefoot"
README, CONTRIBUTING, DOCS = ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs"
CLI, HTTP, MODELS, OPERATIONS = (DOCS / f"{name}.md" for name in ("cli", "http", "models", "operations"))
DECISIONS = sorted((DOCS / "decisions").glob("*.md"))
PAGES = [README, CONTRIBUTING, ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
PAGES_WITH_LIVE_NAMES = [page for page in PAGES if page.name != "log.md"]  # the log may name what is gone

README_URL = "http://127.0.0.1:8000"
HUB_VARIABLES = {"HF_TOKEN", "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE"}
FOREIGN_NAMES = hf_readers.ARCHITECTURES.keys() | HUB_VARIABLES


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=page_id)


# ---- Markdown --------------------------------------------------------------------------------------------------------


def fences(page: Path, *languages: str) -> list[str]:
    """The bodies of the page's code blocks in one of `languages`."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [body for language, body in found if language in languages]


def spans(text: str) -> list[str]:
    """Inline code."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def commands(page: Path) -> str:
    return "\n".join([*fences(page, "bash", "console"), *spans(page.read_text())])


def rows(page: Path, heading: str) -> list[list[str]]:
    """Cells of the tables between `heading` and the next one, without their first two lines."""
    section = re.split(r"^#+ ", page.read_text().partition(f"# {heading}\n")[2], flags=re.MULTILINE)[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert len(lines) > 2, f"{page_id(page)} has no table under {heading}"
    return lines[2:]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


# ---- Paths, links, names ---------------------------------------------------------------------------------------------


@every_page
def test_paths_exist(page: Path) -> None:
    """A path is inline code that begins with a folder of ours, or ends as our files do."""
    folders = "|".join(re.escape(path.name) for path in (*ROOT.iterdir(), *SOURCE.iterdir()) if path.is_dir())
    pattern = re.compile(rf"(?:{folders})/[\w./-]*|[\w./-]+\.(?:py|md|toml|csv)")
    paths = [span for span in spans(page.read_text()) if pattern.fullmatch(span)]
    dead = [path for path in paths if not (ROOT / path).exists() and not (SOURCE / path).exists()]
    assert not dead


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@functools.cache
def definitions() -> dict[str, set[str]]:
    """Every class, function and module-level name of the source, with the members of classes."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef(name=name):
                    found.setdefault(name, set()).update(members(node))
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.setdefault(name, set())
        found.update((name, set()) for name in assigned(tree) if name not in found)
    return found


def members(node: ast.ClassDef) -> set[str]:
    own = {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute) and is_stored_on_self(child)}
    methods = {child.name for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)}
    return own | methods | assigned(node)


def is_stored_on_self(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


def assigned(node: ast.Module | ast.ClassDef) -> set[str]:
    statements = [child for child in node.body if isinstance(child, ast.Assign | ast.AnnAssign)]
    return {name.id for child in statements for name in ast.walk(child) if is_stored_name(name)}  # type: ignore[attr-defined]


def is_stored_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def resolves(dotted: str) -> bool:
    """Whether a name that begins with `surefoot.` is a module, or something in one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if part not in dir(found):
                return False
            found = getattr(found, part)
        return True
    return False


def is_defined(name: str) -> bool:
    owner, _, member = name.partition(".")
    if name in FOREIGN_NAMES or name in dir(builtins):
        return True
    return owner in definitions() and (not member or member in definitions()[owner])


@pytest.mark.parametrize("page", PAGES_WITH_LIVE_NAMES, ids=page_id)
def test_names_are_defined(page: Path) -> None:
    """A name is inline code that is dotted from `surefoot`, CamelCase, a constant, or written as a call."""
    environment = {"SUREFOOT_" + info.name.upper() for info in settings_module.infos()} | {"SUREFOOT_CONFIG"}
    for span in spans(page.read_text()):
        if re.fullmatch(r"surefoot(\.\w+)+", span):
            assert resolves(span), span
        elif span.startswith("SUREFOOT_") and "<" not in span:
            assert span.partition("=")[0] in environment, span
        elif re.fullmatch(r"[A-Z]+[a-z]\w*(\.\w+)?|[A-Z]+(_[A-Z0-9]+)+", span):
            assert is_defined(span), span
        elif called := re.fullmatch(r"([A-Za-z_][\w.]*)\(.*\)", span):
            assert is_defined(called[1]), span


def test_the_rule_for_names_finds_dead_ones() -> None:
    assert is_defined("KVCache.allocate")
    assert is_defined("Bounds.kv_tokens")
    assert is_defined("GATHER_TOKENS")
    assert resolves("surefoot.engine.loop.run")
    assert not is_defined("KVCache.sink_page")
    assert not is_defined("PrefillMetadata")
    assert not resolves("surefoot.engine.loop.walk")
    assert not resolves("surefoot.engines")


# ---- Commands and settings -------------------------------------------------------------------------------------------


def test_flags_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for words in [[command] for command in cli.COMMANDS] + [["bench", kind] for kind in cli.BENCHES]:
        with pytest.raises(SystemExit):
            cli.parser().parse_args([*words, "--help"])
    known = capsys.readouterr().out + "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
    flag = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
    of_pip = {"--extra-index-url"}
    dead = [
        (page_id(page), name)
        for page in PAGES
        for name in set(flag.findall(page.read_text())) - set(flag.findall(known)) - of_pip
    ]
    assert not dead


@every_page
def test_commands_exist(page: Path) -> None:
    assert set(re.findall(r"(?:^|[\s(])surefoot ([a-z]+)", commands(page))) <= cli.COMMANDS.keys()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|\s)make ([a-z-]+)", commands(page))) <= targets


def settings_page() -> str:
    """docs/settings.md: a table from config.settings, with the home directory as `~`."""
    lines = []
    for info in settings_module.infos():
        default = info.default.replace(str(Path.home()), "~") or "(empty)"
        allowed = info.allowed
        lines.append(f"| `{info.flag}` | `{default}` | {allowed} | {info.help} |\n")
    return (
        "# Settings\n\n"
        "Generated from `config/settings.py` by `PYTHONPATH=src python -m tests.test_docs`; do not edit.\n\n"
        "A setting `--max-model-len` is `SUREFOOT_MAX_MODEL_LEN` in the environment, and `max_model_len` in a TOML\n"
        "file (`--config FILE`, else `SUREFOOT_CONFIG`) and in `LLM(...)`. The first of flag, environment, file and\n"
        "default counts. `auto` is decided at start, and the plan says why. On the command line, a switch (true or\n"
        "false) takes no value.\n\n"
        "| flag | default | values | what |\n|---|---|---|---|\n" + "".join(lines)
    )


def test_the_table_of_settings_is_generated() -> None:
    assert (DOCS / "settings.md").read_text() == settings_page(), "run PYTHONPATH=src python -m tests.test_docs"


def test_commands() -> None:
    lines = {f"`surefoot {name} {cli.USAGE[name]}`": what for name, what in cli.COMMANDS.items()}
    assert dict(rows(CLI, "Command line")) == lines
    typed = {f"`{f'{name} {command.arguments}'.strip()}`" for name, command in chat.COMMANDS.items()}
    assert {cells[0] for cells in rows(CLI, "chat")} == typed


def test_exit_codes() -> None:
    documented = {int(cells[0]) for cells in rows(OPERATIONS, "Exit codes") if cells[0].isdigit()}
    constants = {value for name, value in vars(launch).items() if name.startswith("EXIT_")}
    unforeseen = 1  # Python's own, of a frontend that raised
    assert documented == constants | {cli.EXIT_BAD_INPUT, unforeseen}
    of_others = {int(cells[0]) for cells in rows(CLI, "Exit codes of all but serve")}
    assert of_others == {0, generate.EXIT_FAILED, cli.EXIT_BAD_INPUT, cli.EXIT_INTERRUPTED, cli.EXIT_BROKEN_PIPE}


def test_the_disk_that_records_take() -> None:
    most = (records.KEPT_RECORDS + 1) * records.KEPT_RINGS * RING_BYTES
    for page in (README, OPERATIONS):
        assert f"{most / 2**30:.1f} GiB" in page.read_text()
    assert f"{(records.KEPT_RECORDS + 1) * RING_BYTES >> 20} MiB" in OPERATIONS.read_text()


# ---- Set-up ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "python, said",
    [
        ('[ "$1" != -c ]', "surefoot needs Python 3.11 or newer"),
        ('[ "$1" != -m ] || { mkdir -p .venv/bin; touch .venv/bin/python; exit 1; }', "apt install python3-venv"),
    ],
    ids=["too-old", "without-venv"],
)
def test_a_python_that_will_not_do_is_said_and_leaves_nothing(tmp_path: Path, python: str, said: str) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\n{python}\n")
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "pyproject.toml").touch()
    command = ["make", "-f", str(ROOT / "Makefile"), "setup", "PYTHON=./python"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode != 0
    assert said in made.stderr
    assert not (tmp_path / ".venv").exists()


# ---- HTTP ------------------------------------------------------------------------------------------------------------

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
COMPLETION = {"model": "m", "prompt": "x"}
BODIES: list[tuple[str, type[pydantic.BaseModel], dict[str, Any], set[str]]] = [
    ("Both endpoints", ChatBody, CHAT, set(GenerationBody.model_fields)),
    ("Both endpoints", CompletionBody, COMPLETION, set(GenerationBody.model_fields)),
    ("Chat only", ChatBody, CHAT, set(ChatBody.model_fields) - set(GenerationBody.model_fields)),
    (
        "Completions only",
        CompletionBody,
        COMPLETION,
        set(CompletionBody.model_fields) - set(GenerationBody.model_fields),
    ),
    ("Messages", ChatMessage, {"role": "user", "content": "x"}, set(ChatMessage.model_fields)),
    ("Stream options", StreamOptions, {}, set(StreamOptions.model_fields)),
    ("Tokenize", TokenizeBody, {"prompt": "x"}, set(TokenizeBody.model_fields)),
    ("Detokenize", DetokenizeBody, {"tokens": [1]}, set(DetokenizeBody.model_fields)),
]
WRONG_VALUES = ({"any": "text"}, ["any", {}])  # no type of ours takes both


def kind_of(body: type[pydantic.BaseModel], valid: dict[str, Any], field: str) -> str:
    """By what happens to values that no field honours."""
    for wrong in WRONG_VALUES:
        try:
            body.model_validate(valid | {field: wrong})
        except pydantic.ValidationError as error:
            return "neutral" if any(one["type"] == "unsupported_value" for one in error.errors()) else "honoured"
    return "inert"


@pytest.mark.parametrize(
    "heading, body, valid, fields", BODIES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_request_fields(heading: str, body: type[pydantic.BaseModel], valid: dict[str, Any], fields: set[str]) -> None:
    table = {cells[0].strip("`"): cells[1:] for cells in rows(HTTP, heading)}
    assert set(table) == fields
    for field, (kind, values) in table.items():
        assert kind == kind_of(body, valid, field), field
        if kind == "neutral":
            for value in spans(values):
                body.model_validate(valid | {field: json.loads(value)})


@pytest.fixture(scope="module")
def plan(tiny_llama: TinyLlama) -> ServerPlan:
    return server_plan(str(tiny_llama.path))


@pytest.mark.parametrize("page", [README, HTTP], ids=page_id)
def test_endpoints(page: Path, plan: ServerPlan) -> None:
    engine = FakeEngine(lambda request: [1])
    app = create_app(plan, None, EngineClient(engine, engine))  # type: ignore[arg-type]
    served = {f"{method.upper()} {path}" for path, methods in app.openapi()["paths"].items() for method in methods}
    documented = {span for cells in rows(page, "Endpoints") for span in spans(cells[0])}
    assert documented == served | {f"GET {app.openapi_url}"}


def test_endpoints_without_a_key() -> None:
    before, _, after = HTTP.read_text().partition("ask for without one:\n\n")
    assert before
    assert set(spans(after.split("\n\n")[0])) == edge.OPEN_PATHS


def test_limits() -> None:
    documented = {cells[0]: int(re.split("[,;]", cells[1])[0]) for cells in rows(HTTP, "Limits")}
    assert documented == {
        "strings in `stop`": sampling_params.MAX_STOP_STRINGS,
        "ids in `stop_token_ids`": sampling_params.MAX_STOP_TOKEN_IDS,
        "entries of `logit_bias`": sampling_params.MAX_LOGIT_BIASES,
        "most probable tokens at a place": sampling_params.MAX_LOGPROBS,
        "characters of `cache_salt`": sampling_params.MAX_NAMESPACE_CHARACTERS,
        "size of `priority`, either sign": sampling_params.MAX_PRIORITY,
        "objects and lists inside each other": json_body.MAX_DEPTH,
        "characters to tokenize, ids to detokenize": service.LEAST_LONGEST_TEXT,
        "characters of an error's message": errors.MAX_MESSAGE_CHARACTERS,
    }


def test_the_seed_of_a_sibling() -> None:
    (formula,) = [span for span in spans(HTTP.read_text()) if span.startswith("(seed + i")]
    for seed, i in ((0, 0), (7, 1), (2**63 - 1, 19)):
        assert eval(formula, {"seed": seed, "i": i}) == sampling_params.sibling_seed(seed, i)


def test_metrics(plan: ServerPlan) -> None:
    exported = re.findall(r"^# TYPE (\S+) (\w+)$", Metrics(plan.engine).render().decode(), re.MULTILINE)
    documented = [(cells[0].strip("`"), cells[1]) for cells in rows(HTTP, "Metrics")]
    assert sorted(documented) == sorted(exported)
    known = {f"surefoot_{name}" for name in OTHER_NAMES} | {name for name, _ in exported}
    named = {span for page in PAGES_WITH_LIVE_NAMES for span in spans(page.read_text()) if span.startswith("surefoot_")}
    assert named <= known | {"surefoot_"}


def test_names_of_other_engines() -> None:
    table = [[cell.strip("`") for cell in cells] for cells in rows(HTTP, "Names of other engines")]
    assert table == [[own, *others] for own, others in OTHER_NAMES.items()]


def test_error_codes() -> None:
    source = "".join(path.read_text() for path in (SOURCE / "http").glob("*.py"))
    codes = [span for cells in rows(HTTP, "Errors") for span in spans(cells[1])]
    assert [name for name in codes if f'"{name}"' not in source] == []


# ---- Models ----------------------------------------------------------------------------------------------------------


def test_families() -> None:
    table = {cells[0].strip("`"): (set(spans(cells[1])), cells[2].strip("`")) for cells in rows(MODELS, "Families")}
    assert tuple(table) == FAMILIES
    for family, (classes, architecture) in table.items():
        assert classes == {name for name, of in hf_readers.ARCHITECTURES.items() if of == family}
        assert architecture in gguf_readers.ARCHITECTURES
    assert {architecture for _, architecture in table.values()} == set(gguf_readers.ARCHITECTURES)


def test_rotary_scalings() -> None:
    kinds = {kind.__struct_config__.tag for kind in get_args(model_spec.RopeScaling)}
    # "factors" is how a chosen set of LongRoPE's is held, and Llama 3's in GGUF.
    assert {cells[0].strip("`") for cells in rows(MODELS, "Rotary scalings")} == kinds - {"factors"}


def test_lists_of_formats_and_words() -> None:
    lists = [spans(line) for line in re.split(r"\n\n", MODELS.read_text()) if re.fullmatch(r"(`[\w.-]+`\s*)+", line)]
    formats, words = lists
    assert set(formats) == set(GGMLType.__members__)
    assert set(words) == PRE_TOKENIZERS.keys()


def test_limits_of_chat_templates() -> None:
    documented = [int(cells[1].replace(",", "")) for cells in rows(MODELS, "Chat templates")]
    names = ("MAX_RANGE", "MAX_REPEATED", "MAX_NUMBER_BITS", "MAX_PROMPT_CHARACTERS")
    assert documented == [vars(chat_template)[name] for name in names]


# ---- Design ----------------------------------------------------------------------------------------------------------


def test_layers_and_budgets() -> None:
    page = DOCS / "architecture.md"
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert [body.splitlines() for body in fences(page, "layers")] == [c["layers"] for c in contracts if "layers" in c]
    limits = runpy.run_path(str(ROOT / "tools" / "style_check.py"))
    (budgets,) = re.findall(r"Budgets: (.*?)\.\n", page.read_text(), re.DOTALL)
    names = ("MAX_FILE_LINES", "MAX_FUNCTION_LINES", "MAX_KERNEL_LINES", "MAX_PARAMETERS", "MAX_SETTINGS")
    assert [int(number) for number in re.findall(r"\d+", budgets)] == [limits[name] for name in names]


@pytest.mark.parametrize(
    "page, heading, parent",
    [(DOCS / "architecture.md", "Layers", SOURCE), (CONTRIBUTING, "Tests", ROOT / "tests")],
    ids=["source", "tests"],
)
def test_every_folder_is_described(page: Path, heading: str, parent: Path) -> None:
    described = {(ROOT / span, SOURCE / span) for cells in rows(page, heading) for span in spans(cells[0])}
    folders = {folder.parent for folder in parent.glob("*/__init__.py")}
    assert {path for pair in described for path in pair if path.is_dir()} == folders


@pytest.mark.parametrize("page", DECISIONS, ids=page_id)
def test_a_decision_says_what_would_change_it(page: Path) -> None:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    assert headings[0].startswith(f"{page.name[:4]}: ")
    assert headings[1:] == ["Question", "Choice", "What would change our mind"]


def test_figures_of_the_scheduler_were_recorded() -> None:
    with (ROOT / "benchmarks" / "results" / "scheduler.csv").open() as file:
        recorded = [[row["rows"], row["total_us_p50"], row["total_us_p99"]] for row in csv.DictReader(file)]
    assert all(cells in recorded for cells in rows(DOCS / "performance.md", "The scheduler"))


# ---- Examples of the README ------------------------------------------------------------------------------------------


def test_the_settings_file_is_valid(tmp_path: Path) -> None:
    (toml,) = fences(README, "toml")
    (tmp_path / "surefoot.toml").write_text(toml)
    assert settings_module.load({}, str(tmp_path / "surefoot.toml")).max_running_requests == 32


def test_the_offline_example_runs(default_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [body for body in fences(README, "python") if "LLM" in body]
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.endswith("The capital of France is Paris. stop\n")


def test_the_client_examples_run(default_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (python,) = [body for body in fences(README, "python") if "OpenAI" in body]
    (body,) = re.findall(r"curl http://127.0.0.1:8000(?:.*?) -d '(.*?)'", "\n".join(fences(README, "bash")), re.DOTALL)
    with Server(tmp_path / "log", model=default_model_path, served_model_name="SmolLM2-135M-Instruct") as server:
        exec(compile(python.replace(README_URL, server.url), "README.md", "exec"), {})
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=json.loads(body), timeout=60)
    assert capsys.readouterr().out == "The capital of France is Paris."
    assert answer.json()["choices"][0]["message"]["content"]


if __name__ == "__main__":
    (DOCS / "settings.md").write_text(settings_page())
