"""Line charts as SVG text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 30, 45
_COLOURS = ("#1b6ca8", "#c8553d", "#4d8b31", "#7d4e9e", "#a67c00", "#3f7d7d")


def line_chart(
    title: str,
    series: Mapping[str, Points],
    *,
    x_label: str,
    y_label: str,
    levels: Mapping[str, float] | None = None,
) -> str:
    """An SVG of one line a series; a single point is drawn as a dot.

    Args:
        series: points ``(x, y)`` by name, all finite.
        levels: horizontal lines by name, such as a target.
    """
    levels = levels or {}
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points] + list(levels.values())
    x_low, x_high = _padded(0.0, max(xs))
    y_low, y_high = _padded(min(ys), max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        'font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="13">{escape(title)}</text>',
    ]
    for value in _ticks(x_low, x_high):
        x, y = place(value, y_low)
        parts.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{_number(value)}</text>')
    for value in _ticks(y_low, y_high):
        x, y = place(x_low, value)
        end, _ = place(x_high, value)
        parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{end:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    for name, level in levels.items():
        x, y = place(x_low, level)
        end, _ = place(x_high, level)
        parts.append(
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{end:.1f}" y2="{y:.1f}" stroke="#888" '
            'stroke-dasharray="5 4"/>'
        )
        parts.append(f'<text x="{end + 6:.1f}" y="{y + 4:.1f}" fill="#666">{escape(name)}</text>')
    for number, (name, points) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        placed = [place(x, y) for x, y in points]
        if len(placed) == 1:
            parts.append(f'<circle cx="{placed[0][0]:.1f}" cy="{placed[0][1]:.1f}" r="3" fill="{colour}"/>')
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        y = _TOP + 14 * number
        parts.append(f'<rect x="{_WIDTH - _RIGHT + 50}" y="{y}" width="10" height="3" fill="{colour}"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 65}" y="{y + 5}">{escape(name)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text transform="translate(14 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    return "\n".join([*parts, "</svg>"])


def smoothed(losses: Mapping[int, float], *, points: int = 200) -> list[tuple[int, float]]:
    """(last step, mean) of at most `points` equal stretches of the losses by step."""
    steps = sorted(losses)
    size = max(-(-len(steps) // points), 1)
    stretches = [steps[start : start + size] for start in range(0, len(steps), size)]
    return [(stretch[-1], sum(losses[step] for step in stretch) / len(stretch)) for stretch in stretches]


def _padded(low: float, high: float) -> tuple[float, float]:
    """A range that is not empty."""
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers in the range."""
    raw = (high - low) / 5
    power = 10 ** math.floor(math.log10(raw))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= raw)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]


def _number(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value:.6g}" if abs(value) < 1e4 else f"{value / 1e3:g}k"
