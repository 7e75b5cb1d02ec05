"""What `cotenant bench colocate` has measured as it stands in the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from cotenant.bench.summary import distribution, error_figures, percentiles

if TYPE_CHECKING:
    from cotenant.runtime.colocate_cell import Cell, Errors, Predicted

MIN_VALUES_FOR_P99 = 100


def cell_figures(load: dict[str, Any], cell: Cell, alone_tokens_per_s: float) -> dict[str, Any]:
    """One cell. ``cdf`` has each latency's 101 percentiles; None stands where nothing was measured, and for a p99 of
    fewer than 100 values. ``harvest_of_runs``, ``attainment_of_runs``: in turn, where there were several."""
    harvests = [round(speed / alone_tokens_per_s, 4) for speed in cell.trained_in_runs]
    attainments = [round(share, 6) for share in cell.attained_in_runs]
    latencies = {"ttft_ms": cell.ttft_ms, "tpot_ms": cell.tpot_ms, "itl_ms": cell.itl_ms}
    return {
        **load,
        "policy": cell.policy,
        "slo": {"ttft_ms": cell.slo.ttft_ms, "tpot_ms": cell.slo.tpot_ms},
        "duration_s": round(cell.duration_s, 3),
        "num_requests": cell.num_requests,
        "num_failed": cell.num_failed,
        "attainment": round(cell.num_attained / cell.num_requests, 6) if cell.num_requests else None,
        **({"attainment_of_runs": attainments} if attainments else {}),
        **{name: _distribution(values) for name, values in latencies.items()},
        "cdf": {name: percentiles(values) or None for name, values in latencies.items()},
        "output_tokens_per_s": round(cell.output_tokens_per_s, 2),
        "train_tokens_per_s": round(cell.train_tokens_per_s, 2),
        "harvest": round(cell.train_tokens_per_s / alone_tokens_per_s, 4),
        **({"harvest_of_runs": harvests} if harvests else {}),
        "iterations": cell.modes,
        "prediction_error": {name: _errors(errors) for name, errors in cell.errors.items()},
        "utilisation": cell.utilisation,
        "device_time": cell.device_time,
        "timeline": cell.timeline,
    }


def _errors(errors: Errors) -> dict[str, Any] | None:
    if not errors.ratios:
        return None
    return {
        **error_figures(errors.ratios),
        "farthest_off": [_predicted_figures(each) for each in errors.worst()],
    }


def _predicted_figures(predicted: Predicted) -> dict[str, Any]:
    """An iteration in a few fields; ``run``: where there were several; ``behind_tasklets``: where it is so. Of a
    batch's those that are not 0."""
    record = predicted.record
    batch = msgspec.structs.asdict(record.batch)
    return {
        "deviation": round(predicted.deviation_ratio, 4),
        **({} if predicted.run is None else {"run": predicted.run}),
        "at_s": round(predicted.at_s, 3),
        "apart_ms": round(predicted.apart_ms, 3),
        "online_ms": round(record.online_ms, 3),
        "mode": record.mode.value,
        "num_tasklets": record.num_tasklets,
        **({"behind_tasklets": True} if record.behind_tasklets else {}),
        **{name: value for name, value in batch.items() if value},
    }


def _distribution(values: Sequence[float]) -> dict[str, float | None] | None:
    if not values:
        return None
    figures: dict[str, float | None] = {**distribution(values)}
    if len(values) < MIN_VALUES_FOR_P99:
        figures["p99"] = None
    return figures
