"""What training gets beside a load, counted within a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cotenant.config import BatchConfig, ModelConfig, ServerConfig
from cotenant.core.plan import Partition, Slo
from cotenant.core.tasklet import TaskletShape
from cotenant.device.cpu.device import CpuDevice
from cotenant.runtime.colocate_bench import ColocateBench
from cotenant.runtime.finetune_workload import Workload
from cotenant.runtime.load import Arrival


def test_training_counts_no_faster_in_cells_that_are_shorter_than_a_step() -> None:
    """A cell that begins within a step counts that step's tasklets at what they are of the whole step."""
    config = ServerConfig(model=ModelConfig(model="tiny", max_model_len=128, device="cpu"), batch=BatchConfig())
    with ColocateBench(config, Workload(64, 2048, 64, 16, False)) as bench:
        alone = bench.alone(1.0)
        step_s = 2048 / alone
        cells = [bench.trace("whole-step", Slo(500, 1000), [], step_s / 5)]  # ends at a step's end
        cells += [bench.trace("temporal", Slo(500, 1000), [Arrival(0.0, 4, 1)], step_s / 5) for _ in range(8)]
        assert all(cell.num_failed == 0 for cell in cells)
        assert max(cell.train_tokens_per_s for cell in cells) < 3 * alone


def test_what_runs_in_a_partition_for_the_first_time_runs_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there, run_tasklet, ran = Partition(48, 84), CpuDevice.run_tasklet, list[Partition | None]()

    def noted(
        device: CpuDevice,
        launch: Callable[[], TaskletShape],
        *,
        behind_online: bool = False,
        partition: Partition | None = None,
    ) -> None:
        ran.append(partition)
        run_tasklet(device, launch, behind_online=behind_online, partition=partition)

    monkeypatch.setattr(CpuDevice, "partitions", (there,))
    monkeypatch.setattr(CpuDevice, "run_tasklet", noted)
    config = ServerConfig(model=ModelConfig(model="tiny", max_model_len=128, device="cpu"), batch=BatchConfig())
    with ColocateBench(config, Workload(64, 128, 64, 16, False)) as bench:
        bench.alone(0.1)
        ran.clear()
        bench.trace("multitask", Slo(500, 1000), [], 0.1)
        assert set(ran) == {None}, "it has no partitions"
        for num_there in (True, False):
            ran.clear()
            bench.trace("adaptive", Slo(500, 1000), [], 0.1)  # without requests, training has all SMs
            assert (ran[0] == there) == (there in ran) == num_there
            assert ran[-1] is None
