"""What keeps training from the speed that it has alone, from the figures of `cotenant bench colocate`: the profile of
a place. All are shares of a cell's time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cotenant.bench.comparison import REFERENCE, by_place

# Of ``losses``, in this order. "while shared": the time of batches beside or with which training ran, less what of
# its work came through meanwhile. "slower": what tasklets with no batch beside them took beyond their time without
# requests. "rest": neither batches nor tasklets had the device.
LOSSES = ("prompts", "decode alone", "while shared", "slower", "rest")
HEADER = (
    "harvest",
    *LOSSES,
    "harvest if decode cost nothing",
    "prompts alone at these clocks",
    "a decode step costs, ms",
    "takes alone",
)
NOTE = (
    "What keeps training from the speed that it has alone, as shares of the time: batches with prompts; decode steps "
    "alone; steps that training shared, less the training that came through meanwhile; tasklets that took longer than "
    "without requests; the rest, when the device had neither. Then the most that is left where nothing runs beside "
    "prompts: all but the time that they take under inference-only, in the largest chunks that fit; and that time, had "
    "the SMs had the clocks there that they have here, by which products of prompts are bound. Last, what a decode "
    "step costs training, of its time alone and while shared, and what one takes under inference-only."
)

Cell = Mapping[str, Any]


def losses(cell: Cell) -> dict[str, float] | None:
    """By the names of ``LOSSES``; with the harvest they add up to 1. None: the device's time was not measured, or
    nothing was trained."""
    time = cell.get("device_time")
    if time is None or not cell["harvest"]:
        return None
    shared = time["prompts_shared"] + time["decode_shared"]
    values = (
        time["prompts_alone"],
        time["decode_alone"],
        shared - (cell["harvest"] - time["training_work"]),
        time["training_alone"] - time["training_work"],
        time["rest"],
    )
    return dict(zip(LOSSES, values, strict=True))


def bound(alone: Cell | None) -> float | None:
    """Harvest if nothing were lost at a place but the time of batches with prompts under ``inference-only``, which
    takes them in the largest chunks; ``alone``: its cell, None if there is none. No bound for a policy that trains
    beside them."""
    return None if alone is None else 1 - alone["device_time"]["prompts_alone"]


def prompts_at_its_clocks(cell: Cell, alone: Cell | None) -> float | None:
    """What batches with prompts take in ``alone``, under ``inference-only``, had the SMs had the clocks there that they
    have in this cell of the same place. None: the one or the other was not measured."""
    here, there = _clock_mhz(cell), _clock_mhz(alone)
    if alone is None or here is None or there is None:
        return None
    return float(alone["device_time"]["prompts_alone"] * there / here)


def _clock_mhz(cell: Cell | None) -> float | None:
    utilisation = None if cell is None else cell.get("utilisation")
    return None if utilisation is None else utilisation.get("sm_clock_mhz")


def step_cost_ms(cell: Cell) -> float | None:
    """Of training's time alone, what a decode step costs it. None where that is not to be told: batches with prompts
    are shared as well, nothing was trained, or nothing decoded."""
    lost, time = losses(cell), cell.get("device_time")
    if lost is None or time is None or time["prompts_shared"] or not time.get("decode_steps_per_s"):
        return None
    return float((lost["decode alone"] + lost["while shared"]) * 1e3 / time["decode_steps_per_s"])


def loss_rows(cells: Sequence[Cell]) -> list[tuple[Cell, list[str]]]:
    """Cells that say where their time went, place by place, each with what stands under ``HEADER`` from the harvest
    on."""
    rows = []
    for place in by_place(cells):
        alone = next((each for each in place if each["policy"] == REFERENCE and each.get("device_time")), None)
        step_ms = None if alone is None else alone["device_time"].get("decode_step_ms") or None
        for cell in place:
            lost = losses(cell)
            if lost is not None:
                shares = [cell["harvest"], *lost.values(), bound(alone), prompts_at_its_clocks(cell, alone)]
                times = [step_cost_ms(cell), step_ms]
                texts = ["-" if share is None else f"{share:.1%}".replace("-0.0%", "0.0%") for share in shares]
                rows.append((cell, [*texts, *("-" if time_ms is None else f"{time_ms:.1f}" for time_ms in times)]))
    return rows
