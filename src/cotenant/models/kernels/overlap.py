"""Kernels that begin while the one before them ends (programmatic dependent launch, Hopper and later).

A decode step is a chain of some 200 short kernels. Without this each of them pays for its start and for its first
loads while the memory bus is idle. With it a kernel's programs are started as soon as those of the kernel before allow
it and there is room for them. They load what no kernel of the chain writes (norms' weights, tables, most of the
adapters), or those did that ran before the chain began (which rows have which adapter), and then wait until the kernel
before is done.

A kernel takes part by ``start_next`` and by ``wait_for_previous``, the latter before its first access to anything that
a kernel writes. In each kernel at least one program waits: so a kernel that is done means that all before it are.
``overlap`` gives the arguments of the launch; launched otherwise, a kernel waits for everything before it, as usual.

Where ``start_next`` stands matters: the programs that it lets in take room from those of the kernel's own that are not
there yet.

The attention of decode steps (decode_attention.cu) is a link of the same chain.
"""

from __future__ import annotations

from functools import cache
from typing import TypedDict

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


class Overlap(TypedDict):
    """Keyword arguments of a launch: the kernel's constant, and Triton's option."""

    OVERLAP: bool
    launch_pdl: bool


@cache
def overlap(device: torch.device, begins_early: bool = True) -> Overlap:
    """For launches on ``device``. ``begins_early``: this kernel begins before the one before it has ended; that costs
    time where the one before is not of this kind."""
    able = torch.cuda.get_device_capability(device)[0] >= 9
    return Overlap(OVERLAP=able and begins_early, launch_pdl=able and begins_early)


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    """Let the next kernel begin once all programs of this one have come here or ended."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Wait until the kernel before is done and what it wrote can be read."""
    if OVERLAP:
        gdc_wait()
