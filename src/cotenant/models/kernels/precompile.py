"""Compiles the kernels that training adds to serving's, by running each of them once on a few rows:
`python -m cotenant.models.kernels.precompile PARENT_PID JSON`.

Triton keeps what it compiles on disk. Compiled by the process that serves, at a job's first step, they would keep
requests waiting for seconds.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

import msgspec
import torch

from cotenant.models import elementwise_ops as ops
from cotenant.models.dropout import DropoutMasks
from cotenant.models.kernels.cross_entropy import cross_entropy_in_place
from cotenant.models.spec import ModelSpec
from cotenant.processes import die_with_parent

logger = logging.getLogger(__name__)

# As frames have them: a multiple of this.
_ROWS = 128
_WITHIN_S = 180.0


class _Request(msgspec.Struct):
    spec: ModelSpec
    dtype: str


class TrainingKernels:
    """Begins to compile on a process of its own, which gives way to others and ends with this one."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        request = msgspec.json.encode(_Request(spec, str(dtype).removeprefix("torch."))).decode()
        command = [sys.executable, "-m", "cotenant.models.kernels.precompile", str(os.getpid()), request]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self._ended = threading.Event()
        threading.Thread(target=self._wait, name="training-kernels", daemon=True).start()

    @property
    def ready(self) -> bool:
        """Whether it has ended. If it has failed, kernels are compiled where they are first used, as without it."""
        return self._ended.is_set()

    def _wait(self) -> None:
        try:
            exit_code = self._process.wait(_WITHIN_S)
            if exit_code != 0:
                logger.warning("training's kernels were not compiled ahead: exit code %d", exit_code)
        except subprocess.TimeoutExpired:
            logger.warning("training's kernels were not compiled ahead within %.0f s", _WITHIN_S)
            self._process.kill()
            self._process.wait()
        self._ended.set()


@torch.no_grad()
def run_all(request: _Request) -> None:
    """On the current CUDA device."""
    spec, dtype = request.spec, getattr(torch, request.dtype)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    epsilon, num_rotated = spec.rms_norm_eps, spec.num_heads + spec.num_kv_heads
    x, weight = zeros(_ROWS, spec.hidden_size), zeros(spec.hidden_size)
    ops.norm(x, weight, epsilon)
    ops.norm_backward(x, weight, x, epsilon)
    ops.norm_backward(x, weight, x, epsilon, add=x)
    gate_up = zeros(_ROWS, 2 * spec.intermediate_size)
    ops.silu_backward(gate_up, ops.silu_and_multiply(gate_up))
    heads = zeros(_ROWS, num_rotated + spec.num_kv_heads, spec.head_dim)
    cos = zeros(_ROWS, 1, spec.head_dim)
    qk_norm = zeros(num_rotated, spec.head_dim) if spec.qk_norm else None
    rotated = ops.rotate_heads(heads, cos, cos, num_rotated, qk_norm, epsilon)
    query, key = rotated[:, : spec.num_heads].clone(), rotated[:, spec.num_heads :].clone()
    ops.rotate_heads_backward(query, key, key, cos, cos, heads, qk_norm, epsilon)
    targets = torch.zeros(_ROWS, dtype=torch.int64, device="cuda")
    cross_entropy_in_place(zeros(_ROWS, spec.vocab_size), targets, torch.zeros(_ROWS, device="cuda"))
    masks = DropoutMasks(torch.ones(_ROWS, dtype=torch.int32, device="cuda"), 0.1)
    masks.add_applied(0, "q_proj", x, masks.apply(0, "q_proj", x))
    torch.cuda.synchronize()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.nice(10)
    run_all(msgspec.json.decode(sys.argv[2], type=_Request))
