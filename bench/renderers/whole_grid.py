"""The newest grid with serving alone and every other policy: of files that were measured on a host each."""

from __future__ import annotations

import json
from pathlib import Path

from cotenant.bench.comparison import compare
from cotenant.cli.colocate_parts import joined
from renderers.target import link
from renderers.text import Result

# `static` is in the first part alone.
FILES = ("colocate_half_h200.json", "colocate_rest_h200.json", "colocate_code_half_h200.json")
WHERE = link("in the grid's places, on three hosts", "half-of-the-grid-by-a-later-version")
NEWEST = "colocate_newest_h200.json"  # later, all those places beside `chunked` alone
ATTAINMENT = 0.99


def whole_grid(results: Path) -> Result | None:
    """One report of all; None where a file is not among these results."""
    paths = [results / name for name in FILES]
    if not all(path.exists() for path in paths):
        return None
    whole = joined({path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths})
    return {**whole, "comparison": compare(whole, ATTAINMENT)}
