"""The cells of `cotenant bench colocate`: each policy at each target under each load, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cotenant.bench.colocate_text import line, place_name, with_parts
from cotenant.bench.comparison import REFERENCE, cell_key, meets_slo, place_key
from cotenant.cli.colocate_figures import cell_figures
from cotenant.cli.colocate_loads import ColocateLoad
from cotenant.cli.colocate_parts import Report
from cotenant.cli.output import say_phase, write_json
from cotenant.core.plan import Slo
from cotenant.runtime.colocate_cell import Cell, pooled

_Missing = tuple[int, Slo, str]  # the number of a load, a target, a policy


@dataclass(frozen=True, slots=True)
class Grid:
    """``loads``: their parameters, as cells have them in the JSON. ``skip_hopeless``: where the reference, which comes
    first, misses the SLO, nothing else is measured. ``rounds``: how many times each policy is measured."""

    loads: Sequence[dict[str, Any]]
    slos: Sequence[Slo]
    policies: Sequence[str]
    skip_hopeless: bool
    rounds: int = 1

    def missing(self, report: Report) -> list[_Missing]:
        """Of each load (by its number), target and policy those that the report's cells lack."""
        known = {cell_key(cell) for cell in report["cells"]}
        hopeless = {place_key(cell) for cell in report["cells"] if self.skip_hopeless and _is_hopeless(cell, report)}

        def is_missing(index: int, slo: Slo, policy: str) -> bool:
            targets = {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms}
            cell = {**self.loads[index], "slo": targets, "policy": policy}
            return cell_key(cell) not in known and (policy == REFERENCE or place_key(cell) not in hopeless)

        cells = itertools.product(range(len(self.loads)), self.slos, self.policies)
        return [cell for cell in cells if is_missing(*cell)]

    def measure(self, report: Report, loads: Sequence[ColocateLoad], json_path: Path | None) -> None:
        """Measure what is missing under these ``loads``, and say so as it goes. The file is written after each cell, or
        after each place where there are several ``rounds``: a long run that is cut off leaves what it has measured."""
        console = Console(emoji=False)
        cells, alone = report["cells"], report["train_alone_tokens_per_s"]
        console.print(f"training alone: {alone:.0f} tokens/s")
        while missing := self.missing(report):
            together = self._together(missing)
            index = together[0][0]
            say_phase(self._what_is_next(together, len(missing)))
            measured = [cell_figures(self.loads[index], cell, alone) for cell in self._in_turn(together, loads[index])]
            cells += measured
            if self.skip_hopeless and any(_is_hopeless(cell, report) for cell in measured):
                say_phase("serving alone misses the SLO there, so nothing else is measured")
            if json_path is not None:
                write_json(json_path, report, is_compact=True)
            for cell in with_parts(cells)[-len(measured) :]:  # after that: whoever reads it may be gone
                console.print(line(cell), highlight=False, markup=False, soft_wrap=True)

    def _together(self, missing: Sequence[_Missing]) -> Sequence[_Missing]:
        """The next ones: a place's are measured in turn. The reference may make the others needless."""
        if self.rounds == 1 or (self.skip_hopeless and missing[0][2] == REFERENCE):
            return missing[:1]
        return [each for each in missing if each[:2] == missing[0][:2]]

    def _what_is_next(self, together: Sequence[_Missing], num_missing: int) -> str:
        """Which of the cells are measured next, ``num_missing`` being left. Those that are needless are counted."""
        total = len(self.loads) * len(self.slos) * len(self.policies)
        first = total - num_missing + 1
        number = f"cell {first}" if len(together) == 1 else f"cells {first} to {first + len(together) - 1}"
        index, slo, _ = together[0]
        policies = ", ".join(policy for _, _, policy in together)
        place = place_name({**self.loads[index], "slo": {"tpot_ms": slo.tpot_ms}})
        return f"measuring {number} of {total}: {place}, {policies}"

    def _in_turn(self, together: Sequence[_Missing], load: ColocateLoad) -> list[Cell]:
        """Back and forth, so that no policy is early or late in all rounds: clocks and what is known drift."""
        runs: dict[str, list[Cell]] = {policy: [] for _, _, policy in together}
        for number in range(self.rounds):
            for _, slo, policy in reversed(together) if number % 2 else together:
                runs[policy].append(load.measure(policy, slo))
        return [pooled(each) for each in runs.values()]


def _is_hopeless(cell: dict[str, Any], report: Report) -> bool:
    """Whether serving alone misses the SLO in its place."""
    is_reference = cell["policy"] == REFERENCE and cell["num_requests"] > 0
    return is_reference and not meets_slo(cell, report["slo_attainment"])
