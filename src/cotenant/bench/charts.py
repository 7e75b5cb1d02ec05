"""Small charts as inline SVG: no script, no network, readable in any browser and in print."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 460, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 14, 40
COLORS = ("#2f6fab", "#d9822b", "#3c8d5a", "#8c4fa8")


@dataclass(frozen=True, slots=True)
class Series:
    """A named line: points in the order they are joined."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Marker:
    """A vertical line with a label, for a target or an event."""

    x: float
    label: str


def cumulative(values: Sequence[float]) -> list[tuple[float, float]]:
    """Points of the empirical distribution: share of values at or below x, in percent."""
    ordered = sorted(values)
    return [(value, 100.0 * (index + 1) / len(ordered)) for index, value in enumerate(ordered)]


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    markers: Sequence[Marker] = (),
) -> str:
    """One chart as an SVG element with axes from zero, ticks and a legend. Empty series are left out."""
    drawn = [line for line in series if line.points]
    xs = [x for line in drawn for x, _ in line.points] + [marker.x for marker in markers]
    ys = [y for line in drawn for _, y in line.points]
    if not xs or not ys:
        return f"<figure><figcaption>{html.escape(title)}: nothing was measured</figcaption></figure>"
    x_axis = _Axis(0.0, max(xs) * 1.02 or 1.0, _LEFT, WIDTH - _RIGHT)
    y_axis = _Axis(0.0, max(ys) * 1.02 or 1.0, HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(x_axis, y_axis, x_label, y_label)]
    for marker in markers:
        x = x_axis.at(marker.x)
        parts.append(f'<line class="marker" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{x - 4:.1f}" y="{_TOP + 10}" text-anchor="end">{html.escape(marker.label)}</text>')
    for index, line in enumerate(drawn):
        path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLORS[index]}" stroke-width="1.8"/>')
    legend = " ".join(
        f'<span><i style="background:{COLORS[index]}"></i>{html.escape(line.name)}</span>'
        for index, line in enumerate(drawn)
    )
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">{"".join(parts)}</svg>'
        f'<div class="legend">{legend}</div></figure>'
    )


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    start_px: float
    end_px: float

    def at(self, value: float) -> float:
        span = (self.high - self.low) or 1.0
        return self.start_px + (value - self.low) / span * (self.end_px - self.start_px)

    def ticks(self) -> list[float]:
        """Multiples of 1, 2 or 5 times a power of ten, about five of them."""
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
        return [number * step for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _grid(x_axis: _Axis, y_axis: _Axis, x_label: str, y_label: str) -> list[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts: list[str] = []
    for value in y_axis.ticks():
        y = y_axis.at(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for value in x_axis.ticks():
        parts.append(f'<text x="{x_axis.at(value):.1f}" y="{bottom + 15}" text-anchor="middle">{value:.3g}</text>')
    middle = (_TOP + bottom) / 2
    parts.append(f'<text x="{(_LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(x_label)}</text>')
    turned = f'x="12" y="{middle}" transform="rotate(-90 12 {middle})"'
    parts.append(f'<text {turned} text-anchor="middle">{html.escape(y_label)}</text>')
    return parts
