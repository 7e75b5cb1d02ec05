"""What the server's metrics say."""

from __future__ import annotations

from cotenant.api.metrics import Metrics


def figures(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in metrics.render({}, {}).decode().splitlines() if not line.startswith("#")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
