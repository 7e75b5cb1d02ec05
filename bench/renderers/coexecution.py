"""Tables of a job beside a load."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.bench import board_power
from cotenant.bench.colocate_text import attainment_text, comparison_lines, harvest_text, place_name
from cotenant.bench.comparison import SUBJECT, is_at, place_key
from cotenant.bench.device_losses import HEADER, NOTE, loss_rows
from renderers.text import Result, machine_text, pair, table


def colocate(results: Sequence[Result]) -> list[str]:
    """One row for each load, target and policy, the best harvest among those that held 99% in bold; then what the
    comparison says, if the result has one, and where the device's time went, if it was measured."""
    parts = []
    for result in results:
        training = result["training"]
        runs = dict.fromkeys(run["command"] for run in result.get("runs") or [result])
        commands = ", ".join(f"`{command}`" for command in runs)
        parts.append(
            f"{commands}: {result['model']}, {result['dtype']}, on {machine_text(result)}. Training alone: "
            f"{result['train_alone_tokens_per_s']:,.0f} tokens/s (sequences of {training['seq_len']:,}, "
            f"{training['tokens_per_step']:,} tokens a step, rank {training['r']})."
        )
        header = ("load", "TPOT target, ms", "policy", "harvest", "attainment", "TTFT p50 / p99, ms", "TPOT", "ITL",
                  "prediction error (p95) alone, with training")  # fmt: skip
        parts.append(table(header, [_row(cell, result["cells"]) for cell in result["cells"]]))
        if "comparison" in result:
            parts.append("\n".join(f"- {line}" for line in comparison_lines(result["comparison"])))
        parts += _losses(result)
        header, power = board_power.power_table(result)
        if power:
            parts += [board_power.NOTE, table(header, power)]
    return parts


def _losses(result: Result) -> list[str]:
    """Of ``adaptive`` and, where the comparison names one, of the best other policy at each place."""
    places = result.get("comparison", {}).get("places", ())
    rows = [
        [place_name(cell), f"`{cell['policy']}`", *shares]
        for cell, shares in loss_rows(result["cells"])
        if cell["policy"] in (SUBJECT, *(place["best_other"] for place in places if is_at(cell, place["place"])))
    ]
    return [NOTE, table(("place", "policy", *HEADER), rows)] if rows else []


def _row(cell: Result, cells: Sequence[Result]) -> list[str]:
    others = [other for other in cells if _held(other) and place_key(other) == place_key(cell)]
    best = max((other["harvest"] for other in others), default=None)
    harvest = harvest_text(cell)
    return [
        _load(cell),
        f"{cell['slo']['tpot_ms']:g}",
        f"`{cell['policy']}`",
        f"**{harvest}**" if _held(cell) and cell["harvest"] == best else harvest,
        "-" if cell["attainment"] is None else f"{attainment_text(cell)} of {cell['num_requests']}",
        *(_pair(cell[name]) for name in ("ttft_ms", "tpot_ms", "itl_ms")),
        _errors(cell["prediction_error"]),
    ]


def _errors(errors: Result) -> str:
    """Their means, and what one in twenty exceeds."""
    return ", ".join("-" if each is None else f"{each['mean']:.1%} ({each['p95']:.1%})" for each in errors.values())


def _held(cell: Result) -> bool:
    return bool(cell["attainment"] is not None and cell["attainment"] >= 0.99)


def _load(cell: Result) -> str:
    if cell["load"] == "steady":
        return f"{cell['batch_size']} sequences of about {cell['context']:,}"
    num_runs = len(cell.get("harvest_of_runs", ())) or 1
    runs = f"{num_runs} runs of " if num_runs > 1 else ""
    seconds = f"{runs}{cell['duration_s'] / num_runs:.0f} s"
    return f"{cell.get('trace') or cell['format']} trace, {cell['time_scale']:g} x, {seconds}"


def _pair(figures: Result | None) -> str:
    return "-" if figures is None else pair(figures["p50"], figures["p99"])
