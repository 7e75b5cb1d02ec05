"""A finished job's metrics as a CSV file, with OpenAI's columns, and for DPO with those of TRL after them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Any

HEADER = ("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy")
FILENAME = "step_metrics.csv"
RESULT_PURPOSE = "fine-tune-results"

PREFERENCE_HEADER = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")

# Where each column's value is in a metrics event.
_FIELDS = ("step", "train_loss", "train_mean_token_accuracy", "valid_loss", "valid_mean_token_accuracy")


def metrics_csv(steps: Iterable[Mapping[str, Any]]) -> bytes:
    """One line a step, in the given order. Cells of what a step did not measure are empty."""
    steps = list(steps)
    preference = PREFERENCE_HEADER if any(PREFERENCE_HEADER[0] in data for data in steps) else ()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*HEADER, *preference))
    for data in steps:
        values = (data.get(name) for name in (*_FIELDS, *preference))
        writer.writerow("" if value is None else value for value in values)
    return text.getvalue().encode()
