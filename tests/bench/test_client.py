"""What the tools read of `/metrics`."""

from __future__ import annotations

import asyncio

import httpx

from cotenant.bench.client import metrics

TEXT = """# TYPE cotenant:iterations counter
cotenant:iterations_total{mode="none",model_name="tiny"} 3.0
cotenant:iterations_total{model_name="a mode=\\"x\\"",mode="fused"} 4.0
cotenant:trained_tokens_total{model_name="tiny"} 7.0
up 1
"""


def read(label: str | None = None) -> dict[str, float]:
    async def ask() -> dict[str, float]:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text=TEXT))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await metrics(client, label)

    return asyncio.run(ask())


def test_samples_are_summed_over_labels() -> None:
    assert read() == {"cotenant:iterations_total": 7.0, "cotenant:trained_tokens_total": 7.0, "up": 1.0}


def test_or_told_apart_by_one_of_them() -> None:
    assert read("mode") == {"cotenant:iterations_total none": 3.0, "cotenant:iterations_total fused": 4.0}
