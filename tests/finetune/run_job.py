"""Runs the job in a folder to its end, as the worker would; the test kills this process.

``steps`` gets the number of steps taken, at the start and after each. Unless ``ends``, the job goes no further than
before its last step, where ``steps`` is closed: however late the kill comes, there is something left to do.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from finetune import support

# Checkpoints at epoch ends, every 4 steps, and on demand, with evaluations between: every kind of write gets killed.
_COMMON = {"eval_steps": 3, "save_steps": 4, "lora_dropout": 0.1}
CHANGES = {
    "supervised": {**_COMMON, "n_epochs": 5},
    "dpo": {**_COMMON, "n_epochs": 8, "method": "dpo", "batch_size": 3, "load_best_model_at_end": True},
}


def main(model_folder: Path, job_folder: Path, method: str, steps: Connection, ends: bool) -> None:
    torch.set_num_threads(1)
    decoder = support.load(model_folder)
    job = support.make_job(decoder, support.make_spec(job_folder, **CHANGES[method]))
    reported = -1
    num_tasklets = 0
    while not job.done:
        if job.step != reported:
            reported = job.step
            steps.send(reported)
            if not ends and reported == job.total_steps - 1:
                steps.close()
                time.sleep(60)
                return
        if job.upcoming():
            job.run_tasklet()
            num_tasklets += 1
        else:
            job.wait_for_writes()
        if num_tasklets % 31 == 0:
            job.checkpoint()
        job.take_updates()
    job.close()
