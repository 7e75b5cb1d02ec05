"""Compiles the kernels that training adds to serving's, by running each of them once on a few rows:
`python -m cotenant.models.kernels.precompile JSON`.

Triton keeps what it compiles on disk. Compiled by the process that serves, at a job's first step, they would keep
requests waiting for seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import torch

from cotenant.models import elementwise_ops as ops
from cotenant.models.spec import ModelSpec

# As frames have them: a multiple of this.
_ROWS = 128


class _Request(msgspec.Struct):
    spec: ModelSpec
    dtype: str


class TrainingKernels:
    """Begins to compile on a process of its own, which gives way to others."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        request = _Request(spec, str(dtype).removeprefix("torch."))
        command = [sys.executable, "-m", "cotenant.models.kernels.precompile", msgspec.json.encode(request).decode()]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    @property
    def ready(self) -> bool:
        """Whether it has ended. If it has failed, kernels are compiled where they are first used, as without it."""
        return self._process.poll() is not None


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
    from cotenant.models.kernels.cross_entropy import cross_entropy_in_place

    targets = torch.zeros(_ROWS, dtype=torch.int64, device="cuda")
    cross_entropy_in_place(zeros(_ROWS, spec.vocab_size), targets, torch.zeros(_ROWS, device="cuda"))
    torch.cuda.synchronize()


if __name__ == "__main__":
    os.nice(10)
    run_all(msgspec.json.decode(sys.argv[1], type=_Request))
