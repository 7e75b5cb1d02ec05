"""The reference pages have all that the code has: paths and error codes. None of it is there by hand alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from cotenant.api.app import create_app
from cotenant.api.errors import _NOT_SERVED
from cotenant.api.jobs.failures import MENDABLE
from cotenant.config import ApiConfig

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "cotenant"
API = (ROOT / "docs" / "api.md").read_text()
# Whose first arguments are a job's id and a code, or the code.
_TAKE_CODES = {"JobFailed", "JobError", "WriteError", "_fail"}
_CODE = re.compile(r"(?:[a-z_]|\\w\+)+")  # or the pattern of several


def _section(title: str) -> str:
    _, _, rest = API.partition(f"\n{title}\n")
    level = title.split()[0]
    return re.split(rf"\n#{{1,{len(level)}}} ", rest)[0]


@cache
def _codes_in_source() -> dict[str, str]:
    """Each code that is written in the source, or a pattern of those that are put together, and where."""
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "bench"}
    trees = {path: ast.parse(text) for path, text in texts.items() if "code" in text or "Error" in text}
    constants = {path: _constants(tree) for path, tree in trees.items()}
    of_all = {name: value for each in constants.values() for name, value in each.items()}
    return {
        code: f"{path.relative_to(ROOT)}:{value.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        for value in _places(node)
        for code in _written(value, of_all | constants[path])
        if _CODE.fullmatch(code)
    }


def _constants(tree: ast.Module) -> dict[str, str]:
    """A module's texts by their names."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _places(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions in which a node gives a code."""
    if isinstance(node, ast.Call):
        yield from (keyword.value for keyword in node.keywords if keyword.arg == "code")
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _TAKE_CODES:
            yield from node.args[:2]
    if isinstance(node, ast.FunctionDef):
        arguments = node.args.args[-len(node.args.defaults) :] if node.args.defaults else []
        yield from (default for each, default in zip(arguments, node.args.defaults, strict=True) if each.arg == "code")


def _written(value: ast.expr, constants: dict[str, str]) -> Iterator[str]:
    match value:
        case ast.Constant(value=str(text)):
            yield text
        case ast.Name(id=name) if name in constants:
            yield constants[name]
        case ast.BoolOp(values=values):
            for each in values:
                yield from _written(each, constants)
        case ast.JoinedStr(values=parts):
            yield "".join(each.value if isinstance(each, ast.Constant) else r"\w+" for each in parts)


def _rows(text: str, column: int) -> list[str]:
    """What stands in backticks in a column of all tables of ``text``."""
    cells = [line.split("|")[column] for line in text.splitlines() if line.startswith("|")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_the_reference_has_every_error_code_of_the_source() -> None:
    documented = set(re.findall(r"`([a-z_]+)`", _section("## Errors")))
    found = _codes_in_source()
    assert len(found) > 50
    missing = {code: place for code, place in found.items() if not any(re.fullmatch(code, name) for name in documented)}
    assert not missing


def test_the_source_has_every_error_code_of_the_reference() -> None:
    patterns = _codes_in_source()
    gone = [
        name for name in _rows(_section("## Errors"), 1) if not any(re.fullmatch(pattern, name) for pattern in patterns)
    ]
    assert not gone


def test_the_reference_says_of_every_job_that_may_be_resumed_that_it_may() -> None:
    lines = [line.split("|") for line in _section("### Errors of jobs").splitlines() if line.startswith("| `")]
    may = {code: "resume" in cells[3] for cells in lines for code in re.findall(r"`([^`]+)`", cells[1])}
    assert {code for code, is_said in may.items() if is_said} == set(MENDABLE)


def test_the_reference_has_the_paths_of_the_application() -> None:
    config, metrics = SimpleNamespace(api=ApiConfig()), SimpleNamespace(count_refused=lambda: None)
    state = SimpleNamespace(config=config, metrics=metrics)
    document = create_app(state).openapi()  # type: ignore[arg-type]
    served = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    named = [row for row in _rows(_section("## Methods and paths"), 1) if " /" in row]
    assert sorted(named) == sorted(served)
    assert set(re.findall(r"`(/v1/[a-z_]+)`", _section("### What is not there"))) == set(_NOT_SERVED)
