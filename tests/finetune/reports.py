"""What a job's reports hold."""

from __future__ import annotations

from cotenant.wire.messages import FromWorker, JobMetrics
from finetune import support

VALIDATION = support.random_examples(9, seed=5)


def steps_in(updates: list[FromWorker]) -> list:
    return [step for update in updates if isinstance(update, JobMetrics) for step in update.steps]


DPO = {"method": "dpo", "batch_size": 3}
