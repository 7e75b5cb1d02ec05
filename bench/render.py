"""Render every result under bench/results/ into docs/benchmarks.md and, beside it, docs/benchmarks-earlier.md.

python bench/render.py

JSON files have a ``kind``, which names their renderer in RENDERERS; a file may hold a list of results of one kind, as
several servers side by side. Text files are shown as they are. Titles and notes are in renderers/sections/, in the
order of the pages; files that are not there come after, titled by their names.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from renderers import coexecution, serving, summary, targets, training
from renderers.section import Section
from renderers.sections import SECTIONS
from renderers.text import Result

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
TARGET = ROOT / "docs" / "benchmarks.md"

INTRODUCTION = (
    "Rendered by `python bench/render.py` from `bench/results/`. Absolute times belong to the machine named beside "
    "them; compare within a table, not between machines. `python bench/measure.py` measures again, on one GPU or "
    "several, what bench/measurements.toml names."
)
EARLIER = (
    "What earlier versions were measured to do, and what was measured on the way to a decision: [the other "
    "page]({page}) has what came after. It is rendered likewise, by `python bench/render.py`."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--target", type=Path, default=TARGET, help="the page; the earlier results lie beside it")
    arguments = parser.parse_args()
    results, target = arguments.results, arguments.target
    earlier = target.with_name(f"{target.stem}-earlier{target.suffix}")
    found = sections(results)
    later, before = ([each for each in found if each.is_earlier == is_earlier] for is_earlier in (False, True))
    more = f"Earlier versions, and ways to decisions: [{earlier.name}]({earlier.name})." if before else ""
    top = ["# Benchmarks", INTRODUCTION, *summary.in_short(results), *targets.section(results)]
    pages = {target: ([*top, *contents(later), more], later)}
    if before:
        pages[earlier] = (["# Earlier benchmarks", EARLIER.format(page=target.name), *contents(before)], before)
    for page, (parts, shown) in pages.items():
        elsewhere = {
            summary.anchor(each.title): other.name
            for other, (_, others) in pages.items()
            if other != page
            for each in others
        }
        for section in shown:
            parts += [f"## {section.title}", *render(section, results / section.file)]
        text = "\n\n".join(part for part in parts if part) + "\n"
        page.write_text(linked(text, elsewhere), encoding="utf-8")


def contents(shown: Sequence[Section]) -> list[str]:
    return ["## Contents", summary.contents([section.title for section in shown])]


def linked(text: str, elsewhere: Mapping[str, str]) -> str:
    """Links to headings, those that lie on another page with its name. ``elsewhere``: pages by headings."""
    return re.sub(r"\]\(#([^)\s]+)\)", lambda link: f"]({elsewhere.get(link[1], '')}#{link[1]})", text)


def sections(results: Path) -> list[Section]:
    """The known files that are there, then the others by name."""
    there = {path.name for path in results.iterdir() if path.suffix in (".json", ".txt")}
    known = [section for section in SECTIONS if section.file in there]
    others = sorted(there - {section.file for section in SECTIONS})
    return known + [Section(name, _title_of(name)) for name in others]


def _title_of(name: str) -> str:
    words = name.rpartition(".")[0].replace("_", " ")
    return words[:1].upper() + words[1:]


def render(section: Section, path: Path) -> list[str]:
    """The paragraphs of one file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".txt":
        command = f"`{section.command}`. " if section.command else ""
        return [f"{command}{section.note}", f"```\n{text.strip()}\n```"]
    content = json.loads(text)
    results = content if isinstance(content, list) else [content]
    kinds = {result.get("kind", "policies") for result in results}
    if len(kinds) != 1 or not kinds <= set(RENDERERS):
        raise SystemExit(f"{path}: its kind must be one of {', '.join(RENDERERS)}, not {', '.join(sorted(kinds))}")
    return [section.note, *RENDERERS[kinds.pop()](results)]


RENDERERS: dict[str, Callable[[Sequence[Result]], list[str]]] = {
    "adapter": training.adapter,
    "colocate": coexecution.colocate,
    "convergence": training.convergence,
    "engine": serving.engine,
    "finetune": training.finetune,
    "policies": serving.policies,
    "resize": serving.resize,
    "serve": serving.serve,
    "soak": serving.soak,
}


if __name__ == "__main__":
    main()
