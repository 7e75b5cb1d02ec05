"""An engine whose batches are launched ahead, and layers that ran elsewhere."""

from __future__ import annotations

import torch

from cotenant.device.readback import Interval
from cotenant.engine import flight


def ran(hidden: torch.Tensor) -> flight.RanLayers:
    interval = Interval(hidden.device)
    interval.begin()
    return flight.RanLayers(hidden, interval)


def run_ahead(engine, requests, arrive) -> dict[str, list]:
    """Launch each batch before the one before it is collected. ``arrive`` [requests]: in which iteration each comes."""
    outputs = {request.request_id: [] for request in requests}
    iteration = 0
    while engine.has_work or iteration <= max(arrive):
        for request, when in zip(requests, arrive, strict=True):
            if when == iteration:
                engine.add(request)
        for output in engine.iterate(num_ahead=1).outputs:
            outputs[output.request_id].append(output)
        engine.check_integrity()
        iteration += 1
    return outputs
