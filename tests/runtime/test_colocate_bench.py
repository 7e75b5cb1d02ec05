"""What training gets beside a load, counted within a step."""

from __future__ import annotations

from cotenant.config import BatchConfig, ModelConfig, ServerConfig
from cotenant.core.plan import Slo
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
