"""Curves as SVG files that read well on light and dark pages, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

Point = tuple[float, float]

_FLAT = 1e-4
"""Values that differ by less than this share are drawn as a level line, so that rounding does not show."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 24, 48, 48
_STYLE = """
.chart { font: 13px system-ui, sans-serif; }
.chart .back { fill: #ffffff; }
.chart text { fill: #3d4451; }
.chart .title { font-size: 15px; font-weight: 600; fill: #14181f; }
.chart .grid { stroke: #e4e7ec; stroke-width: 1; }
.chart .axis { stroke: #98a1b0; stroke-width: 1; }
.chart .raw { fill: none; stroke: #2f6fde; stroke-width: 1; opacity: 0.35; }
.chart .curve { fill: none; stroke: #2f6fde; stroke-width: 2.25; stroke-linejoin: round; }
.chart .dot { fill: #2f6fde; }
.chart .target { stroke: #1c8a4b; stroke-width: 1.25; stroke-dasharray: 5 4; }
.chart .note { fill: #1c8a4b; }
@media (prefers-color-scheme: dark) {
  .chart .back { fill: #14181f; }
  .chart text { fill: #b6bfcc; }
  .chart .title { fill: #f1f4f8; }
  .chart .grid { stroke: #2a313d; }
  .chart .axis { stroke: #667185; }
  .chart .raw, .chart .curve { stroke: #77a7ff; }
  .chart .dot { fill: #77a7ff; }
  .chart .target { stroke: #58c98a; }
  .chart .note { fill: #58c98a; }
}
"""


def line_chart(
    points: Sequence[Point],
    *,
    title: str,
    y_label: str = "",
    target: float | None = None,
    y_range: tuple[float, float] | None = None,
    width: int = 720,
    height: int = 360,
) -> str:
    """Return an SVG picture of one curve: the values thin, their moving average bold.

    Args:
        points: `(step, y)` in order; values that are not finite are left out.
        title: the line above the curve.
        y_label: the label of the y axis.
        target: a dashed horizontal line, for example the reward at which the run stops.
        y_range: the smallest range that the y axis covers.
        width: of the picture; texts keep their size.
        height: of the picture.

    Returns:
        A complete, well-formed SVG document without external references.
    """
    kept = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    extra = ([target] if target is not None else []) + list(y_range or ())
    x_ticks = _ticks([x for x, _ in kept] or [0.0, 1.0], whole=True)
    y_ticks = _ticks([y for _, y in kept] + extra or [0.0, 1.0])
    x_low, x_high = min((x for x, _ in kept), default=0.0), max((x for x, _ in kept), default=1.0)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def at_x(x: float) -> float:
        return _LEFT + (x - x_low) / (x_high - x_low) * (width - _LEFT - _RIGHT)

    def at_y(y: float) -> float:
        return height - _BOTTOM - (y - y_low) / (y_high - y_low) * (height - _TOP - _BOTTOM)

    def line(values: Sequence[Point], kind: str) -> str:
        return f'<polyline class="{kind}" points="{" ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in values)}"/>'

    right, floor = width - _RIGHT, height - _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="back" width="{width}" height="{height}" rx="8"/>',
        f'<text class="title" x="{_LEFT}" y="28">{escape(title)}</text>',
    ]
    for tick in y_ticks:
        y = at_y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_label(tick, y_ticks)}</text>')
    for tick in x_ticks:
        if x_low <= tick <= x_high:
            parts.append(
                f'<line class="axis" x1="{at_x(tick):.1f}" y1="{floor}" x2="{at_x(tick):.1f}" y2="{floor + 4}"/>'
            )
            parts.append(
                f'<text x="{at_x(tick):.1f}" y="{floor + 19}" text-anchor="middle">{_label(tick, x_ticks)}</text>'
            )
    parts.append(f'<line class="axis" x1="{_LEFT}" y1="{floor}" x2="{right}" y2="{floor}"/>')
    parts.append(f'<text x="{(_LEFT + right) / 2:.0f}" y="{height - 10}" text-anchor="middle">optimizer step</text>')
    middle = (_TOP + floor) / 2
    parts.append(
        f'<text x="16" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 16 {middle:.0f})">'
        f"{escape(y_label)}</text>"
    )
    if target is not None:
        y = at_y(target)
        parts.append(f'<line class="target" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(f'<text class="note" x="{_LEFT + 6}" y="{y + 16:.1f}">target {target:g}</text>')
    if kept:
        smooth = _moving_average(kept)
        parts += [line(kept, "raw"), line(smooth, "curve")]
        x, y = smooth[-1]
        parts.append(f'<circle class="dot" cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="3.5"/>')
    else:
        parts.append(f'<text x="{(_LEFT + right) / 2:.0f}" y="{middle:.0f}" text-anchor="middle">no values yet</text>')
    return "\n".join([*parts, "</svg>", ""])


def _moving_average(points: Sequence[Point]) -> list[Point]:
    """Average each value with its neighbours, over a window of about a twentieth of the curve.

    The ends of the window count half, so that alternating values (two updates per rollout) average out.
    """
    reach = min(len(points) // 40, 25)
    if reach == 0:
        return list(points)
    values = [y for _, y in points]
    smooth: list[Point] = []
    for index, (x, _) in enumerate(points):
        near = values[max(0, index - reach) : index + reach + 1]
        smooth.append((x, (sum(near) - (near[0] + near[-1]) / 2) / (len(near) - 1)))
    return smooth


def _label(tick: float, ticks: Sequence[float]) -> str:
    """Return a tick with enough decimals to distinguish it from its neighbours."""
    step = abs(ticks[1] - ticks[0]) if len(ticks) > 1 else 1.0
    largest = max(abs(ticks[0]), abs(ticks[-1]))
    if largest >= 1e6 or (largest and largest < 1e-3):
        digits = max(0, math.ceil(math.log10(largest / step) - 1e-9))
        return f"{tick:.{min(digits, 4)}e}" if tick else "0"
    text = f"{tick:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _ticks(values: Sequence[float], *, whole: bool = False) -> list[float]:
    """Return round numbers in steps of 1, 2 or 5 times a power of ten that enclose the values."""
    low, high = min(values), max(values)
    if high - low <= _FLAT * max(abs(low), abs(high)):  # equal, or up to rounding
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    if whole:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]
