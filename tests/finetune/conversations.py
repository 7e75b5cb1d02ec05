"""Jobs on conversations in English, for the small trained model that the package brings."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import cotenant
from cotenant.core.job import Hyperparameters, JobSpec
from cotenant.text.validation import prepare_training_file

ASSETS = Path(cotenant.__file__).parent / "assets"
TINY = ASSETS / "tiny"
DATA = Path(os.environ.get("COTENANT_TEST_CHAT_DATA", ASSETS / "demo" / "train.jsonl"))
VOCAB_SIZE = 2048
NUM_EXAMPLES = 24


def _conversations(count: int) -> list[dict[str, Any]]:
    lines = DATA.read_text(encoding="utf-8").splitlines()
    conversations = [json.loads(line) for line in lines]
    short = [item for item in conversations if sum(len(message["content"]) for message in item["messages"]) < 900]
    return short[:count]


def _pairs(conversations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each question with its answer, and with the next other answer as the worse."""
    answers = [item["messages"][-1:] for item in conversations]
    return [
        {
            "input": {"messages": item["messages"][:-1]},
            "preferred_output": answers[index],
            "non_preferred_output": next(
                other for other in answers[index + 1 :] + answers[:index] if other != answers[index]
            ),
        }
        for index, item in enumerate(conversations)
    ]


def make_spec(
    folder: Path, hyper: Hyperparameters, num_examples: int = NUM_EXAMPLES, num_validation: int = 0
) -> JobSpec:
    """A job in a new folder, with its tokenised files."""
    folder.mkdir(parents=True)
    conversations = _conversations(num_examples + num_validation)
    lines = _pairs(conversations) if hyper.method == "dpo" else conversations
    train = _prepare(folder / "train.safetensors", lines[:num_examples], hyper.method)
    valid = _prepare(folder / "valid.safetensors", lines[num_examples:], hyper.method) if num_validation else None
    return JobSpec("ftjob-1", "tiny", str(folder), train, valid, "ft:tiny", hyper)


def _prepare(target: Path, lines: list[dict[str, Any]], method: str) -> str:
    source = target.with_suffix(".jsonl")
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prepare_training_file(source, target, TINY, None, VOCAB_SIZE, 512, min_examples=1, method=method)
    return str(target)
