"""Fused batches over the GPU's attention on the CPU: see engine/runner_on_cpu.py, whose stand-ins these are.

`python fused_on_cpu.py MODEL_FOLDER`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine.runner_on_cpu import install, on_gpus_runner


def main() -> None:
    from cotenant.config import BatchConfig, LoraConfig
    from cotenant.core.plan import Mode, Plan
    from cotenant.device import create_device
    from cotenant.engine.engine import OnlineEngine
    from cotenant.runtime.executor import Executor
    from cotenant.runtime.training import TrainingTenant
    from finetune import support
    from runtime.cotenancy import request

    folder = Path(tempfile.mkdtemp())
    decoder, device = support.load(Path(sys.argv[1])), create_device("cpu")
    prompts = [
        [3 + (7 * index + place) % 200 for place in range(length)] for index, length in enumerate((5, 30, 9, 17))
    ]

    def make_engine() -> OnlineEngine:
        return OnlineEngine(decoder, 64, 4, BatchConfig(10, 24), 96, LoraConfig(max_loras=6, max_lora_rank=8), ())

    def run(engine: OnlineEngine, executor: Executor, plan: Plan) -> tuple[dict[str, list[int]], int]:
        """Tokens by request, and how many layers were fused in; a prompt comes every other iteration."""
        tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}

        def emit(outputs: list[Any]) -> None:
            for output in outputs:
                tokens[output.request_id] += output.token_ids

        num_fused = iteration = 0
        while iteration < 2 * len(prompts) or engine.has_work:
            if iteration % 2 == 0 and iteration < 2 * len(prompts):
                index = iteration // 2
                engine.add(request(str(index), prompts[index], 12))
            record = executor.execute(plan, emit, lambda: False)
            num_fused += record.fused.count if record.fused else 0
            iteration += 1
        return tokens, num_fused

    updates: list[Any] = []
    training = TrainingTenant(device, decoder, None, support.TASKLET_TOKENS, updates.append)
    plain = make_engine()
    expected, _ = run(plain, Executor(device, decoder, plain, training), Plan())
    examples = support.random_examples(1000)  # an epoch ends with a checkpoint, for which training may have to wait
    training.start(support.make_spec(folder / "job", examples))
    for num_fused in (1, 2, 9):
        engine = on_gpus_runner(SimpleNamespace(decoder=decoder), make_engine(), (1, 2, 4))
        plan = Plan(num_tasklets=7, num_fused=num_fused, mode=Mode.FUSED)
        found, num_run = run(engine, Executor(device, decoder, engine, training), plan)
        assert found == expected, num_fused
        training.publish()
        assert training.job_id is not None, updates
        assert num_run > 0
        print(num_run, "layers fused", flush=True)


if __name__ == "__main__":
    install()
    main()
