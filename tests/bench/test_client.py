"""What the tools read of `/metrics`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx

from cotenant.bench.client import metric_by, metrics

TEXT = """# TYPE cotenant:iterations counter
cotenant:iterations_total{mode="none",model_name="tiny"} 3.0
cotenant:iterations_total{model_name="a mode=\\"x\\"",mode="fused"} 4.0
cotenant:trained_tokens_total{model_name="tiny"} 7.0
up 1
"""


def read(ask: Callable[[httpx.AsyncClient], Awaitable[dict[str, float]]]) -> dict[str, float]:
    async def connected() -> dict[str, float]:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text=TEXT))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await ask(client)

    return asyncio.run(connected())


def test_samples_are_summed_over_labels() -> None:
    assert read(metrics) == {"cotenant:iterations_total": 7.0, "cotenant:trained_tokens_total": 7.0, "up": 1.0}


def test_or_those_of_a_metric_are_told_apart_by_one_label() -> None:
    name = "cotenant:iterations_total"
    assert read(lambda client: metric_by(client, name, "mode")) == {"none": 3.0, "fused": 4.0}
    assert read(lambda client: metric_by(client, name, "kind")) == {}
