"""The demo's live view in a terminal; plain lines where there is none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.table import Table

from cotenant.bench.summary import RequestResult, Targets, attained, percentile

_PLAIN_EVERY_S = 10.0


@dataclass(slots=True)
class Progress:
    """What the view shows; the demo updates it."""

    phase: str = "starting"
    targets: Targets | None = None
    results: list[RequestResult] = field(default_factory=list)
    training_tokens_per_s: float | None = None
    training_loss: float | None = None
    training_step: str = ""
    eta_s: float | None = None
    phase_start_s: float = field(default_factory=time.monotonic)

    def begin(self, phase: str) -> None:
        """Start a phase with an empty set of results."""
        self.phase, self.results, self.phase_start_s = phase, [], time.monotonic()
        self.training_tokens_per_s = self.eta_s = None

    def rows(self) -> list[tuple[str, str]]:
        answered = [result for result in self.results if result.error is None]
        elapsed = max(time.monotonic() - self.phase_start_s, 1e-9)
        rows = [("phase", f"{self.phase} ({elapsed:.0f} s)")]
        if answered:
            rows.append(("requests", f"{len(answered)} answered, {len(self.results) - len(answered)} failed"))
            rows.append(("output tokens/s", f"{sum(result.num_tokens for result in answered) / elapsed:.0f}"))
            rows.append(
                self._latency("TTFT", [r.ttft_ms for r in answered], self.targets.ttft_ms if self.targets else None)
            )
            rows.append(
                self._latency("TPOT", [r.tpot_ms for r in answered], self.targets.tpot_ms if self.targets else None)
            )
            if self.targets:
                share = sum(attained(result, self.targets) for result in self.results) / len(self.results)
                rows.append(("SLO attainment", f"{share:.1%}"))
        if self.training_tokens_per_s is not None:
            loss = f", loss {self.training_loss:.3f}" if self.training_loss is not None else ""
            eta = f", {self.eta_s:.0f} s to go" if self.eta_s is not None else ""
            rows.append(("training", f"{self.training_tokens_per_s:.0f} tokens/s, {self.training_step}{loss}{eta}"))
        return rows

    @staticmethod
    def _latency(name: str, values: list[float], target: float | None) -> tuple[str, str]:
        suffix = f" (target {target:.1f})" if target else ""
        return f"{name} p50 / p99", f"{percentile(values, 50):.1f} / {percentile(values, 99):.1f} ms{suffix}"


class View:
    """Redraws a table twice a second in a terminal; prints one line every ten seconds elsewhere."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console = console
        self._progress = progress
        self._live: Live | None = None
        self._last_plain_s = 0.0
        self._last_phase = ""

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        if not self._console.is_terminal:
            yield
            return
        with Live(self._table(), console=self._console, auto_refresh=False, transient=True) as live:
            self._live = live
            yield
        self._live = None

    def refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            return
        now, phase = time.monotonic(), self._progress.phase
        if phase != self._last_phase or now - self._last_plain_s >= _PLAIN_EVERY_S:
            self._last_plain_s, self._last_phase = now, phase
            self._console.print("  ".join(f"{name}: {value}" for name, value in self._progress.rows()), soft_wrap=True)

    def _table(self) -> Table:
        table = Table(show_header=False, title="cotenant demo", title_justify="left")
        for name, value in self._progress.rows():
            table.add_row(name, value)
        return table
