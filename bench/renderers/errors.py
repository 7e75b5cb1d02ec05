"""How far predictions are off, of the committed results, beside what was aimed at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cotenant.bench.comparison import REFERENCE, SUBJECT, pooled_errors
from renderers.planning import Target
from renderers.text import Result

_EARLY_S = 2.0  # of a cell
_ERRORS = (
    "errors of prediction beside a job, by versions in turn: [over the "
    "grid](#on-a-gpu-errors-of-prediction-over-the-grid), [in the grid "
    "again](#on-a-gpu-the-grid-again-llmstation-in-partitions), [by later "
    "ones](#on-a-gpu-half-of-the-grid-by-a-later-version), and [beside training between "
    "requests](#on-a-gpu-the-grids-places-beside-training-between-requests)"
)
_MEANS = "As where the p95 is missed in cells, below."
_ABOVE_TENTH = "In the cells above it {least:.0%} to {most:.0%} of the batches are, of {num} or more. "
_NEWEST_ABOVE = "As in the runs above."
_SHARED_ABOVE = (
    "Above it: {place}, where {share:.1%} of the {num} batches with training are. Of its {worst} worst {late} took "
    "longer than expected, and {spatial} were steps in a partition. More of them to learn from."
)
_WORST = (
    "Of the ten worst of each cell of the last two runs {last[num]} are more than 10% off, {last[decodes]} of them "
    "decode steps, where it was {before[decodes]} of {before[num]} in the grid again, whose version took steps behind "
    "tasklets for steps alone, too. Of the {last[prompts]} with prompts {last[late]} have a chunk behind earlier ones "
    "of the same prompt and took longer than expected, {last[early]} of them in the first {within:g} seconds of a "
    "cell. Nor is it what the model has forgotten: on average it errs on prompts about as much as [the best "
    "line](#on-a-gpu-iterations-replayed) of the same features that is fitted to the very same batches afterwards. "
    "Perhaps the clocks, which at the power limit are not the same for each: if they were read, or more watts."
)


def prediction_rows(grid: Result, *runs: Result) -> Iterator[Target]:
    """Serving alone as in the grid, beside a job as in each of ``runs``, in those of its places that are in the grid:
    where serving alone is in time. A target is met where all of them meet it."""
    counted = {spot(cell) for cell in grid["cells"] if cell["policy"] == SUBJECT}
    beside = [[c for c in run["cells"] if c["policy"] == SUBJECT and spot(c) in counted] for run in runs]
    serving = [each for c in grid["cells"] if c["policy"] == REFERENCE and (each := c["prediction_error"]["alone"])]
    _, again, *later = beside
    before, last = _worst(again), _worst([cell for cells in later for cell in cells])
    worst = _WORST.format(last=last, before=before, within=_EARLY_S)
    pooled = [pooled_errors(SUBJECT, cells) for cells in beside]
    served = grid["comparison"]["prediction"][REFERENCE]["alone"]["mean"]
    for kind, what, limit, rest in (
        ("alone", "alone", 0.03, f"; where nothing trains, in the grid, {served:.1%}"),
        ("co_run", "with training", 0.05, ""),
    ):
        means = [each[kind]["mean"] for each in pooled]
        most = [max(each["mean"] for each in _errors(cells, kind)) for cells in beside]
        text = (
            ", ".join(f"{mean:.1%} (in cells up to {most:.1%})" for mean, most in zip(means, most, strict=True)) + rest
        )
        yield _ERRORS, f"mean {limit:.0%} {what}", text, max(means) <= limit, _MEANS
    kinds = ("alone", "co_run")
    shares = [[each[kind]["share_above_10_percent"] for each in pooled] for kind in kinds]
    alone, shared = (", ".join(f"{share:.1%}" for share in each) for each in shares)
    text = f"{alone} of those alone are above 10%, {shared} of those with training"
    is_met = max(max(each) for each in shares) <= 0.05
    yield _ERRORS, "p95 10%, of all batches (read so later): at most 5% above", text, is_met, worst
    most = [max(each["p95"] for each in _errors(cells, "co_run")) for cells in beside]
    text = ", ".join(f"{p95:.1%}" for p95 in most) + " at most"
    why = " ".join(_shared_above(cell) for cells in beside for cell in cells)
    yield _ERRORS, "p95 10% with training, in each cell", text, max(most) <= 0.1, why.strip()
    each = "; ".join(_p95_text(_errors(cells, "alone")) for cells in beside)
    text = f"{each}; where nothing trains, in the grid, {_p95_text(serving)}"
    above = [cell for cells in beside for cell in cells if _p95_alone(cell) > 0.1]
    is_met = not above and all(each["p95"] <= 0.1 for each in serving)
    yield _ERRORS, "p95 10% alone, in each cell", text, is_met, _why_above(above) + worst if above else ""


def newest_rows(name: str, run: Result) -> Iterator[Target]:
    """Beside a job, in all places of a run."""
    cells, pooled = [c for c in run["cells"] if c["policy"] == SUBJECT], pooled_errors(SUBJECT, run["cells"])
    for kind, what, limit in (("alone", "alone", 0.03), ("co_run", "with training", 0.05)):
        errors, mean = _errors(cells, kind), pooled[kind]["mean"]
        text = f"{mean:.1%} (in cells up to {max(each['mean'] for each in errors):.1%})"
        yield name, f"mean {limit:.0%} {what}", text, mean <= limit, _MEANS
        is_met = all(each["p95"] <= 0.1 for each in errors)
        yield name, f"p95 10% {what}, in each cell", _p95_text(errors), is_met, _NEWEST_ABOVE


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


def _why_above(above: Sequence[Result]) -> str:
    errors = _errors(above, "alone")
    shares = [each["share_above_10_percent"] for each in errors]
    return _ABOVE_TENTH.format(least=min(shares), most=max(shares), num=min(each["iterations"] for each in errors))


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


def _p95_text(cells: Sequence[Result]) -> str:
    p95s = [each["p95"] for each in cells]
    least = min(each["iterations"] for each in cells)
    return f"{sum(p95 <= 0.1 for p95 in p95s)} of {len(p95s)} cells of {least} batches or more, {max(p95s):.1%} at most"
