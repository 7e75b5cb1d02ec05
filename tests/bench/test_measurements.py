"""Figures that come out of a list of measured requests, and the arrivals that make it."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from xml.etree import ElementTree

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.bench.charts import Marker, Series, cumulative, line_chart
from cotenant.bench.load import arrival_times, send_chat
from cotenant.bench.summary import RequestResult, Targets, percentile, summarize


def result(ttft_ms: float, tpot_ms: float, error: str | None = None) -> RequestResult:
    return RequestResult(0.0, ttft_ms, tpot_ms, ttft_ms + 9 * tpot_ms, 10, error=error)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=60), st.integers(0, 100))
def test_percentiles_are_those_of_the_standard_library(values: list[float], share: int) -> None:
    expected = (
        min(values)
        if share == 0
        else max(values)
        if share == 100
        else statistics.quantiles(values, n=100, method="inclusive")[share - 1]
    )
    assert percentile(values, share) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (
            httpx.Response(503, json={"error": {"message": "come again"}}),
            'HTTP 503: {"error":{"message":"come again"}}',
        ),
        (httpx.Response(200, stream=httpx.ByteStream(b"data: {no json\n\n")), "DecodeError"),
        (httpx.ConnectError("refused"), "ConnectError: refused"),
    ],
)
def test_a_request_that_is_not_answered_is_one_that_failed(answer: httpx.Response | Exception, error: str) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def send() -> RequestResult:
        transport = httpx.MockTransport(handle)
        async with httpx.AsyncClient(base_url="http://server", transport=transport) as client:
            return await send_chat(client, "m", "hello", 4, 0.0, 0.0, 1)

    assert error in str(asyncio.run(send()).error)


def test_a_percentile_of_nothing_is_not_a_number() -> None:
    assert math.isnan(percentile([], 50))


def test_attainment_counts_both_targets_and_failures() -> None:
    results = [result(10, 2), result(60, 2), result(10, 9), result(10, 2, error="HTTP 503"), result(50, 5)]
    figures = summarize(results, Targets(50.0, 5.0), duration_s=2.0)
    assert figures["slo_attainment"] == 0.4
    assert (figures["num_requests"], figures["num_failed"]) == (5, 1)
    assert figures["output_tokens_per_s"] == 20.0
    assert figures["targets"] == {"ttft_ms": 50.0, "tpot_ms": 5.0}


def test_arrivals_are_a_poisson_process_that_the_seed_decides() -> None:
    times = arrival_times(20.0, 500.0, seed=3)
    assert times == arrival_times(20.0, 500.0, seed=3) != arrival_times(20.0, 500.0, seed=4)
    assert len(times) == pytest.approx(10_000, rel=0.05)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.pstdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05)


def test_charts_are_well_formed_and_inside_their_frame() -> None:
    svg = line_chart("A & B", "ms", "%", [Series("x <y>", cumulative([3.0, 1.0, 2.0]))], [Marker(2.5, "target")])
    root = ElementTree.fromstring(svg)
    points = [point for line in root.iter("polyline") for point in line.attrib["points"].split()]
    assert len(points) == 3
    for point in points:
        x, y = map(float, point.split(","))
        assert 0 <= x <= 460
        assert 0 <= y <= 240


def test_a_chart_of_nothing_says_so() -> None:
    assert "nothing was measured" in line_chart("t", "x", "y", [Series("empty", [])])
