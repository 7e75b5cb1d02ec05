"""What `cotenant bench colocate` is asked for, read from the command line's lists."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cotenant.bench.comparison import REFERENCE
from cotenant.config import POLICIES, require_target
from cotenant.core.errors import InvalidInputError
from cotenant.core.plan import Slo


@dataclass(frozen=True, slots=True)
class Usual:
    """What is measured where the flags do not say it, as they have it. ``slo_tpot_ms`` None: what a server without
    targets would aim at. ``seq_len`` None: as for `cotenant bench finetune`. ``tokens_per_step``: at most."""

    policies: str
    slo_tpot_ms: str | None
    batch_sizes: str
    seq_len: int | None
    tokens_per_step: int


ON_CUDA = Usual(
    policies="adaptive,multitask,llmstation,harli,static,chunked,fineinfer,lifecycle,inference-only",
    slo_tpot_ms="10,15,25,40",
    batch_sizes="32",
    seq_len=None,
    tokens_per_step=4096,
)
# Where a tasklet of few tokens takes as long as a decode step.
ON_CPU = Usual(
    policies="adaptive,multitask,inference-only",
    slo_tpot_ms=None,
    batch_sizes="4",
    seq_len=64,
    tokens_per_step=512,
)


def usual_on(device: str) -> Usual:
    """``device`` as for `--device`."""
    from cotenant.runtime.build import runs_on_cuda  # not above: it imports torch

    return ON_CUDA if runs_on_cuda(device) else ON_CPU


def default(name: str) -> str:
    """A sentence of `--help`."""
    on_cuda, on_cpu = (getattr(usual, name) for usual in (ON_CUDA, ON_CPU))
    return f"Default: {on_cuda}; on a CPU {on_cpu}."


def targets_of(text: str) -> list[float]:
    """TPOT targets in ms, each once. Raises InvalidInputError."""
    found = list(dict.fromkeys(positive(part, "slo-tpot-ms") for part in text.split(",")))
    for tpot_ms in found:
        require_target(tpot_ms, "slo-tpot-ms")
    return found


def measured_target(slo: Slo) -> float:
    """The TPOT target in ms of a server without any, as it is told."""
    return float(f"{slo.tpot_ms:.3g}")


def targets_in(report: dict[str, Any] | None) -> list[float]:
    """TPOT targets in ms that the cells of a report have."""
    return list(dict.fromkeys(cell["slo"]["tpot_ms"] for cell in (report or {"cells": []})["cells"]))


def policies_of(text: str, *, skip_hopeless: bool) -> list[str]:
    """Their names, in the order in which they are measured. Raises InvalidInputError."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InvalidInputError("--policies: which are to be measured?", param="policies")
    for name in names:
        if name not in POLICIES:
            raise InvalidInputError(
                f"--policies: each must be one of {', '.join(POLICIES)}, not {name!r}", param="policies"
            )
    if skip_hopeless and REFERENCE not in names:
        raise InvalidInputError(f"--skip-hopeless: --policies must have {REFERENCE}", param="skip-hopeless")
    return sorted(names, key=lambda name: name != REFERENCE) if skip_hopeless else names


def positive(text: str, flag: str) -> float:
    """One of a list. Raises InvalidInputError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidInputError(f"--{flag}: expected numbers above 0, like 10,40, got {text.strip()!r}", param=flag)
    return value


def sizes_of(text: str) -> list[int]:
    """Batch sizes; none where the text is empty. Raises InvalidInputError."""
    return [_whole(part, "batch-sizes") for part in text.split(",") if part.strip()]


def _whole(text: str, flag: str) -> int:
    """As ``positive``."""
    value = positive(text, flag)
    if not value.is_integer():
        raise InvalidInputError(f"--{flag}: expected whole numbers, got {text.strip()!r}", param=flag)
    return int(value)
