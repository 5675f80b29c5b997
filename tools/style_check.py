"""Rules that ruff, mypy and import-linter cannot see. `python tools/style_check.py src/surefoot`; exit 1 on a finding.

The budgets and rules are those of docs/architecture.md, "Rules that keep it liveable".
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 160  # a Triton body may be longer than Python that thinks
MAX_PARAMETERS = 8
MAX_SETTINGS = 40
READS_ENVIRONMENT = {"config/settings.py"}
FROZEN_FOLDERS = {"protocol", "attention", "config", "evidence"}  # their types cross folder edges


def findings(path: Path, root: Path) -> Iterator[tuple[str, int, str]]:
    """(file, line, what is wrong) for one source file."""
    name = path.relative_to(root).as_posix()
    text = path.read_text()
    if text.count("\n") > MAX_FILE_LINES:
        yield name, 1, f"{text.count(chr(10))} lines, the limit is {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from ((name, node.lineno, what) for what in function_findings(node))
            case ast.Global():
                yield name, node.lineno, "global statement"
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr" as called), args=[_, ast.Constant(), *_]):
                yield name, node.lineno, f"{called} with a literal name: declare the field"
            case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "getenv") if name not in READS_ENVIRONMENT:
                yield name, node.lineno, "environment read outside config/settings.py"
            case ast.ClassDef() if name.split("/")[0] in FROZEN_FOLDERS:
                yield from ((name, line, what) for line, what in class_findings(node))


def c_findings(path: Path, root: Path) -> Iterator[tuple[str, int, str]]:
    """Budgets of C, whose top-level definitions begin and end in the first column."""
    name, lines = path.relative_to(root).as_posix(), path.read_text().splitlines()
    if len(lines) > MAX_FILE_LINES:
        yield name, 1, f"{len(lines)} lines, the limit is {MAX_FILE_LINES}"
    start = 0
    for number, line in enumerate(lines, 1):
        if line[:1].isalpha() or line.startswith("_"):
            start = number
        elif line.startswith("}") and number - start + 1 > MAX_FUNCTION_LINES:
            yield name, start, f"{lines[start - 1]} has {number - start + 1} lines"


def function_findings(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    is_kernel = any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if lines > (MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES):
        yield f"{node.name} has {lines} lines"
    arguments = [
        a for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs if a.arg not in ("self", "cls")
    ]
    if not is_kernel and len(arguments) > MAX_PARAMETERS:
        yield f"{node.name} takes {len(arguments)} parameters, the limit is {MAX_PARAMETERS}"


def class_findings(node: ast.ClassDef) -> Iterator[tuple[int, str]]:
    marks = " ".join(map(ast.unparse, [*node.decorator_list, *node.bases, *(k.value for k in node.keywords)]))
    keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
    fields = [f for f in node.body if isinstance(f, ast.AnnAssign)]
    is_record = "Struct" in marks or "dataclass" in marks
    if is_record and "frozen=True" not in marks and keywords.get("frozen") != "True":
        yield node.lineno, f"{node.name} crosses a folder edge and is not frozen"
    if not is_record:
        return
    if node.name == "Settings" and len(fields) > MAX_SETTINGS:
        yield node.lineno, f"Settings has {len(fields)} fields, the limit is {MAX_SETTINGS}"
    for field in fields:
        if "None" in ast.unparse(field.annotation) or "Optional" in ast.unparse(field.annotation):
            yield field.lineno, f"{node.name}.{ast.unparse(field.target)} is optional"


def main() -> int:
    root = Path(sys.argv[1])
    files = sorted(root.rglob("*.py"))
    c_files = sorted((*root.rglob("*.c"), *root.rglob("*.h")))
    found = [finding for path in files for finding in findings(path, root)]
    found += [finding for path in c_files for finding in c_findings(path, root)]
    for name, line, what in found:
        print(f"{name}:{line}: {what}")
    print(f"style check: {len(found)} findings in {len(files) + len(c_files)} files")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
