"""What several renderers need: tables, and figures in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Result = dict[str, Any]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" if line[0] != "---" else f"|{'---|' * len(line)}" for line in lines)


def machine_text(result: Result) -> str:
    """What a result was measured on, in words."""
    machine, versions = result["machine"], result.get("versions") or result["machine"]
    gpus = "".join(f", {gpu}" for gpu in machine.get("gpus", ()))
    torch = f", torch {versions['torch']}" if versions.get("torch") else ""
    return f"{machine['cpu']}, {machine['num_cores']} cores{gpus}{torch}"


def pair(low: float | None, high: float | None) -> str:
    """Two figures in one cell."""
    return " / ".join("-" if value is None else f"{value:.1f}" for value in (low, high))


def spread_text(spread: Result) -> str:
    """A median with the tenth and the ninetieth percentile."""
    return f"{spread['p50']:.2f} ({spread['p10']:.2f} to {spread['p90']:.2f})"


def beside(share: float, aim: float) -> str:
    """With as many digits as tell it from the aim."""
    return f"{share:.{2 if share != aim and f'{share:.1%}' == f'{aim:.1%}' else 1}%}"
