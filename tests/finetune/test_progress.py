"""The estimate of the time left: from measured wall time, whatever takes a share of it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.job import Hyperparameters
from cotenant.core.tasklet import TaskletKind
from cotenant.finetune.job import TrainingJob
from cotenant.finetune.order import DataOrder
from cotenant.finetune.progress import Progress, Work
from cotenant.models.decoder import Decoder
from cotenant.wire.messages import JobMetrics
from finetune import support
from finetune.conftest import save_llama
from finetune.conversations import VOCAB_SIZE, make_spec


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """With as many layers as the built-in model, and so with its tasklets; the clock knows nothing else of it."""
    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder, max_positions=512, vocab_size=VOCAB_SIZE, num_layers=6)
    return support.load(folder)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4), st.integers(-1, 30), st.integers(0, 12))
def test_evaluations_are_counted_as_they_happen(
    num_examples: int, batch_size: int, n_epochs: int, max_steps: int, every: int
) -> None:
    hyper = replace(support.HYPER, batch_size=batch_size, n_epochs=n_epochs, max_steps=max_steps or -1)
    order = DataOrder([10] * num_examples, hyper)
    happened = [step for step in range(1, order.total_steps + 1) if order.evaluates(step, every)]
    assert order.num_evaluations(every) == len(happened)
    for step in range(order.total_steps + 1):
        assert order.num_evaluations(every, step) == sum(other <= step for other in happened)


def test_tokens_are_counted_not_steps() -> None:
    now_s = 0.0
    progress = Progress(lambda: now_s)
    assert progress.remaining_s(Work(100, 0)) is None
    for num_tokens in (100, 300, 200):
        now_s += num_tokens * 0.004
        progress.tasklet_done(forward=True)
        now_s += num_tokens * 0.005
        progress.tasklet_done(forward=False)
        now_s += num_tokens * 0.001
        progress.trained(num_tokens, 2 * num_tokens)
        assert progress.remaining_s(Work(1000, 0)) == pytest.approx(10.0)
        assert progress.remaining_s(Work(0, 1000)) == pytest.approx(2.0)  # as far as anybody knows yet
    now_s += 50 * 0.002
    progress.evaluated(50)
    assert progress.remaining_s(Work(1000, 500)) == pytest.approx(11.0)


def test_a_slow_start_is_forgotten_and_a_slow_share_is_not() -> None:
    now_s = 0.0
    progress = Progress(lambda: now_s)

    def take(*seconds: float) -> float:
        nonlocal now_s
        for lap_s in seconds:
            now_s += lap_s
            progress.trained(10, 10)
        remaining_s = progress.remaining_s(Work(100, 0))
        assert remaining_s is not None
        return remaining_s

    assert take(30.0, 1.0, 3.0, 1.0, 1.0) == pytest.approx(10.0)
    assert take(*[1.0] * 30) == pytest.approx(10.0)
    # Every third step waits for somebody: from now on that is what steps take.
    assert take(*[1.0, 1.0, 4.0] * 32) == pytest.approx(20.0, rel=0.05)


COMMON = Hyperparameters(batch_size=4, max_length=512, learning_rate=1e-3, r=8)
# What the device takes for a token (a target, for losses), and the optimizer for a step.
SECONDS = {
    TaskletKind.FORWARD: 0.0010,
    TaskletKind.LOSS: 0.0020,
    TaskletKind.BACKWARD: 0.0022,
    TaskletKind.EVAL_FORWARD: 0.0009,
    TaskletKind.EVAL_LOSS: 0.0010,
}
OPTIMIZER_SECONDS = 0.3
# Settings, and what another tenant takes for each second of training, on average.
CASES = {
    "supervised": (replace(COMMON, n_epochs=8), 0.0),
    "supervised-shared": (replace(COMMON, n_epochs=6), 1.0),
    "dpo-shared": (replace(COMMON, n_epochs=4, method="dpo"), 0.5),
    "selection": (replace(COMMON, n_epochs=5, eval_steps=4, load_best_model_at_end=True), 0.0),
}


@pytest.mark.parametrize("name", CASES)
def test_within_a_fifth_after_the_first_tenth(decoder: Decoder, tmp_path: Path, name: str) -> None:
    """A real job, alone or beside another tenant's steady work, on a clock that their sizes move,
    give or take a third: what a busy machine does to a test has no part in it."""
    hyper, others = CASES[name]
    noise = random.Random(7)
    now_s = 0.0
    spec = make_spec(tmp_path / "job", hyper, num_examples=40, num_validation=40)
    job = TrainingJob(decoder, spec, 300, None, clock=lambda: now_s)
    estimates: list[tuple[float, float, float]] = []  # with a step: (share of the steps done, when, seconds left)
    between: list[tuple[float, float]] = []  # without: (when, seconds left)
    while not job.done:
        if job.upcoming():
            shape = job.run_tasklet()
            took_s = SECONDS[shape.kind] * shape.num_tokens if shape.kind in SECONDS else OPTIMIZER_SECONDS
            now_s += took_s * (noise.uniform(0.7, 1.3) + others * noise.uniform(0.0, 2.0))
        else:
            job.wait_for_writes()
        for update in job.take_updates():
            if isinstance(update, JobMetrics) and update.remaining_s is not None:
                if update.steps:
                    estimates.append((job.step / job.total_steps, now_s, update.remaining_s))
                else:
                    between.append((now_s, update.remaining_s))
    job.close()
    *_, (share, when_s, left_s) = estimates
    assert (share, when_s, left_s) == (1.0, now_s, pytest.approx(0.0, abs=1e-6))
    errors = [abs(left_s / (now_s - when_s) - 1.0) for share, when_s, left_s in estimates[:-1] if share >= 0.1]
    assert len(errors) > 10
    assert max(errors) < 0.2
    step_s = now_s / job.total_steps  # what is begun counts micro-batch by micro-batch
    assert len(between) > 10
    late = [(when_s, left_s) for when_s, left_s in between if when_s >= 0.1 * now_s]
    assert all(abs(left_s - (now_s - when_s)) < 0.2 * (now_s - when_s) + step_s for when_s, left_s in late)
