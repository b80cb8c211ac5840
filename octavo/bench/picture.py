"""Charts as SVG text: lines, points or bars, side by side. Knows numbers and names, not what was measured.

Nothing is drawn behind a chart, and its colours are neither light nor dark, so that it can be read on a page of either kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from octavo.errors import InvalidRequest

COLOURS = ("#3f83d1", "#d9772b", "#3a9c68", "#a26bd0", "#c9504f", "#8a8f2d")
INK = "#808080"  # 3.9 to 1 on white, 5 to 1 on black
WIDTH, HEIGHT = 440, 300  # of a chart
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 52, 46  # around where values are


@dataclass
class Chart:
    """series: name -> (x, y), or for bars one y for each of `names`."""

    title: str
    x: str
    y: str
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    kind: str = "lines"  # or points, bars
    names: list[str] = field(default_factory=list)  # of bars: what stands below them; their x counts these
    log: bool = False  # both axes, for points
    diagonal: bool = False  # where x is y


def draw(charts: list[Chart], path: Path) -> None:
    if path.suffix != ".svg":
        raise InvalidRequest(f"pictures are written as SVG: name the file something.svg, not {path.name}", "plot")
    path.write_text(svg(charts))


def svg(charts: list[Chart]) -> str:
    width = WIDTH * len(charts)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
             f'font-family="system-ui, sans-serif" font-size="11" fill="{INK}">']  # fmt: skip
    for i, chart in enumerate(charts):
        parts += [f'<g transform="translate({i * WIDTH} 0)">', *_chart(chart), "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def ticks(low: float, high: float, log: bool = False) -> list[float]:
    """Round numbers from at most low to at least high."""
    if log:
        steps = [m * 10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) for m in (1, 2, 5)]
        first = max((s for s in steps if s <= low), default=steps[0])
        last = min((s for s in steps if s >= high), default=steps[-1])
        return [s for s in steps if first <= s <= last]
    step = 10.0 ** math.floor(math.log10(max(high - low, 1e-12)))
    step *= next(m for m in (0.1, 0.2, 0.5, 1, 2) if (high - low) / (step * m) <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def _chart(chart: Chart) -> list[str]:
    points = [p for values in chart.series.values() for p in values]
    if not points:
        raise InvalidRequest(f"nothing to draw: {chart.title}", "plot")
    (xs, ys), bars = zip(*points, strict=True), chart.kind == "bars"
    if chart.diagonal:
        xs = ys = (*xs, *ys)
    below = min(ys) if chart.log else min(0.0, *ys)  # from zero, or differences look larger than they are
    vertical = ticks(below, max(ys), chart.log)
    horizontal = ticks(min(xs), max(xs), chart.log) if not bars else [-0.5, len(chart.names) - 0.5]
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def along(value: float, marks: list[float], first: float, last: float) -> float:
        low, high, value = (math.log(v) for v in (marks[0], marks[-1], value)) if chart.log else (marks[0], marks[-1], value)
        return round(first + (value - low) / (high - low) * (last - first), 1)

    def at(x: float, y: float) -> tuple[float, float]:
        return along(x, horizontal, LEFT, right), along(y, vertical, bottom, TOP)

    out = [_text(WIDTH / 2, 16, chart.title, "middle", bold=True), _text((LEFT + right) / 2, HEIGHT - 10, chart.x, "middle"),
           f'<g transform="translate(13 {(TOP + bottom) / 2}) rotate(-90)">{_text(0, 0, chart.y, "middle")}</g>']  # fmt: skip
    for mark in vertical:
        _, y = at(horizontal[0], mark)
        out += [_line((LEFT, y), (right, y), 0.3), _text(LEFT - 6, y + 4, _number(mark), "end")]
    for mark, name in enumerate(chart.names) if bars else ((m, _number(m)) for m in horizontal):
        out.append(_text(at(mark, vertical[0])[0], bottom + 16, name, "middle"))
    out.append(_line((LEFT, bottom), (right, bottom), 1))
    if chart.diagonal:
        out.append(_line(at(horizontal[0], horizontal[0]), at(horizontal[-1], horizontal[-1]), 0.7))
    place = float(LEFT)
    for i, (name, values) in enumerate(chart.series.items()):
        colour = COLOURS[i % len(COLOURS)]
        if bars:
            wide = 0.7 / len(chart.series)
            for x, y in values:
                left, right_edge = (at(x + (i + k) * wide - 0.35, 0)[0] for k in (0, 1))
                top, foot = at(x, y)[1], at(x, max(vertical[0], 0.0))[1]
                out.append(f'<rect x="{left}" y="{min(top, foot)}" width="{right_edge - left - 1:.1f}" '
                           f'height="{abs(foot - top):.1f}" fill="{colour}"/>')  # fmt: skip
                out.append(_text((left + right_edge) / 2, top - 4, _number(y, 3), "middle"))
        elif chart.kind == "points":
            out.append(f'<g fill="{colour}" fill-opacity="0.5">')
            out += [f'<circle cx="{x}" cy="{y}" r="1.6"/>' for x, y in (at(*p) for p in values)]
            out.append("</g>")
        else:
            path = " ".join(f"{x},{y}" for x, y in (at(*p) for p in values))
            out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(chart.series) > 1 or not bars:
            out += [f'<rect x="{place}" y="28" width="10" height="10" fill="{colour}"/>', _text(place + 14, 37, name, "start")]
            place += 26 + 6.2 * len(name)
    return out


def _number(value: float, digits: int = 4) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def _text(x: float, y: float, text: str, anchor: str, bold: bool = False) -> str:
    weight = ' font-weight="600" font-size="12"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def _line(a: tuple[float, float], b: tuple[float, float], width: float) -> str:
    return f'<line x1="{a[0]}" y1="{a[1]}" x2="{b[0]}" y2="{b[1]}" stroke="{INK}" stroke-width="{width}"/>'
