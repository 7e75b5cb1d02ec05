"""Advice, what cannot be done, comparisons and language (``data/advice.yaml``)."""

from __future__ import annotations

from scripts.make_tiny.data_files import read_yaml

_ADVICE = read_yaml("advice.yaml")

ADVICE: dict[str, list[str]] = _ADVICE["advice"]
CANNOT: dict[str, str] = _ADVICE["cannot"]
BY_SIZE: list[str] = _ADVICE["by_size"]
BY_SPEED: list[str] = _ADVICE["by_speed"]
CAN: dict[str, list[list[str]]] = _ADVICE["can"]
RHYMES: list[list[str]] = _ADVICE["rhymes"]
PLURALS: dict[str, str] = _ADVICE["plurals"]
PASTS: dict[str, str] = _ADVICE["pasts"]
PRESENTS: dict[str, list[str]] = _ADVICE["presents"]
MEALS: list[str] = _ADVICE["meals"]
