"""What `cotenant bench colocate` says beforehand of policies that will train little."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cotenant.cli import bench_colocate
from cotenant.cli.colocate_grid import Grid
from cotenant.core.plan import Slo


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
    policies: tuple[str, ...], longest_ms: float, named: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = SimpleNamespace(has_partitions=True, longest_tasklet_ms=longest_ms)
    grid = Grid([], [Slo(500.0, 40.0), Slo(500.0, 10.0)], policies, skip_hopeless=False)
    bench_colocate._warn_who_trains_little(bench, grid)  # type: ignore[arg-type]
    said = capsys.readouterr().err
    if named is None:
        assert said == ""
        return
    assert said.startswith(f"warning: {named}: training will get little or nothing beside requests where the TPOT ")
    assert "target is 10 ms" in said
    assert "93.2 ms" in said


def test_who_needs_partitions_is_named_where_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    bench = SimpleNamespace(has_partitions=False, longest_tasklet_ms=1.0)
    grid = Grid([], [Slo(500.0, 10.0)], ("adaptive", "harli"), skip_hopeless=False)
    bench_colocate._warn_who_trains_little(bench, grid)  # type: ignore[arg-type]
    assert capsys.readouterr().err.startswith("warning: harli: no multiprocessors are divided here")
