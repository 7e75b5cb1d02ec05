"""What a plan says is what is run, and an arrival waits for at most the tasklet in flight."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cotenant.config import BatchConfig, LoraConfig
from cotenant.core.plan import Mode, Plan
from cotenant.core.request import SequenceOutput
from cotenant.core.tasklet import TaskletKind
from cotenant.device import create_device
from cotenant.engine.engine import OnlineEngine
from cotenant.runtime.executor import Executor
from cotenant.runtime.training import TrainingTenant
from finetune import support
from finetune.conftest import save_llama
from runtime.cotenancy import request


class Bench:
    """One engine, one job, one executor."""

    def __init__(self, folder: Path) -> None:
        save_llama(folder / "model")
        decoder = support.load(folder / "model")
        device = create_device("cpu")
        self.engine = OnlineEngine(decoder, 64, 4, BatchConfig(8, 64), 128, LoraConfig(), ())
        self.training = TrainingTenant(device, decoder, None, support.TASKLET_TOKENS, lambda update: None)
        self.training.start(support.make_spec(folder / "job"))
        self.executor = Executor(device, decoder, self.engine, self.training)
        self.emitted: list[SequenceOutput] = []

    def run(self, plan: Plan, looks_before_arrival: int = 1_000_000) -> int:
        """Execute the plan; a request 'arrives' after so many looks. Returns the tasklets that ran."""
        looks = iter(range(looks_before_arrival))
        record = self.executor.execute(plan, self.emitted.extend, lambda: next(looks, None) is None)
        return sum(run.count for run, _ in record.tasklets) + (record.fused.count if record.fused else 0)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.training.pause_running()


@pytest.mark.parametrize("before", [0, 1, 5])
def test_no_tasklet_starts_once_a_request_has_arrived(bench: Bench, before: int) -> None:
    plan = Plan(run_online=False, num_tasklets=12, mode=Mode.TEMPORAL)
    assert bench.run(plan, looks_before_arrival=before) == before


def test_a_plan_that_cannot_be_interrupted_runs_to_its_end(bench: Bench) -> None:
    plan = Plan(run_online=False, num_tasklets=5, interruptible=False, mode=Mode.TEMPORAL)
    assert bench.run(plan, looks_before_arrival=0) == 5


def test_a_whole_step_ends_with_its_optimizer_tasklet(bench: Bench) -> None:
    view = bench.training.view()
    assert view is not None
    wanted = sum(run.count for run in view.upcoming)
    assert bench.run(Plan(run_online=False, until_step_end=True, interruptible=False)) == wanted
    after = bench.training.view()
    assert after is not None
    assert after.upcoming[0].shape.kind is TaskletKind.FORWARD, "the next step begins"


def test_tokens_leave_before_the_tasklets_beside_their_batch_start(bench: Bench) -> None:
    bench.engine.add(request("r", [5, 6, 7], 4))
    seen_at_first_look: list[int] = []

    def look() -> bool:
        seen_at_first_look.append(len(bench.emitted))
        return False

    bench.executor.execute(Plan(num_tasklets=2, mode=Mode.TEMPORAL), bench.emitted.extend, look)
    assert seen_at_first_look[0] == 1


def test_fused_tasklets_count_against_the_plan(bench: Bench) -> None:
    bench.engine.add(request("r", [5, 6, 7], 4))
    assert bench.run(Plan(num_tasklets=2, num_fused=2, mode=Mode.FUSED)) == 2
    assert bench.run(Plan(num_tasklets=3, num_fused=1, mode=Mode.FUSED)) == 3


def test_without_a_job_a_plan_for_tasklets_is_only_the_online_batch(bench: Bench) -> None:
    bench.training.pause_running()
    bench.engine.add(request("r", [5, 6, 7], 1))
    assert bench.run(Plan(num_tasklets=4, mode=Mode.TEMPORAL)) == 0
    assert [output.request_id for output in bench.emitted] == ["r"]
