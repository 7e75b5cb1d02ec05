"""The best checkpoint and early stopping: transformers' rules, and exact whatever interrupts the job."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.job import Hyperparameters, StepMetrics
from cotenant.finetune.metrics import MetricsLog
from cotenant.finetune.selection import Selection
from cotenant.models.decoder import Decoder
from cotenant.wire.messages import CheckpointSaved, FromWorker, JobSucceeded
from finetune import support

VALIDATION = support.random_examples(9, seed=5)
OVERFITTING = {
    "eval_steps": 2,
    "n_epochs": 20,
    "learning_rate": 0.02,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
}
STOPPING = {**OVERFITTING, "early_stopping_patience": 3, "load_best_model_at_end": True}


def _metrics(step: int, loss: float | None, accuracy: float | None = None) -> StepMetrics:
    return StepMetrics(step, 0.0, 1.0, 0.5, 1e-4, 1.0, 10, None, None, loss, accuracy)


@given(
    st.lists(st.floats(0, 4).map(lambda loss: round(loss, 1)), max_size=20),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.25]),
    st.sampled_from(["loss", "mean_token_accuracy"]),
)
def test_equals_transformers(figures: list[float], patience: int, threshold: float, metric: str) -> None:
    callback = transformers.EarlyStoppingCallback(patience, threshold)
    greater = metric != "loss"
    args = transformers.TrainingArguments("unused", metric_for_best_model=metric, greater_is_better=greater)
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    best_step = None
    selection = Selection(
        Hyperparameters(
            metric_for_best_model=metric, early_stopping_patience=patience, early_stopping_threshold=threshold
        )
    )
    for step, figure in enumerate(figures, start=1):
        callback.on_evaluate(args, state, control, {f"eval_{metric}": figure})
        is_best = state.best_metric is None or (figure > state.best_metric if greater else figure < state.best_metric)
        if is_best:
            state.best_metric, best_step = figure, step
        given_figures = (None, figure) if greater else (figure, None)
        assert selection.add(_metrics(step, *given_figures)) == is_best
        assert selection.best_step == best_step
        assert selection.stops == control.should_training_stop
        if selection.stops:
            break


def test_a_loss_that_is_not_finite_is_never_the_best() -> None:
    """Nor does it count towards a stop: a job that is taken up again finds such figures recorded as missing."""
    selection = Selection(Hyperparameters(early_stopping_patience=2))
    for step, loss in enumerate((math.nan, 3.0, None, math.inf, math.nan, 3.5), start=1):
        assert selection.add(_metrics(step, loss)) == (loss == 3.0)
        assert not selection.stops
    assert not selection.add(_metrics(7, 3.2))
    assert selection.stops
    assert selection.best_step == 2


def _run(decoder: Decoder, folder: Path, interrupted_every: int = 0) -> list[FromWorker]:
    """The whole job, paused and taken up again after so many tasklets each time."""
    spec = support.make_spec(folder, validation=VALIDATION, **STOPPING)
    updates: list[FromWorker] = []
    job = support.make_job(decoder, spec)
    while not job.done:
        for _ in range(interrupted_every or 10**9):
            if not job.upcoming():
                job.wait_for_writes()
                break
            job.run_tasklet()
        updates += job.take_updates()
        if interrupted_every and not job.done:
            updates += job.checkpoint()
            job.close()
            job = support.make_job(decoder, spec)
            updates += job.start_updates()
    job.close()
    return updates


def test_a_job_stops_early_and_exports_its_best_step(decoder: Decoder, tmp_path: Path) -> None:
    updates = _run(decoder, tmp_path)
    steps = MetricsLog(tmp_path / "metrics.jsonl").read()
    measured = {step.step: step.full_valid_loss for step in steps if step.full_valid_loss is not None}
    # Every second step, and the ends of the epochs of five steps.
    assert list(measured) == [step for step in range(1, len(steps) + 1) if step % 2 == 0 or step % 5 == 0]
    best = min(measured, key=lambda step: measured[step])
    assert len(steps) < 100
    assert [step for step in measured if step > best] == list(measured)[-3:]  # patience
    succeeded = updates[-1]
    assert isinstance(succeeded, JobSucceeded)
    assert (succeeded.best_step, succeeded.total_steps) == (best, len(steps))
    saved = {update.step: Path(update.path) for update in updates if isinstance(update, CheckpointSaved)}
    # Better and better steps were measured between; of them the best alone is left, and it was not announced.
    assert list(saved) == [step for step in measured if step % 5 == 0 or step == len(steps)]
    folders = {path.name: path for path in (tmp_path / "checkpoints").iterdir()}
    assert folders.keys() == {f"step-{step:08d}" for step in {best, *saved}}
    assert support.adapter_bytes(tmp_path) == (folders[f"step-{best:08d}"] / "adapter_model.safetensors").read_bytes()
    assert support.adapter_bytes(tmp_path) != (saved[len(steps)] / "adapter_model.safetensors").read_bytes()

    again = support.make_job(decoder, support.make_spec(tmp_path, validation=VALIDATION, **STOPPING))
    assert again.start_updates()[-1] == succeeded
    again.close()


@pytest.mark.parametrize("interrupted_every", [61, 100])
def test_interruptions_choose_the_same_step(decoder: Decoder, tmp_path: Path, interrupted_every: int) -> None:
    _run(decoder, tmp_path / "reference")
    updates = _run(decoder, tmp_path / "interrupted", interrupted_every)
    assert isinstance(updates[-1], JobSucceeded)
    assert support.adapter_bytes(tmp_path / "interrupted") == support.adapter_bytes(tmp_path / "reference")
    logs = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("interrupted", "reference")]
    assert logs[0] == logs[1]


def test_a_damaged_best_checkpoint_is_not_exported(
    decoder: Decoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {**OVERFITTING, "n_epochs": 4, "load_best_model_at_end": True}
    job = support.make_job(decoder, support.make_spec(tmp_path, validation=VALIDATION, **changes))
    best = None
    while job.step < job.total_steps:
        support.run_step(job)
        if job.step == 19:
            job.wait_for_writes()
            steps = [step for step in MetricsLog(tmp_path / "metrics.jsonl").read() if step.full_valid_loss is not None]
            best = min(steps, key=lambda step: step.full_valid_loss or 0.0).step
            weights = tmp_path / "checkpoints" / f"step-{best:08d}" / "adapter_model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    job.wait_for_writes()
    succeeded = job.take_updates()[-1]
    job.close()
    assert isinstance(succeeded, JobSucceeded)
    assert succeeded.best_step is None
    assert f"not step {best}" in caplog.text
    last = tmp_path / "checkpoints" / "step-00000020" / "adapter_model.safetensors"
    assert support.adapter_bytes(tmp_path) == last.read_bytes()
    again = support.make_job(decoder, support.make_spec(tmp_path, validation=VALIDATION, **changes))
    assert again.start_updates()[-1] == succeeded  # a worker that died before it could report says the same
    again.close()
