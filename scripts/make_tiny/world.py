"""The small world that `tiny` knows: animals, things, people, places (``data/animals.csv`` and ``data/world.yaml``)."""

from __future__ import annotations

from typing import NamedTuple

from scripts.make_tiny.data_files import read_csv, read_yaml


class Animal(NamedTuple):
    """``sound`` is a verb as it follows 'it'; ``place`` is a key of PLACES."""

    name: str
    plural: str
    kind: str
    sound: str
    home: str
    food: str
    cover: str
    young: str
    legs: int
    place: str


def _animal(row: dict[str, str]) -> Animal:
    return Animal(**{**row, "legs": int(row["legs"])})  # type: ignore[arg-type]


_WORLD = read_yaml("world.yaml")

ANIMALS = tuple(_animal(row) for row in read_csv("animals.csv"))
PLACES: dict[str, str] = _WORLD["places"]
COLOURS: dict[str, str] = _WORLD["colours"]
OPPOSITES: list[list[str]] = _WORLD["opposites"]
CAPITALS: dict[str, str] = _WORLD["capitals"]
JOBS: dict[str, list[str]] = _WORLD["jobs"]
OBJECTS: dict[str, list[str]] = _WORLD["objects"]
DAYS: list[str] = _WORLD["days"]
MONTHS: list[str] = _WORLD["months"]
MONTH_DAYS: list[int] = _WORLD["month_days"]
SEASONS: dict[str, list[str]] = _WORLD["seasons"]
NUMBERS: list[str] = _WORLD["numbers"]
ORDINALS: list[str] = _WORLD["ordinals"]
GROUPS: dict[str, list[str]] = _WORLD["groups"]
