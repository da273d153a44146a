"""Plots as inline SVG, drawn from numbers alone: no script, no font, no library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from anaphora.probes.html import Html
from anaphora.probes.statistics import median

WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 44, 52
COLOURS = ("var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)")


@dataclass(frozen=True, slots=True)
class Series:
    """Points to draw. `lows` and `highs` (same length) draw a band, for intervals or quantiles."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    kind: Literal["line", "dots"] = "line"
    lows: Sequence[float] = ()
    highs: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line with a word, for example the knee."""

    x: float
    label: str


class Axis:
    """Values to pixels, linear or logarithmic, with round ticks."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, log: bool = False) -> None:
        finite = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
        self.log = log
        self.start, self.end = start, end
        low, high = min(finite), max(finite)
        if log:
            low, high = low / 1.1, high * 1.1
        else:
            low, high = min(0.0, low), high * 1.05 if high > 0 else 1.0
        self.low, self.high = low, high if high > low else low + 1

    def at(self, value: float) -> float:
        """Pixel of a value."""
        if self.log:
            share = (math.log(max(value, self.low)) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            narrow = self.high / self.low < 30
            steps = (1, 2, 5) if narrow else (1,)
            found = [step * 10.0**d for d in decades for step in steps if self.low <= step * 10.0**d <= self.high]
            if len(found) >= 2:
                return found
            return [self.low * 1.1, self.high / 1.1]
        raw = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
        first = math.ceil(self.low / step)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def plot(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    *,
    marks: Sequence[Mark] = (),
    log_x: bool = False,
    log_y: bool = False,
) -> Html:
    """Lines or dots over two axes, with a legend and vertical marks."""
    xs = [x for one in series for x in one.xs] + [mark.x for mark in marks]
    ys = [y for one in series for y in (*one.ys, *one.lows, *one.highs)]
    x_axis = Axis(xs, LEFT, WIDTH - RIGHT, log=log_x)
    y_axis = Axis(ys, HEIGHT - BOTTOM, TOP, log=log_y)
    parts = [*_frame(title, x_label, y_label, y_axis), *_x_ticks(x_axis)]
    for number, one in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        points = [(x_axis.at(x), y_axis.at(y)) for x, y in zip(one.xs, one.ys, strict=True)]
        if one.lows:
            edge = [(x_axis.at(x), y_axis.at(y)) for x, y in zip(one.xs, one.highs, strict=True)]
            edge += [(x_axis.at(x), y_axis.at(y)) for x, y in zip(reversed(one.xs), reversed(one.lows), strict=True)]
            parts.append(f'<polygon points="{_points(edge)}" fill="{colour}" opacity="0.15"/>')
        if one.kind == "line":
            parts.append(
                f'<polyline points="{_points(points)}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )  # fmt: skip
        for (px, py), x, y in zip(points, one.xs, one.ys, strict=True):
            tip = escape(f"{one.label}: {x_label} {short(x)}, {y_label} {short(y)}")
            parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{colour}"><title>{tip}</title></circle>')
    for mark in marks:
        x = x_axis.at(mark.x)
        side = "end" if x > WIDTH * 0.7 else "start"
        shift = -6 if side == "end" else 6
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" class="mark"/>')
        parts.append(
            f'<text x="{x + shift:.1f}" y="{TOP + 12}" text-anchor="{side}" class="mark">{escape(mark.label)}</text>'
        )
    parts += _legend([one.label for one in series])
    return _svg(title, parts)


def strips(title: str, y_label: str, groups: Mapping[str, Sequence[float]], *, log_y: bool = False) -> Html:
    """One column of dots per group, its median as a bar: small samples as they are, nothing smoothed away."""
    y_axis = Axis([y for values in groups.values() for y in values], HEIGHT - BOTTOM, TOP, log=log_y)
    parts = _frame(title, "", y_label, y_axis)
    width = (WIDTH - LEFT - RIGHT) / max(1, len(groups))
    for number, (name, values) in enumerate(groups.items()):
        colour = COLOURS[number % len(COLOURS)]
        centre = LEFT + width * (number + 0.5)
        for i, value in enumerate(values):
            x = centre + width * 0.4 * ((i * 0.618034) % 1 - 0.5)
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y_axis.at(value):.1f}" r="4" fill="{colour}" opacity="0.7">'
                f"<title>{escape(f'{name}: {short(value)}')}</title></circle>"
            )
        parts.append(
            f'<text x="{centre:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(name)} '
            f'<tspan class="dim">n={len(values)}</tspan></text>'
        )
        if values:
            y = y_axis.at(median(values))
            x1, x2 = centre - width * 0.3, centre + width * 0.3
            parts.append(f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y:.1f}" y2="{y:.1f}" class="median"/>')
            parts.append(
                f'<text x="{centre:.1f}" y="{HEIGHT - BOTTOM + 36}" text-anchor="middle" class="dim">'
                f"median {short(median(values))}</text>"
            )
    return _svg(title, parts)


def short(value: float) -> str:
    """Three significant digits, no exponent for everyday sizes."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _frame(title: str, x_label: str, y_label: str, y_axis: Axis) -> list[str]:
    parts = [f'<text x="{LEFT}" y="20" class="title">{escape(title)}</text>']
    for tick in y_axis.ticks():
        y = y_axis.at(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" class="dim">{short(tick)}</text>')
    middle = (HEIGHT - BOTTOM + TOP) / 2
    parts.append(
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})" class="dim">'
        f"{escape(y_label)}</text>"
    )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle" class="dim">'
        f"{escape(x_label)}</text>"
    )
    return parts


def _x_ticks(axis: Axis) -> list[str]:
    y = HEIGHT - BOTTOM + 18
    return [
        f'<text x="{axis.at(tick):.1f}" y="{y}" text-anchor="middle" class="dim">{short(tick)}</text>'
        for tick in axis.ticks()
    ]


def _legend(labels: Sequence[str]) -> list[str]:
    parts, x = [], WIDTH - RIGHT
    for number, label in reversed(list(enumerate(labels))):
        x -= 7 * len(label) + 24
        parts.append(f'<circle cx="{x}" cy="33" r="4" fill="{COLOURS[number % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 9}" y="37" class="dim">{escape(label)}</text>')
    return parts if len(labels) > 1 else []


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _svg(title: str, parts: Sequence[str]) -> Html:
    return Html(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )  # fmt: skip
