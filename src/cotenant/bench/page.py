"""A report as one self-contained page: well-formed XML as well as HTML, in light or dark as the reader's system is."""

from __future__ import annotations

import html
from collections.abc import Sequence

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5b6b7c; --rule: #dde4eb; --back: #ffffff; --mark: #b3392f;
  --box: #f4f7fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --soft: #9fadbb; --rule: #33404d; --back: #14191f;
  --mark: #ff8a7a; --box: #1d242c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 1100px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; } .sub { color: var(--soft); }
code { overflow-wrap: anywhere; } summary { cursor: pointer; margin-top: .6rem; font-weight: 600; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { text-align: left; white-space: nowrap; } .missed { color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 1.2rem; }
figure { margin: 0; } figcaption { font-weight: 600; } figure svg { width: 100%; }
svg text { font-size: 11px; fill: var(--soft); }
svg .halo { paint-order: stroke; stroke: var(--back); stroke-width: 3px; }
.grid { stroke: var(--rule); } .marker { stroke: var(--mark); stroke-dasharray: 4 3; } .hollow { fill: var(--back); }
.legend { font-size: .85rem; } .legend span { margin-right: 1rem; white-space: nowrap; }
.legend .key { width: 28px; height: 12px; margin-right: .3rem; vertical-align: middle; }
blockquote { margin: .3rem 0; padding: .4rem .8rem; background: var(--box); border-left: 3px solid #0072b2; }
"""


def page(title: str, body: str) -> str:
    """The whole document. ``body`` is markup."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width"/>'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str] | None = None) -> str:
    """Cells are text. ``classes``: one for each row, '' for none."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    lines = []
    for row, name in zip(rows, classes or [""] * len(rows), strict=True):
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        lines.append(f'<tr class="{html.escape(name)}">{cells}</tr>' if name else f"<tr>{cells}</tr>")
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>'
