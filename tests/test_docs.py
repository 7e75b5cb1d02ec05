"""The reference pages have all that the code has: paths, error codes, metrics. None of it is there by hand alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cotenant.api.app import create_app
from cotenant.api.errors import _NOT_SERVED
from cotenant.api.jobs.failures import MENDABLE
from cotenant.api.metrics import Metrics
from cotenant.config import ApiConfig
from cotenant.core.plan import Mode, Slo
from cotenant.core.request import FinishReason
from cotenant.core.tasklet import TaskletKind
from cotenant.store.records import FINISHED, JobStatus
from cotenant.wire.messages import ERROR_BOUNDS, ErrorCounts, Ready, Stats

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "cotenant"
API = (ROOT / "docs" / "api.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
# Whose first arguments are a job's id and a code, or the code.
_TAKE_CODES = {"JobFailed", "JobError", "WriteError", "_fail"}
_CODE = re.compile(r"(?:[a-z_]|\\w\+)+")  # or the pattern of several
_NONE = (0,) * (len(ERROR_BOUNDS) + 1)


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


@cache
def _metrics_of_a_server() -> dict[str, set[str]]:
    """Every metric of a server on which all of them have a value, and its labels."""
    slo = Slo(500.0, 40.0)
    ready = Ready(64, 1, 512, 4, 16, "cpu", "float32", "adaptive", slo, 1.0)
    stats = Stats(
        num_tasklets=dict.fromkeys(TaskletKind, 1),
        num_iterations=dict.fromkeys(Mode, 1),
        step_gap_us=1.0,
        slack_ms={"tpot": 1.0, "ttft": 1.0},
        margin=0.9,
        prediction_error_ratio=0.1,
        prediction_errors={"alone": ErrorCounts(_NONE, 0.0), "corun": ErrorCounts(_NONE, 0.0)},
        harvest_ratio=0.5,
    )
    worker = SimpleNamespace(stats=stats, num_live=0, serves=True, last_ready=ready)
    metrics = Metrics("m", worker)  # type: ignore[arg-type]
    metrics.count_end("stop")
    text = metrics.render(dict.fromkeys(JobStatus, 1), {(JobStatus.FAILED, "disk_full"): 1}).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found: dict[str, set[str]] = {}
    for sample in samples:
        found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metrics_that_a_page_names_are_there(page: Path) -> None:
    found = _metrics_of_a_server()
    for name, labels in re.findall(r"cotenant:([a-z_]+)(?:\{([^}]*)\})?", page.read_text()):
        assert f"cotenant:{name}" in found, name
        assert set(re.findall(r"(\w+)=", labels)) <= found[f"cotenant:{name}"] | {"le"}, (name, labels)


def test_every_metric_is_in_the_table() -> None:
    found = {name.removeprefix("cotenant:") for name in _metrics_of_a_server()}
    table = (ROOT / "docs" / "serving.md").read_text().partition("\n### Metrics\n")[2].partition("\n### ")[0]
    named = {re.sub(r"\{.*", "", name) for name in _rows(table, 1)}
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in found if not name.endswith("_created")}
    assert named == families


def test_all_values_of_labels_are_listed() -> None:
    text = (ROOT / "docs" / "operations.md").read_text().partition("\n### Label values\n")[2].partition("\n### ")[0]
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    listed = {cells[1].strip(): set(re.findall(r"`(\w+)`", cells[3])) for cells in rows}
    assert listed["`tasklets_total`"] == set(TaskletKind)
    assert listed["`iterations_total`, `mode`"] == set(Mode)
    assert listed["`fine_tuning_jobs`"] == set(JobStatus)
    assert listed["`fine_tuning_jobs_ended_total`"] == set(FINISHED)
    assert listed["`request_success_total`"] == {*FinishReason, "error"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        there = page if not name else page.parent / name
        assert there.exists(), target
        if anchor and there.suffix == ".md":
            assert anchor in _anchors(there), target


@cache
def _anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
