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
HEADER = ("harvest", *LOSSES, "harvest if decode cost nothing")
NOTE = (
    "What keeps training from the speed that it has alone, as shares of the time: batches with prompts; decode steps "
    "alone; steps that training shared, less the training that came through meanwhile; tasklets that took longer than "
    "without requests; the rest, when the device had neither. The last column is the most that is left where nothing "
    "runs beside prompts: all but the time that they take under inference-only, in the largest chunks that fit."
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


def bound(place: Sequence[Cell]) -> float | None:
    """Harvest if nothing were lost at a place but the time of batches with prompts under ``inference-only``, which
    takes them in the largest chunks; None if that was not measured. No bound for a policy that trains beside them."""
    times = [cell.get("device_time") for cell in place if cell["policy"] == REFERENCE]
    return max((1 - time["prompts_alone"] for time in times if time is not None), default=None)


def loss_rows(cells: Sequence[Cell]) -> list[tuple[Cell, list[str]]]:
    """Cells that say where their time went, place by place, each with what stands under ``HEADER`` from the harvest
    on."""
    rows = []
    for place in by_place(cells):
        most = bound(place)
        for cell in place:
            lost = losses(cell)
            if lost is not None:
                shares = [cell["harvest"], *lost.values()]
                rows.append((cell, [*(f"{share:.1%}" for share in shares), "-" if most is None else f"{most:.1%}"]))
    return rows
