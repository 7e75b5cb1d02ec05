"""Small charts as inline SVG: no script, no network, readable in any browser and in print, in light and in dark."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 460, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 40
# Okabe and Ito's, which colour-blind people tell apart, on white and on black; "Color Universal Design", 2008.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#808080")
_DASHES = ("", "7 3", "2 3")
_SHAPES = ("circle", "square", "triangle", "diamond")
_MARK_PX = 3.6


@dataclass(frozen=True, slots=True)
class Style:
    """How a series is drawn: an SVG colour, the pattern of its dashes ('' for none), the shape of its marks."""

    color: str
    dash: str = ""
    shape: str = "circle"


def style(index: int) -> Style:
    """One of 21 styles that differ; each of the first seven has its own colour."""
    number, hue = divmod(index, len(_COLORS))
    return Style(_COLORS[hue], _DASHES[number % len(_DASHES)], _SHAPES[index % len(_SHAPES)])


@dataclass(frozen=True, slots=True)
class Series:
    """A named line: points in the order they are joined; one whose y is NaN breaks it. ``style``: None for one by its
    place among the others. ``marks``: whether the mark at each point is filled or hollow; None for no marks."""

    name: str
    points: Sequence[tuple[float, float]]
    style: Style | None = None
    marks: Sequence[bool] | None = None


@dataclass(frozen=True, slots=True)
class Marker:
    """A line with a label across the chart, for a target or an event: at x, or at y if it is ``level``."""

    x: float
    label: str
    level: bool = False


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
    *,
    log_x: bool = False,
) -> str:
    """One chart as an SVG element with axes from zero, ticks and a legend. Empty series are left out. ``log_x``: a
    logarithmic axis of x, from the least value; all are above 0."""
    drawn = [line for line in series if any(not math.isnan(y) for _, y in line.points)]
    xs = [x for line in drawn for x, _ in line.points] + [marker.x for marker in markers if not marker.level]
    ys = [y for line in drawn for _, y in line.points if not math.isnan(y)]
    ys += [marker.x for marker in markers if marker.level]
    if not drawn or not xs or not ys:
        return _nothing(title)
    styles = [line.style or style(index) for index, line in enumerate(drawn)]
    x_axis = _x_axis(xs, log_x)
    y_axis = _Axis(0.0, max(ys) * 1.02 or 1.0, HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(x_axis, y_axis, x_label, y_label)]
    for line, look in zip(drawn, styles, strict=True):
        pixels = [(x_axis.at(x), y_axis.at(y)) for x, y in line.points]
        parts += _polylines(pixels, look)
        for (x, y), filled in zip(pixels, line.marks or (), strict=line.marks is not None):
            parts.append(_mark(x, y, look, filled))
    parts += [_marker(marker, x_axis, y_axis) for marker in markers]
    has_marks = any(line.marks for line in drawn)
    keys = [(_line_key(look, has_marks), line.name) for line, look in zip(drawn, styles, strict=True)]
    return _figure(title, parts, keys)


def area_chart(title: str, x_label: str, y_label: str, series: Sequence[Series], y_max: float) -> str:
    """Series with the same xs stacked on one another, the first at the bottom, up to ``y_max`` at most."""
    drawn = [area for area in series if area.points]
    if not drawn:
        return _nothing(title)
    styles = [area.style or style(index) for index, area in enumerate(drawn)]
    x_axis = _x_axis([x for x, _ in drawn[0].points], log=False)
    y_axis = _Axis(0.0, y_max, HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(x_axis, y_axis, x_label, y_label)]
    below = [0.0] * len(drawn[0].points)
    for area, look in zip(drawn, styles, strict=True):
        above = [min(y_max, base + y) for base, (_, y) in zip(below, area.points, strict=True)]
        xs = [x for x, _ in area.points]
        edge = [*zip(xs, above, strict=True), *reversed(list(zip(xs, below, strict=True)))]
        path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in edge)
        parts.append(f'<polygon points="{path}" fill="{look.color}"/>')
        below = above
    keys = [(_area_key(look), area.name) for area, look in zip(drawn, styles, strict=True)]
    return _figure(title, parts, keys)


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    start_px: float
    end_px: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        place = math.log10(max(value, self.low)) if self.log else value
        return self.start_px + (place - low) / ((high - low) or 1.0) * (self.end_px - self.start_px)

    def ticks(self) -> list[float]:
        """Multiples of 1, 2 or 5 times a power of ten, about five of them."""
        if self.log:
            return self._log_ticks()
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
        return [number * step for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]

    def _log_ticks(self) -> list[float]:
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        every = [
            [factor * 10.0**power for power in powers for factor in factors if self._holds(factor * 10.0**power)]
            for factors in ((1, 2, 5), (1,))
        ]
        return every[0] if len(every[0]) <= 8 else every[1]

    def _holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def _x_axis(xs: Sequence[float], log: bool) -> _Axis:
    if log:
        return _Axis(min(xs) / 1.1, max(xs) * 1.1, _LEFT, WIDTH - _RIGHT, log=True)
    return _Axis(0.0, max(xs) * 1.02 or 1.0, _LEFT, WIDTH - _RIGHT)


def _grid(x_axis: _Axis, y_axis: _Axis, x_label: str, y_label: str) -> list[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts: list[str] = []
    for value in y_axis.ticks():
        y = y_axis.at(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    for value in x_axis.ticks():
        x = x_axis.at(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{_number(value)}</text>')
    middle = (_TOP + bottom) / 2
    parts.append(f'<text x="{(_LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(x_label)}</text>')
    turned = f'x="12" y="{middle}" transform="rotate(-90 12 {middle})"'
    parts.append(f'<text {turned} text-anchor="middle">{html.escape(y_label)}</text>')
    return parts


def _number(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:,.6g}k"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _marker(marker: Marker, x_axis: _Axis, y_axis: _Axis) -> str:
    label = html.escape(marker.label)
    if marker.level:
        y, right = y_axis.at(marker.x), WIDTH - _RIGHT
        return (
            f'<line class="marker" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="halo" x="{right - 4}" y="{max(_TOP + 9, y - 4):.1f}" text-anchor="end">{label}</text>'
        )
    x = x_axis.at(marker.x)
    anchor = "end" if x > WIDTH - 4 * _RIGHT else "middle"  # above the frame, where no line is hidden
    return (
        f'<line class="marker" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
        f'<text x="{x:.1f}" y="{_TOP - 4}" text-anchor="{anchor}">{label}</text>'
    )


def _polylines(pixels: Sequence[tuple[float, float]], look: Style) -> list[str]:
    """One for each stretch without a break; a point by itself is a dot."""
    stretches: list[list[str]] = [[]]
    for x, y in pixels:
        if math.isnan(y):
            stretches.append([])
        else:
            stretches[-1].append(f"{x:.1f},{y:.1f}")
    paint = f'fill="none" stroke="{look.color}" stroke-width="1.8" stroke-linecap="round"'
    paint += f' stroke-dasharray="{look.dash}"' if look.dash else ""
    return [
        f'<polyline points="{" ".join(stretch if len(stretch) > 1 else stretch * 2)}" {paint}/>'
        for stretch in stretches
        if stretch
    ]


def _mark(x: float, y: float, look: Style, filled: bool) -> str:
    paint = f'fill="{look.color}"' if filled else 'class="hollow"'
    paint += f' stroke="{look.color}" stroke-width="1.6"'
    r = _MARK_PX
    if look.shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" {paint}/>'
    corners = {
        "square": ((-r, -r), (r, -r), (r, r), (-r, r)),
        "triangle": ((0, -1.2 * r), (1.2 * r, r), (-1.2 * r, r)),
        "diamond": ((0, -1.3 * r), (1.3 * r, 0), (0, 1.3 * r), (-1.3 * r, 0)),
    }[look.shape]
    path = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{path}" {paint}/>'


def _line_key(look: Style, has_marks: bool) -> str:
    dash = f' stroke-dasharray="{look.dash}"' if look.dash else ""
    line = f'<line x1="0" x2="28" y1="6" y2="6" stroke="{look.color}" stroke-width="2"{dash}/>'
    return line + (_mark(14, 6, look, True) if has_marks else "")


def _area_key(look: Style) -> str:
    return f'<rect x="8" y="1" width="12" height="10" fill="{look.color}"/>'


def _figure(title: str, parts: Sequence[str], keys: Sequence[tuple[str, str]]) -> str:
    legend = "".join(
        f'<span><svg class="key" viewBox="0 0 28 12" aria-hidden="true">{key}</svg>{html.escape(name)}</span> '
        for key, name in keys
    )
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">{"".join(parts)}</svg>'
        f'<div class="legend">{legend}</div></figure>'
    )


def _nothing(title: str) -> str:
    return f"<figure><figcaption>{html.escape(title)}: nothing was measured</figcaption></figure>"
