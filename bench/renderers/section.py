"""What is said of a results file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """The heading of a results file. ``note`` stands below it; text files have their ``command`` here. ``is_earlier``:
    by versions that were measured again since, or on the way to a decision; a page of its own has these."""

    file: str
    title: str
    note: str = ""
    command: str = ""
    is_earlier: bool = False
