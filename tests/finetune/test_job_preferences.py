"""What a job that learns preferences reports, and which pairs it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.core.errors import InvalidInputError
from cotenant.finetune.job import TrainingJob
from cotenant.models.decoder import Decoder
from finetune import support
from finetune.reports import DPO, VALIDATION, steps_in


def test_a_dpo_job_reports_rewards(decoder: Decoder, tmp_path: Path) -> None:
    validation = support.random_examples(10, seed=5)
    job = support.make_job(decoder, support.make_spec(tmp_path, validation=validation, eval_steps=2, **DPO))
    assert job.total_steps == 6  # two epochs of nine pairs
    steps = steps_in(support.run_to_end(job))
    job.close()
    assert [step.step for step in steps if step.valid_preference is not None] == [2, 3, 4, 6]
    assert [step.step for step in steps if step.full_valid_preference is not None] == [3, 6]
    for step in steps:
        rewards = step.preference
        assert rewards.margins == pytest.approx(rewards.chosen - rewards.rejected)
        assert 0 <= rewards.accuracies <= 1
        assert rewards.logps_chosen < 0 > rewards.logps_rejected
    assert steps[-1].preference.margins > 0 == steps[0].preference.margins
    lengths = [len(token_ids) for token_ids, _ in support.random_examples(18)]
    assert job.trained_tokens == 2 * sum(lengths)


def test_dpo_validation_is_a_mean_over_pairs_whatever_the_micro_batches(decoder: Decoder, tmp_path: Path) -> None:
    figures = []
    for tokens in (16, 80, 1000):
        spec = support.make_spec(
            tmp_path / str(tokens), validation=VALIDATION[:8], max_steps=2, warmup_steps=0, lora_dropout=0.0, **DPO
        )
        job = TrainingJob(decoder, spec, tokens, None)
        step = steps_in(support.run_to_end(job))[-1]
        job.close()
        figures.append((step.train_loss, step.grad_norm, step.valid_loss, step.full_valid_loss))
        figures[-1] += (step.full_valid_preference.margins, step.full_valid_mean_token_accuracy)
    assert figures[1] == pytest.approx(figures[0], rel=1e-4)
    assert figures[2] == pytest.approx(figures[0], rel=1e-4)


def test_a_pair_without_an_answer_is_refused(decoder: Decoder, tmp_path: Path) -> None:
    kept, other = ([5, 6, 7], [0.0, 1.0, 1.0]), ([5, 6, 8], [0.0, 1.0, 1.0])
    cut = (list(range(3, 53)), [0.0] * 45 + [1.0] * 5)
    with pytest.raises(InvalidInputError, match=r"Line 2 of the training file .* rejected answer .* max_length=40"):
        support.make_job(decoder, support.make_spec(tmp_path / "train", [kept, other, kept, cut], **DPO))
    with pytest.raises(InvalidInputError, match=r"Line 1 of the validation file .* preferred answer") as error:
        support.make_job(decoder, support.make_spec(tmp_path / "valid", [kept, other], [cut, kept], **DPO))
    assert error.value.code == "invalid_validation_file"
    with pytest.raises(InvalidInputError, match=r"1 of the validation file .* preferred answer") as error:
        support.make_job(decoder, support.make_spec(tmp_path / "all", [kept, other], [cut, cut], **DPO))
    assert error.value.code == "invalid_validation_file"


def test_a_pair_that_is_the_same_once_it_is_cut_is_refused(decoder: Decoder, tmp_path: Path) -> None:
    prompt, weights = list(range(3, 13)), [0.0] * 10
    said = [(prompt + [20] * 10, weights + [1.0] * 10), (prompt + [21] * 10, weights + [1.0] * 10)]
    long = [(prompt + [20] * 40 + [end], weights + [1.0] * 41) for end in (30, 31)]  # they differ beyond max_length
    with pytest.raises(InvalidInputError, match=r"Line 2 of the training file has the same .* max_length=40") as error:
        support.make_job(decoder, support.make_spec(tmp_path / "a", [*said, *long], method="dpo"))
    assert error.value.code == "invalid_training_file"
    with pytest.raises(InvalidInputError, match=r"Line 1 of the validation file has the same .* max_length=40"):
        support.make_job(decoder, support.make_spec(tmp_path / "b", said, validation=long, method="dpo"))
    support.make_job(decoder, support.make_spec(tmp_path / "c", [*said, *long], method="dpo", max_length=60)).close()
