"""Jobs whose layers are those that GPUs capture, run eagerly, and a device that lags behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch

from cotenant.core.job import StepMetrics
from cotenant.device.cpu.device import CpuDevice
from cotenant.finetune.job import TrainingJob
from cotenant.wire.messages import JobMetrics
from finetune import support

DPO = {"method": "dpo", "batch_size": 3}
DROPOUT = {"lora_dropout": 0.3, "gradient_checkpointing": True}

CHUNK_BYTES = 1 << 16
VALIDATION = support.random_examples(10, seed=5)

Make = Callable[..., TrainingJob]


def run_to_end(job: TrainingJob) -> list[StepMetrics]:
    updates = support.run_to_end(job)
    job.close()
    return [step for update in updates if isinstance(update, JobMetrics) for step in update.steps]


def flat(folder: Path) -> torch.Tensor:
    tensors = safetensors.torch.load_file(folder / "adapter" / "adapter_model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


class Lagging(CpuDevice):
    """The last ``lag`` tasklets count as in flight, until somebody waits for them."""

    def __init__(self, lag: int) -> None:
        super().__init__()
        self.lag, self.num_waits, self._num_awaited = lag, 0, 0

    def num_ended(self) -> int:
        return max(self._num_awaited, self.num_launched - self.lag)

    def wait_for_tasklets(self) -> None:
        self.num_waits += 1
        self._num_awaited = self.num_launched
