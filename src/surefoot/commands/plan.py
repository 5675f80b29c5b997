"""`surefoot plan`: what a configuration comes to on this machine, without the weights."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from surefoot.checkpoint.errors import CheckpointError
from surefoot.config.engine_plan import EnginePlan, Reason
from surefoot.config.ledger import ledger
from surefoot.config.paths import ExecutionPath, reachable_paths
from surefoot.config.planning import plan_engine
from surefoot.config.resolve import PlanError, given
from surefoot.config.settings import OF_SERVER, Settings

EXIT_OK, EXIT_CONFLICTS = 0, 2


def run(settings: Settings, as_json: bool, console: Console) -> int:
    """Prints the plan, or raises PlanError with all conflicts. As JSON, both are printed: {"conflicts": [...], ...}."""
    try:
        plan = plan_engine(settings, console, fetch_weights=False)
    except (PlanError, CheckpointError) as error:
        if not as_json:
            raise
        _print_json({"conflicts": error.conflicts if isinstance(error, PlanError) else [str(error)]})
        return EXIT_CONFLICTS
    if as_json:
        _print_json(
            {
                "conflicts": [],
                "plan": plan,
                "server": {reason.field: reason.value for reason in _server_reasons(settings)},
                "ledger": ledger(plan),
                "bounds": dict(_bounds(plan)),
                "paths": [path.key for path in reachable_paths(plan)],
            }
        )
    else:
        _print_plan(plan, settings)
    return EXIT_OK


def _print_json(content: dict[str, Any]) -> None:
    print(msgspec.json.format(msgspec.json.encode(content)).decode())


def _print_plan(plan: EnginePlan, settings: Settings) -> None:
    out = Console(file=sys.stdout, highlight=False)
    model, machine = plan.model, plan.hardware
    out.print(
        f"[bold]{escape(plan.served_model_name)}[/]: {model.family}, {model.num_layers} layers of {model.hidden_size}, "
        f"{model.vocab_size} tokens\n{escape(plan.checkpoint.path)}\n"
        f"on {escape(machine.cpu_name)} ({', '.join(machine.cpu_features) or machine.machine}): "
        f"{machine.num_cpus} CPUs, {_gib(machine.memory_available)} available"
    )
    for title, reasons in (("Settings", plan.reasons), ("Server", _server_reasons(settings))):
        rows = ((reason.field, reason.value or "(empty)", reason.why) for reason in reasons)
        _print_table(out, title, ("setting", "value", "why"), rows)
    lines = ledger(plan)
    owners = [(line.owner, f"{line.bytes:,}", _gib(line.bytes), line.formula) for line in lines]
    _print_table(out, "Memory", ("owner", "bytes", "", "how"), owners, numbers=(1, 2))
    bounds = ((name, f"{value:,}") for name, value in _bounds(plan))
    _print_table(out, "Bounds", ("bound", "value"), bounds, numbers=(1,))
    paths = reachable_paths(plan)
    columns = ("kind/prefix/attention/linear/sampler/logprobs",)
    _print_table(out, f"Execution paths: {len(paths)}", columns, _braced(paths))


def _print_table(
    out: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()
) -> None:
    """`numbers`: columns that are aligned right. These and the first one do not wrap."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for at, column in enumerate(columns):
        is_number = at in numbers
        table.add_column(
            column,
            justify="right" if is_number else "left",
            no_wrap=is_number or (at == 0 and len(columns) > 1),
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(escape, row))
    out.print(table)


def _server_reasons(settings: Settings) -> Iterator[Reason]:
    """For the settings that the engine's plan does not have. The key is not told."""
    shown = replace(settings, api_key="(set)") if settings.api_key else settings
    return given(shown, OF_SERVER - {"served_model_name"})


def _bounds(plan: EnginePlan) -> Iterator[tuple[str, int]]:
    """All numbers, with those that follow from others."""
    bounds = plan.bounds
    for name, value in msgspec.structs.asdict(bounds).items():
        if name != "kv_groups":
            yield name, value
    for group in bounds.kv_groups:
        suffix = f"_window_{group.window}" if group.window else ""
        yield f"kv_pages{suffix}", group.num_pages
    yield "kv_tokens", bounds.kv_tokens
    yield "page_table_columns", bounds.page_table_columns


def _braced(paths: Sequence[ExecutionPath]) -> Iterator[tuple[str]]:
    """Paths that differ only in the sampler share a line."""

    def rest(path: ExecutionPath) -> tuple[str, ...]:
        return path.kind, path.prefix, path.attention, path.linear, path.logprobs

    for (*first, logprobs), members in itertools.groupby(sorted(paths, key=rest), rest):
        samplers = ",".join(path.sampler for path in members)
        yield ("/".join((*first, f"{{{samplers}}}", logprobs)),)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
