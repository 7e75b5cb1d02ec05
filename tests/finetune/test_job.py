"""What a job reports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from cotenant.core.errors import CotenantError, InvalidInputError
from cotenant.core.tasklet import TaskletKind, runs_of
from cotenant.finetune.job import TrainingJob
from cotenant.models.decoder import Decoder
from cotenant.wire.messages import CheckpointSaved, JobMetrics, JobStarted, JobSucceeded, JobWarning
from finetune import support
from finetune.reports import VALIDATION, steps_in


def test_reports_of_a_whole_job(decoder: Decoder, tmp_path: Path) -> None:
    spec = support.make_spec(tmp_path, validation=VALIDATION, eval_steps=2)
    job = support.make_job(decoder, spec)
    assert job.start_updates() == [JobStarted("ftjob-1", 10, 0, job.order.mean_step_tokens)]
    updates = support.run_to_end(job)
    steps = steps_in(updates)
    assert [step.step for step in steps] == list(range(1, 11))
    assert [step.step for step in steps if step.valid_loss is not None] == [2, 4, 5, 6, 8, 10]
    assert [step.step for step in steps if step.full_valid_loss is not None] == [5, 10]
    assert [step.epoch for step in steps] == pytest.approx([step / 5 for step in range(1, 11)])
    assert all(0 <= step.train_mean_token_accuracy <= 1 for step in steps)
    lengths = [len(token_ids) for token_ids, _ in support.random_examples(18)]
    assert sum(step.tokens for step in steps) == job.trained_tokens == 2 * sum(lengths)

    checkpoints = [update for update in updates if isinstance(update, CheckpointSaved)]
    assert [checkpoint.step for checkpoint in checkpoints] == [5, 10]
    assert [checkpoint.metrics for checkpoint in checkpoints] == [steps[4], steps[9]]
    assert updates[-1] == JobSucceeded("ftjob-1", str(tmp_path / "adapter"), job.trained_tokens, 10)
    assert job.finished_path == str(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == (
        Path(checkpoints[-1].path) / "adapter_model.safetensors"
    ).read_bytes()
    assert not (tmp_path / "adapter" / "trainer_state.json").exists()
    job.close()


def test_steps_are_reported_in_one_message(decoder: Decoder, tmp_path: Path) -> None:
    now_s = 100.0
    examples = [([5, 6, 7, 8], [0.0, 1.0, 1.0, 1.0])] * 40
    job = support.make_job(decoder, support.make_spec(tmp_path, examples, n_epochs=1), clock=lambda: now_s)
    assert job.take_updates() == []
    for _ in range(3):
        now_s += 2.0
        support.run_step(job)
    (metrics,) = job.take_updates()
    assert isinstance(metrics, JobMetrics)
    assert [step.step for step in metrics.steps] == [1, 2, 3]
    assert metrics.trained_tokens == job.trained_tokens
    assert metrics.remaining_s == pytest.approx(2.0 * 7)
    job.close()


def test_the_time_left_is_said_again_without_new_steps(decoder: Decoder, tmp_path: Path) -> None:
    """While a step waits for requests, and in a long evaluation, of which what is done counts."""
    now_s = 0.0
    examples = [([5, 6, 7, 8], [0.0, 1.0, 1.0, 1.0])] * 20
    spec = support.make_spec(tmp_path, examples, [([5] * 40, [1.0] * 40)] * 8, n_epochs=1, batch_size=4)
    job = support.make_job(decoder, spec, clock=lambda: now_s)

    def again(after_s: float) -> JobMetrics | None:
        nonlocal now_s
        now_s += after_s
        found = job.take_updates()
        assert len(found) <= 1
        update = found[0] if found else None
        assert update is None or (isinstance(update, JobMetrics) and update.steps == ())
        return update

    def train(num_steps: int) -> None:
        nonlocal now_s
        while job.step < num_steps:
            now_s += 1.0
            job.run_tasklet()

    job.run_tasklet()
    assert again(60.0) is None, "nobody knows yet"
    train(4)
    (first,) = job.take_updates()
    assert isinstance(first, JobMetrics)
    assert again(1.0) is None
    job.run_tasklet()
    waited = again(600.0)
    assert waited is not None
    assert waited.remaining_s == first.remaining_s
    assert waited.trained_tokens == job.trained_tokens
    assert again(1.0) is None
    train(5)
    left = []
    while job.upcoming():
        update = again(10.0)
        assert update is not None
        left.append(update.remaining_s)
        job.run_tasklet()
    assert left == sorted(left, reverse=True)
    assert len(set(left)) == 8
    assert left[-1] == pytest.approx(left[0] / 8)
    job.close()


def test_validation_loss_is_a_weighted_mean_whatever_the_micro_batches(decoder: Decoder, tmp_path: Path) -> None:
    figures = []
    for tokens in (16, 64, 1000):
        folder = tmp_path / str(tokens)
        job = TrainingJob(
            decoder, support.make_spec(folder, validation=VALIDATION, max_steps=1, warmup_steps=0), tokens, None
        )
        (step,) = steps_in(support.run_to_end(job))
        job.close()
        figures.append((step.train_loss, step.grad_norm, step.valid_loss, step.full_valid_loss))
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)
    assert figures[0] == pytest.approx(figures[2], rel=1e-5)
    assert figures[0][2] != pytest.approx(figures[0][3])  # the batch is not the whole set


NOTHING_TO_MEASURE = {
    "empty": [],
    "weightless": [([5, 6, 7], [0.0, 0.0, 0.0])],
    "all-cut": [(list(range(3, 103)), [0.0] * 50 + [1.0] * 50)],
}


@pytest.mark.parametrize("name", NOTHING_TO_MEASURE)
def test_validation_with_nothing_to_measure_is_left_out_and_this_is_said(
    decoder: Decoder, tmp_path: Path, name: str
) -> None:
    spec = support.make_spec(tmp_path, validation=NOTHING_TO_MEASURE[name], max_steps=2, warmup_steps=0)
    job = support.make_job(decoder, spec)
    _, warning = job.start_updates()
    assert isinstance(warning, JobWarning)
    assert "without validation" in warning.message
    assert "max_length=40" in warning.message
    assert [run.shape.kind for run in runs_of(job.upcoming())][-1] is TaskletKind.OPTIMIZER
    support.run_step(job)
    job.checkpoint()
    job.close()
    again = support.make_job(decoder, spec)
    assert not any(isinstance(update, JobWarning) for update in again.start_updates())
    assert steps_in(support.run_to_end(again))[0].valid_loss is None
    again.close()


@pytest.mark.parametrize("changes", [{"early_stopping_patience": 2}, {"load_best_model_at_end": True}])
def test_steps_cannot_be_compared_on_nothing(decoder: Decoder, tmp_path: Path, changes: dict[str, object]) -> None:
    for name, validation in NOTHING_TO_MEASURE.items():
        with pytest.raises(InvalidInputError, match="max_length=40") as error:
            support.make_job(decoder, support.make_spec(tmp_path / name, validation=validation, **changes))
        assert error.value.code == "invalid_validation_file"


def test_a_batch_of_more_rows_than_packing_makes_is_said(decoder: Decoder, tmp_path: Path) -> None:
    examples = [([5, 6, 7, 8], [0.0, 1.0, 1.0, 1.0])] * 18  # ten fill a row of 40 tokens
    for size, warned in ((3, True), (2, False)):
        spec = support.make_spec(tmp_path / str(size), examples, batch_size=size, packing=True, warmup_steps=0)
        job = support.make_job(decoder, spec)
        warnings = [update.message for update in job.start_updates() if isinstance(update, JobWarning)]
        expected = (
            "packing makes 2 rows of the training file's 18 examples, fewer than the 3 of a batch (batch_size, given "
            "or automatic): each step takes all of them"
        )
        assert warnings == [expected] * warned
        job.close()


def test_one_example(decoder: Decoder, tmp_path: Path) -> None:
    job = support.make_job(decoder, support.make_spec(tmp_path, [([5, 6, 7], [0.0, 1.0, 0.5])]))
    assert job.total_steps == 2
    assert isinstance(support.run_to_end(job)[-1], JobSucceeded)
    job.close()


def test_a_step_without_weight_changes_nothing_but_the_count(decoder: Decoder, tmp_path: Path) -> None:
    examples = [([5, 6, 7], [0.0, 0.0, 0.0]), ([8, 9, 10], [0.0, 1.0, 1.0])]
    job = support.make_job(
        decoder, support.make_spec(tmp_path, examples, batch_size=1, n_epochs=3, lr_scheduler_type="constant")
    )
    steps = steps_in(support.run_to_end(job))
    job.close()
    weightless = [step for step in steps if step.train_loss == 0.0]
    assert len(weightless) == 3
    assert all(step.grad_norm == 0.0 and step.tokens == 3 for step in weightless)


def test_an_example_longer_than_max_length_is_cut(decoder: Decoder, tmp_path: Path) -> None:
    examples = [(list(range(3, 103)), [0.0] * 10 + [1.0] * 90)]
    job = support.make_job(decoder, support.make_spec(tmp_path, examples, max_steps=1))
    assert job.next_shape.num_tokens == 40
    assert steps_in(support.run_to_end(job))[0].tokens == 40
    job.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_reports_float32s_figures(
    decoder: Decoder, model_folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """In float16 the gradient is computed with a scale, which must not be seen outside."""
    figures = []
    for model in (decoder, support.load(model_folder, dtype)):
        job = support.make_job(model, support.make_spec(tmp_path / str(model.dtype), max_steps=4, learning_rate=1e-3))
        assert all(parameter.dtype == torch.float32 for parameter in job.adapter.parameters())
        steps = steps_in(support.run_to_end(job))
        figures.append([figure for step in steps for figure in (step.train_loss, step.grad_norm)])
        job.close()
    assert figures[1] == pytest.approx(figures[0], rel=0.05)


def test_nothing_to_train_on_is_refused(decoder: Decoder, tmp_path: Path) -> None:
    examples = [(list(range(3, 103)), [0.0] * 50 + [1.0] * 50)]  # the weight lies beyond max_length
    with pytest.raises(InvalidInputError, match="max_length=40") as error:
        support.make_job(decoder, support.make_spec(tmp_path, examples))
    assert error.value.code == "invalid_training_file"


def test_tokenizer_files_are_exported(decoder: Decoder, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "tokenizer_config.json").write_text('{"a": 1}')
    (tokenizer / "model.safetensors").write_text("not a tokenizer's file")
    (tokenizer / "additional_chat_templates").mkdir()
    (tokenizer / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    job = TrainingJob(decoder, support.make_spec(tmp_path / "job", max_steps=1), support.TASKLET_TOKENS, tokenizer)
    support.run_to_end(job)
    job.close()
    for folder in (tmp_path / "job" / "adapter", tmp_path / "job" / "checkpoints" / "step-00000001"):
        assert json.loads((folder / "tokenizer_config.json").read_text()) == {"a": 1}
        assert (folder / "tokenizer.json").exists()
        assert (folder / "additional_chat_templates" / "tool_use.jinja").read_text() == "with tools"
        assert not (folder / "model.safetensors").exists()


def test_layers_are_computed_again_where_nothing_else_fits(decoder: Decoder, tmp_path: Path) -> None:
    """The longest example fits only so: the job trains, and gives what it gives with all the memory there is."""
    examples = [*support.random_examples(9), ([5] * 37, [1.0] * 37)]
    adapters = []
    for name, free_bytes in (("tight", None), ("wide", 1 << 40)):
        spec = support.make_spec(tmp_path / name, examples=examples, max_steps=4, batch_size=1)
        if free_bytes is None:
            with pytest.raises(CotenantError) as refused:
                support.make_job(decoder, spec, free_bytes=1000)
            free_bytes = int(re.findall(r"needs (\d+) bytes", refused.value.message)[0])
        support.run_to_end(job := support.make_job(decoder, spec, free_bytes=free_bytes))
        job.close()
        adapters.append(support.adapter_bytes(tmp_path / name))
    assert adapters[0] == adapters[1]
