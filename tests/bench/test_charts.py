"""Charts say what they were given, inside their frames."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from cotenant.bench.charts import HEIGHT, WIDTH, Marker, Series, area_chart, line_chart, style


def corners(element: ElementTree.Element) -> list[tuple[float, float]]:
    pairs = (point.split(",") for point in element.attrib["points"].split())
    return [(float(x), float(y)) for x, y in pairs]


def test_a_logarithmic_axis_has_equal_ratios_at_equal_distances() -> None:
    line = Series("latency", [(1.0, 0.0), (10.0, 50.0), (100.0, 100.0)])
    root = ElementTree.fromstring(line_chart("t", "ms", "%", [line], log_x=True))
    (polyline,) = root.iter("polyline")
    (first, _), (second, _), (third, _) = corners(polyline)
    assert second - first == pytest.approx(third - second, abs=0.11)
    texts = [element.text for element in root.iter("text")]
    assert {"1", "10", "100"} <= set(texts)


def test_marks_are_filled_or_hollow_and_a_gap_breaks_the_line() -> None:
    points = [(1.0, 5.0), (2.0, 6.0), (3.0, math.nan), (4.0, 6.0)]
    broken = ElementTree.fromstring(line_chart("t", "s", "ms", [Series("steps", points)]))
    assert [len(corners(line)) for line in broken.iter("polyline")] == [2, 2], "the second is a dot"
    marked = ElementTree.fromstring(line_chart("t", "x", "y", [Series("p", points[:2], style(0), [True, False])]))
    hollow = [mark.get("class") == "hollow" for mark in marked.iter("circle") if float(mark.attrib["cy"]) > 6]
    assert hollow == [False, True]


def test_a_level_is_drawn_although_all_values_are_below_it() -> None:
    marker = Marker(40.0, "target <b>", level=True)
    root = ElementTree.fromstring(line_chart("t", "s", "ms", [Series("steps", [(0.0, 2.0), (1.0, 3.0)])], [marker]))
    (line,) = (line for line in root.iter("line") if line.get("class") == "marker")
    assert line.attrib["y1"] == line.attrib["y2"]
    assert 0 < float(line.attrib["y1"]) < HEIGHT / 2
    assert "target <b>" in [element.text for element in root.iter("text")]


def test_areas_lie_on_one_another_and_end_at_the_top() -> None:
    series = [Series("requests", [(1.0, 60.0), (2.0, 20.0)]), Series("training", [(1.0, 60.0), (2.0, 50.0)])]
    root = ElementTree.fromstring(area_chart("t", "s", "%", series, 100.0))
    lower, upper = (corners(polygon) for polygon in root.iter("polygon"))
    assert lower[:2] == upper[:1:-1], "the lower one's upper edge is the upper one's lower edge"
    assert upper[0][1] == 14.0, "60 + 60 is cut off at 100"
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in lower + upper)


def test_the_first_styles_differ_all() -> None:
    assert len({style(index) for index in range(21)}) == 21
    assert len({style(index).color for index in range(7)}) == 7
