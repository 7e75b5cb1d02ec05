"""Definitions, explanations, directions, jokes, poems and comfort (``data/words.yaml``)."""

from __future__ import annotations

from scripts.make_tiny.data_files import read_yaml

_WORDS = read_yaml("words.yaml")

DEFINITIONS: dict[str, list[str]] = _WORDS["definitions"]
EXPLANATIONS: dict[str, str] = _WORDS["explanations"]
DIRECTIONS: dict[str, list[str]] = _WORDS["directions"]
JOKES: list[list[str]] = _WORDS["jokes"]
POEMS: dict[str, list[str]] = _WORDS["poems"]
FEELINGS: dict[str, list[str]] = _WORDS["feelings"]
IDENTITY: list[list[list[str]]] = _WORDS["identity"]
FAVOURITES: dict[str, list[list[str]]] = _WORDS["favourites"]
