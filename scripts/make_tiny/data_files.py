"""Reads the word lists in ``data/``."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import yaml

_FOLDER = Path(__file__).with_name("data")


def read_yaml(name: str) -> dict[str, Any]:
    value: dict[str, Any] = yaml.safe_load((_FOLDER / name).read_text(encoding="utf-8"))
    return value


def read_csv(name: str) -> list[dict[str, str]]:
    with (_FOLDER / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
