"""Line charts as inline SVG: no script, no network, colours from the page's style sheet."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, WIDE, HEIGHT = 640, 1290, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 26, 14, 40

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    points: Sequence[Point]
    """(x, y), x rising; places whose y is not finite are left out."""
    style: str
    """CSS class: `train`, `validation`."""
    markers: bool = False
    """Show each point as a dot with its figures as tooltip (few points)."""
    smooth: bool = False
    """Draw the points faintly, and their running mean over a fiftieth of the chart in full."""


@dataclass(frozen=True)
class Reference:
    """A horizontal line with a name."""

    name: str
    y: float


def line_chart(
    title: str, series: Sequence[Series], *, unit: str = "", reference: Reference | None = None, from_zero: bool = False, wide: bool = False
) -> str:
    """A chart as an SVG element; empty where no series has a finite point.

    The range of y leaves out the most extreme 2 % at the top, so that a run's first steps do not flatten the rest.

    Args:
        title: heading, also the accessible name.
        series: lines in drawing order.
        unit: written beside the title.
        reference: a horizontal line.
        from_zero: start y at 0, as for shares and rates, whose noise would otherwise fill the chart.
        wide: take the page's whole width.
    """
    series = [Series(s.name, _finite(s.points), s.style, s.markers, s.smooth) for s in series]
    series = [s for s in series if s.points]
    if not series:
        return ""
    frame = _Frame.around(series, reference, from_zero, WIDE if wide else WIDTH)
    body = [_grid(frame)]
    if reference:
        y = frame.y(reference.y)
        body.append(f'<path class="reference" d="M{LEFT} {y:.1f}H{frame.right}"/>')
        above = y - 6 if y > TOP + 24 else y + 15
        body.append(f'<text class="reference-name" x="{frame.right - 4}" y="{above:.1f}" text-anchor="end">{escape(reference.name)}</text>')
    body += [_draw(s, frame) for s in series]
    legend = "".join(f'<span class="key {s.style}">{escape(s.name)}</span>' for s in series) if len(series) > 1 or reference else ""
    suffix = f' <span class="unit">{escape(unit)}</span>' if unit else ""
    return (
        f'<figure{' class="wide"' if wide else ""}><figcaption>{escape(title)}{suffix}<span class="legend">{legend}</span></figcaption>'
        f'<svg viewBox="0 0 {frame.width} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(body)}</svg></figure>'
    )


def _finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


@dataclass(frozen=True)
class _Frame:
    x0: float
    x1: float
    y0: float
    y1: float
    width: int

    @property
    def right(self) -> int:
        return self.width - RIGHT

    @classmethod
    def around(cls, series: Sequence[Series], reference: Reference | None, from_zero: bool, width: int) -> "_Frame":
        xs = [x for s in series for x, _ in s.points]
        ys = sorted(y for s in series for _, y in s.points)
        low, high = ys[0], ys[max(0, math.ceil(0.98 * len(ys)) - 1)]
        if reference:
            low, high = min(low, reference.y), max(high, reference.y)
        margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
        floor = 0.0 if from_zero or 0 <= low < 0.35 * high else low - margin
        x0, x1 = min(xs), max(xs)
        return cls(x0, x1 if x1 > x0 else x0 + 1, floor, high + margin, width)

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (self.right - LEFT)

    def y(self, value: float) -> float:
        share = (value - self.y0) / (self.y1 - self.y0)
        return HEIGHT - BOTTOM - min(share, 1.0) * (HEIGHT - TOP - BOTTOM)


def _draw(series: Series, frame: _Frame) -> str:
    if series.markers:
        dots = "".join(
            f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3"><title>{escape(series.name)}, step {x:g}: {y:.4g}</title></circle>'
            for x, y in series.points
        )
        return f'<g class="line {series.style}"><path d="{_path(series.points, frame)}"/>{dots}</g>'
    points = thin(series.points, 600)
    if not series.smooth:
        return f'<g class="line {series.style}"><path d="{_path(points, frame)}"/></g>'
    mean = running_mean(points, max(1, len(points) // 50))
    return f'<g class="line {series.style}"><path class="faint" d="{_path(points, frame)}"/><path d="{_path(mean, frame)}"/></g>'


def _path(points: Sequence[Point], frame: _Frame) -> str:
    return "M" + "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in points)


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points, each the mean of its stretch."""
    size = -(-len(points) // most)
    if size <= 1:
        return list(points)
    stretches = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in s) / len(s), sum(y for _, y in s) / len(s)) for s in stretches]


def running_mean(points: Sequence[Point], reach: int) -> list[Point]:
    """Each point's y replaced by the mean over `reach` neighbours on both sides, fewer at the ends."""
    means = []
    for i, (x, _) in enumerate(points):
        # As many on one side as on the other: a lopsided mean would bend a falling curve at its ends.
        near = min(reach, i, len(points) - 1 - i)
        window = points[i - near : i + near + 1]
        means.append((x, sum(y for _, y in window) / len(window)))
    return means


def _grid(frame: _Frame) -> str:
    parts = []
    for tick in ticks(frame.y0, frame.y1, 5):
        y = frame.y(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{frame.right}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_label(tick)}</text>')
    for tick in ticks(frame.x0, frame.x1, 6):
        parts.append(f'<text x="{frame.x(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{_label(tick)}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{frame.right}"/>')
    parts.append(f'<text class="unit" x="{(LEFT + frame.right) / 2}" y="{HEIGHT - 4}" text-anchor="middle">step</text>')
    return "".join(parts)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round values within [low, high], near `about` of them."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _label(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:,.4g}k"
    if abs(value) < 0.01:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:,.4g}"
