"""A trace of short questions, as `cotenant bench colocate --trace` takes it: prompts of 32 to 160 tokens, which read
all weights and compute little, answers of 20 to 100, 16 a second.

    python bench/short_prompts.py short.csv
"""

from __future__ import annotations

import csv
import random
from datetime import datetime, timedelta
from pathlib import Path

import typer

_RATE, _SECONDS = 16.0, 160.0
_PROMPT, _ANSWER = (32, 160), (20, 100)
_BEGIN = datetime(2023, 11, 16, 18)


def main(path: Path) -> None:
    rng, at_s = random.Random(5), 0.0
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
        while (at_s := at_s + rng.expovariate(_RATE)) < _SECONDS:
            rows.writerow((_BEGIN + timedelta(seconds=at_s), rng.randint(*_PROMPT), rng.randint(*_ANSWER)))


if __name__ == "__main__":
    typer.run(main)
