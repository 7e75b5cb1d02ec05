"""What `cotenant bench colocate` says of policies that will train little, and of requests that nobody serves."""

from __future__ import annotations

import html
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.colocation import TRAINING, bench, bench_colocate
from cotenant.cli.colocate_grid import Grid
from cotenant.cli.colocate_notes import who_trains_little
from cotenant.core.plan import Slo
from small_model import small_model


@pytest.mark.parametrize(
    ("policies", "longest_ms", "named"),
    [
        (("adaptive", "chunked", "llmstation", "temporal"), 93.2, "chunked, llmstation"),
        (("llmstation",), 93.2, "llmstation"),
        (("adaptive", "multitask", "lifecycle", "inference-only"), 93.2, None),
        (("chunked",), 6.9, None),
    ],
)
def test_who_finds_no_room_for_a_tasklet_is_named(
    policies: tuple[str, ...], longest_ms: float, named: str | None
) -> None:
    bench = SimpleNamespace(has_partitions=True, longest_tasklet_ms=longest_ms)
    grid = Grid([], [Slo(500.0, 40.0), Slo(500.0, 10.0)], policies, skip_hopeless=False)
    notes = who_trains_little(bench, grid)  # type: ignore[arg-type]
    if named is None:
        assert notes == []
        return
    (said,) = notes
    assert said.startswith(f"{named}: training will get little or nothing beside requests where the TPOT ")
    assert "target is 10 ms" in said
    assert "93.2 ms" in said


def test_who_needs_partitions_is_named_where_there_are_none() -> None:
    bench = SimpleNamespace(has_partitions=False, longest_tasklet_ms=1.0)
    grid = Grid([], [Slo(500.0, 10.0)], ("adaptive", "harli"), skip_hopeless=False)
    (said,) = who_trains_little(bench, grid)  # type: ignore[arg-type]
    assert said.startswith("harli: no multiprocessors are divided here")


def test_requests_that_the_model_is_too_short_for_are_told_in_the_report(tmp_path: Path) -> None:
    rows = "".join(f"{index * 0.05:.2f},{8 if index % 3 else 5000},4\n" for index in range(9))
    (tmp_path / "mix.csv").write_text(f"Timestamp,Request tokens,Response tokens\n{rows}")
    flags = [*small_model(tmp_path), *TRAINING, "--batch-sizes", "", "--trace", str(tmp_path / "mix.csv")]
    flags += ["--min-requests", "1", "--policies", "inference-only,static", "--slo-tpot-ms", "10000"]
    paths = {kind: tmp_path / f"mix.{kind}" for kind in ("json", "html")}
    measured = bench_colocate(*flags, "--json", str(paths["json"]), "--html", str(paths["html"]))
    assert measured.returncode == 0, measured.stderr
    left_out = "mix: 3 of 9 requests have more than 1024 tokens and are left out, of the rate as well"
    report = json.loads(paths["json"].read_text())
    assert [note.partition(":")[0] for note in report["notes"]] == ["mix", "static"]
    assert report["notes"][0] == left_out
    for note in report["notes"]:
        assert f"warning: {note}" in measured.stderr
        assert html.escape(note) in paths["html"].read_text()
    assert "is not there yet" not in measured.stderr
    again = bench("colocate-report", str(paths["json"]))
    assert again.returncode == 0
    assert left_out in again.stdout
