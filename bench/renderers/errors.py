"""How far predictions are off, of the committed results, beside what was aimed at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cotenant.bench.comparison import REFERENCE, SUBJECT, pooled_errors
from renderers.target import Measured, Target
from renderers.text import Result, beside

_EARLY_S = 2.0  # of a cell
_ERRORS = "errors of prediction"
_NOTHING_TRAINS = "where nothing trains, in the grid"
_MEANS = "As where the p95 is missed in cells, below."
_ABOVE_TENTH = "In the cells above it {least:.0%} to {most:.0%} of the batches are, of {num} or more. "
_SHARED_ABOVE = (
    "Above it: {place}, where {share:.1%} of the {num} batches with training are. Of its {worst} worst {late} took "
    "longer than expected, and {spatial} were steps in a partition. More of them to learn from."
)
_WORST = (
    "Of the ten worst of each cell of the runs after the grid again {last[num]} are more than 10% off, {last[decodes]} "
    "of them decode steps, where it was {before[decodes]} of {before[num]} in the grid again, whose version took steps "
    "behind tasklets for steps alone, too. Of the {last[prompts]} with prompts {last[late]} have a chunk behind "
    "earlier ones of the same prompt and took longer than expected, {last[early]} of them in the first {within:g} "
    "seconds of a cell. Nor is it what the model has forgotten: on average it errs on prompts about as much as [the "
    "best line](#on-a-gpu-iterations-replayed) of the same features that is fitted to the very same batches "
    "afterwards. "
    "Clocks differ from run to run at the power limit. Since the newest grid one batch tells of the next, and steps "
    "alone are told from those behind tasklets by more than a constant: "
    "[replayed](#on-a-gpu-iterations-replayed-by-the-version-that-ran-and-a-later-one), p95 is 10.5% at most in four "
    "cells, which was 11.9."
)


def prediction_rows(grid: Result, runs: Sequence[tuple[str, Result]]) -> Iterator[Target]:
    """Where nothing trains, as in the grid, and beside a job as in each of ``runs``, by their names, the newest last:
    in those of their places that are in the grid, where serving alone is in time."""
    counted = {spot(cell) for cell in grid["cells"] if cell["policy"] == SUBJECT}
    serving = [cell for cell in grid["cells"] if cell["policy"] == REFERENCE]
    shared = [
        (where, [cell for cell in run["cells"] if cell["policy"] == SUBJECT and spot(cell) in counted])
        for where, run in runs
    ]
    why = _why_above(shared)
    alone = [(_NOTHING_TRAINS, serving), *shared]
    yield Target(_ERRORS, "mean 3% alone", [_mean(where, cells, "alone", 0.03) for where, cells in alone])
    yield Target(_ERRORS, "mean 5% with training", [_mean(where, cells, "co_run", 0.05) for where, cells in shared])
    aim = "p95 10%, of all batches (read so later): at most 5% above"
    yield Target(_ERRORS, aim, [_share_above(where, cells, why) for where, cells in shared])
    versions = [_p95_of_cells(where, cells, "alone", why) for where, cells in alone]
    yield Target(_ERRORS, "p95 10% alone, in each cell", versions)
    versions = [_p95_of_cells(*each, "co_run", " ".join(filter(None, map(_shared_above, each[1])))) for each in shared]
    yield Target(_ERRORS, "p95 10% with training, in each cell", versions)


def _mean(where: str, cells: Sequence[Result], kind: str, limit: float) -> Measured:
    mean = pooled_errors(cells[0]["policy"], cells)[kind]["mean"]
    most = max(each["mean"] for each in _errors(cells, kind))
    return Measured(f"{beside(mean, limit)} (in cells up to {most:.1%})", mean <= limit, _MEANS, where)


def _share_above(where: str, cells: Sequence[Result], why: str) -> Measured:
    pooled = pooled_errors(SUBJECT, cells)
    alone, shared = (pooled[kind]["share_above_10_percent"] for kind in ("alone", "co_run"))
    return Measured(f"{alone:.1%} of those alone, {shared:.1%} with training", max(alone, shared) <= 0.05, why, where)


def _p95_of_cells(where: str, cells: Sequence[Result], kind: str, why: str) -> Measured:
    errors = _errors(cells, kind)
    p95s, least = [each["p95"] for each in errors], min(each["iterations"] for each in errors)
    num_met = sum(p95 <= 0.1 for p95 in p95s)
    text = f"{num_met} of {len(p95s)} cells of {least} batches or more, {max(p95s):.1%} at most"
    return Measured(text, num_met == len(p95s), why, where)


def _errors(cells: Sequence[Result], kind: str) -> list[Result]:
    return [each for cell in cells if (each := cell["prediction_error"][kind])]


def _shared_above(cell: Result) -> str:
    """Why what is predicted with training is above the tenth in this cell; "" if it is not."""
    errors = cell["prediction_error"]["co_run"]
    if not errors or errors["p95"] <= 0.1:
        return ""
    worst = errors["farthest_off"]
    return _SHARED_ABOVE.format(
        place=place_text(cell),
        share=errors["share_above_10_percent"],
        num=errors["iterations"],
        worst=len(worst),
        late=sum(each["deviation"] < 0 for each in worst),
        spatial=sum(each["mode"] == "spatial" for each in worst),
    )


def _why_above(runs: Sequence[tuple[str, Sequence[Result]]]) -> str:
    """Why what is predicted alone is above the tenth in cells."""
    by_run = [cells for _, cells in runs]
    above = _errors([cell for cells in by_run for cell in cells if _p95_alone(cell) > 0.1], "alone")
    if not above:
        return ""
    shares, num = [each["share_above_10_percent"] for each in above], min(each["iterations"] for each in above)
    _, before, *later = by_run
    last = _worst([cell for cells in later for cell in cells])
    text = _ABOVE_TENTH.format(least=min(shares), most=max(shares), num=num)
    return text + _WORST.format(last=last, before=_worst(before), within=_EARLY_S)


def _worst(cells: Sequence[Result]) -> dict[str, int]:
    """Of the worst batches alone, as far as they are kept. ``late``: with a chunk behind earlier ones of its prompt."""
    worst = [at for errors in _errors(cells, "alone") for at in errors["farthest_off"] if abs(at["deviation"]) > 0.1]
    prompts = [at for at in worst if "prefill_tokens" in at]
    late = [at for at in prompts if at["deviation"] < 0 and at["prefill_context_tokens"] > at["prefill_tokens"]]
    early = sum(at["at_s"] <= _EARLY_S for at in late)
    decodes = len(worst) - len(prompts)
    return {"num": len(worst), "decodes": decodes, "prompts": len(prompts), "late": len(late), "early": early}


def _p95_alone(cell: Result) -> float:
    """0 where no batch had the device alone."""
    return float((cell["prediction_error"]["alone"] or {"p95": 0.0})["p95"])


def spot(cell: Result) -> tuple[str, float, float]:
    """Its place, however many runs were made there."""
    return cell["trace"], cell["time_scale"], cell["slo"]["tpot_ms"]


def place_text(cell: Result) -> str:
    return "{} x {:g} at {:g} ms".format(*spot(cell))
