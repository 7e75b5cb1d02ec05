"""What a plan says is what is run, and an arrival waits for at most the tasklet in flight."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cotenant.core.plan import Mode, Plan
from cotenant.core.tasklet import TaskletKind, TaskletShape
from cotenant.device.cpu.device import CpuDevice
from cotenant.runtime.device_time import DeviceTime
from finetune import support
from runtime.cotenancy import request
from runtime.executor_bench import Bench


@pytest.mark.parametrize("before", [0, 1, 5])
def test_no_tasklet_starts_once_a_request_has_arrived(bench: Bench, before: int) -> None:
    plan = Plan(run_online=False, num_tasklets=12, mode=Mode.TEMPORAL)
    assert bench.run(plan, looks_before_arrival=before) == before


@pytest.mark.parametrize(("hold_ms", "count"), [(0.0, 0), (1e6, 4)])
def test_tasklets_behind_a_batch_may_keep_a_request_waiting_for_a_while(
    bench: Bench, hold_ms: float, count: int
) -> None:
    bench.engine.add(request("r", [5, 6, 7], 3))
    plan = Plan(num_tasklets=4, mode=Mode.TEMPORAL, hold_ms=hold_ms)
    assert bench.run(plan, looks_before_arrival=0) == count


@pytest.mark.parametrize(("predicted_ms", "least", "most"), [(None, 10, 10), (1e6, 10, 10), (100.0, 1, 6)])
def test_no_tasklet_behind_a_batch_begins_later_than_was_planned(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, predicted_ms: float | None, least: int, most: int
) -> None:
    """Each takes 20 ms, of which the plan knows nothing."""
    job = bench.training._job
    assert job is not None
    run_tasklet = job.run_tasklet

    def run_slowly() -> TaskletShape:
        time.sleep(0.02)
        return run_tasklet()

    monkeypatch.setattr(job, "run_tasklet", run_slowly)
    bench.engine.add(request("r", [5, 6, 7], 3))
    assert least <= bench.run(Plan(num_tasklets=10, mode=Mode.TEMPORAL, predicted_ms=predicted_ms)) <= most


def test_a_plan_that_cannot_be_interrupted_runs_to_its_end(bench: Bench) -> None:
    plan = Plan(run_online=False, num_tasklets=5, interruptible=False, mode=Mode.TEMPORAL)
    assert bench.run(plan, looks_before_arrival=0) == 5


def test_a_whole_step_ends_with_its_optimizer_tasklet(bench: Bench) -> None:
    view = bench.training.view()
    assert view is not None
    wanted = view.num_left
    assert bench.run(Plan(run_online=False, until_step_end=True, interruptible=False)) == wanted
    after = bench.training.view()
    assert after is not None
    assert after.next_shape.kind is TaskletKind.FORWARD, "the next step begins"


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


def test_the_devices_time_of_a_fused_batch_is_that_of_all_its_layers(bench: Bench) -> None:
    bench.engine.add(request("r", [5] * 40, 60))
    bench.run(Plan())
    time_of = bench.executor.device_time = DeviceTime()
    shares: list[float] = []  # of what the host measures
    for _ in range(48):
        before_ms = time_of.decode_shared_ms
        plan = Plan(num_tasklets=2, num_fused=2, mode=Mode.FUSED)
        record = bench.executor.execute(plan, bench.emitted.extend, lambda: False)
        if record.fused:
            shares.append((time_of.decode_shared_ms - before_ms) / record.online_ms)
    assert max(shares) <= 1.0
    assert statistics.median(shares) > 0.7, "a machine that is busy may hold some of them up"
    assert time_of.decode_alone_ms > 0, "where the next tasklet was no forward"


def test_without_a_job_a_plan_for_tasklets_is_only_the_online_batch(bench: Bench) -> None:
    bench.pause()
    bench.engine.add(request("r", [5, 6, 7], 1))
    assert bench.run(Plan(num_tasklets=4, mode=Mode.TEMPORAL)) == 0
    assert [output.request_id for output in bench.emitted] == ["r"]


class AheadDevice(CpuDevice):
    """A CPU that is asked for what a device behind the host is; notes what was launched behind batches, and whether
    that waited."""

    overlaps = True

    def __init__(self) -> None:
        super().__init__()
        self.behind: list[tuple[TaskletKind, bool]] = []
        self.next_waits: Callable[[], bool] = lambda: False

    def run_tasklet(self, launch: Callable[[], TaskletShape], *, behind_online: bool = False) -> None:
        def noted() -> TaskletShape:
            waits = self.next_waits()
            shape = launch()
            if behind_online:
                self.behind.append((shape.kind, waits))
            return shape

        super().run_tasklet(noted, behind_online=behind_online)


def test_nothing_that_waits_for_the_device_is_launched_behind_a_batch(tmp_path: Path) -> None:
    """The host would wait for the batch within the launch, and its tokens would wait for the tasklet."""
    device = AheadDevice()
    bench = Bench(tmp_path, device, validation=support.random_examples(6, seed=5))
    device.next_waits = lambda: bench.training.next_waits
    bench.engine.add(request("r", [5, 6, 7], 60))
    for _ in range(50):
        bench.run(Plan(num_tasklets=1, mode=Mode.TEMPORAL))
    kinds = {kind for kind, _ in device.behind}
    assert {TaskletKind.FORWARD, TaskletKind.BACKWARD, TaskletKind.EVAL_FORWARD, TaskletKind.EVAL_LOSS} <= kinds
    assert TaskletKind.OPTIMIZER not in kinds
    assert not any(waits for _, waits in device.behind)
    assert sum(len(output.token_ids) for output in bench.emitted) == 50
    bench.pause()
