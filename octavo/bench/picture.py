"""Charts as SVG text, drawn by hand so that a measurement's picture needs no library: points, lines and bars.

    svg(points("title", series, x, y), bars("title", names, series, "tok/s")) -> the text of a file, panels side by side

Colours follow the reader's light or dark theme. Knows numbers and names, nothing of what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from octavo.errors import InvalidRequest, OctavoError

# of a panel of points or lines
WIDTH = 560
HEIGHT = 380
# margins around a plot
LEFT = 66
RIGHT = 24
TOP = 62
BOTTOM = 50
# of one bar, and between the bars of two names
BAR = 16
GAP = 12
LETTER = 6.4  # the width of one, about, at size 11

LIGHT = (
    "#ffffff",
    "#1f2328",
    "#59636e",
    "#d9dee3",
    "#0b62c4",
    "#b4540a",
    "#177245",
    "#8a3ffc",
    "#b3261e",
    "#5c6670",
)
DARK = (
    "#0d1117",
    "#e6edf3",
    "#9aa4af",
    "#30363d",
    "#58a6ff",
    "#f0a35e",
    "#56d364",
    "#c297ff",
    "#ff8a80",
    "#b0bac4",
)
COLOURS = len(LIGHT) - 4


def _rules(colours: Sequence[str]) -> str:
    paper, ink, faint, grid, *series = colours
    named = f".paper{{fill:{paper}}}text{{fill:{ink}}}.faint{{fill:{faint}}}.grid{{stroke:{grid}}}"
    return named + "".join(f".f{i}{{fill:{c}}}.s{i}{{stroke:{c}}}" for i, c in enumerate(series))


STYLE = (
    "<style>text{font:11px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}.title{font-size:14px;font-weight:600}"
    f".line{{fill:none;stroke-width:2}}{_rules(LIGHT)}@media(prefers-color-scheme:dark){{{_rules(DARK)}}}</style>"
)


class Axis(NamedTuple):
    label: str  # with its unit
    log: bool = False
    zero: bool = False  # begins at 0


class Series(NamedTuple):
    name: str  # in the legend, where there are several
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()  # beside the points


class Panel(NamedTuple):
    width: float
    height: float
    body: str


def svg(*panels: Panel) -> str:
    """The panels side by side, as a file's text."""
    width = sum(p.width for p in panels)
    height = max(p.height for p in panels)
    parts = []
    x = 0.0
    for panel in panels:
        parts.append(f'<g transform="translate({x:g} 0)">{panel.body}</g>')
        x += panel.width
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" '
        f'role="img">{STYLE}<rect class="paper" width="100%" height="100%"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def draw(path: Path, *panels: Panel) -> None:
    if path.suffix != ".svg":
        raise InvalidRequest(
            f"pictures are written as SVG: name the file something.svg, not {path.name}", "picture"
        )
    path.write_text(svg(*panels), encoding="utf-8")


# ---- points and lines -----------------------------------------------------------------------------------


def points(
    title: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    joined: bool = False,
    width: float = WIDTH,
    size: float = 4,
) -> Panel:
    """A mark of this size for each point, joined by lines where asked. Labels are put where they cover nothing."""
    every = [point for one in series for point in one.points]
    if not every or not all(math.isfinite(value) for point in every for value in point):
        raise OctavoError(f"the chart {title!r} needs at least one point, and finite numbers")
    across = _Scale([p[0] for p in every], x, LEFT, width - RIGHT)
    up = _Scale([p[1] for p in every], y, HEIGHT - BOTTOM, TOP)
    parts = [_text(14, 22, title, "title"), _legend(series, 14, 42) if len(series) > 1 else ""]
    for at, name in across.ticks:
        parts += [
            _grid(at, TOP, at, HEIGHT - BOTTOM),
            _text(at, HEIGHT - BOTTOM + 16, name, "faint", "middle"),
        ]
    for at, name in up.ticks:
        parts += [_grid(LEFT, at, width - RIGHT, at), _text(LEFT - 8, at + 4, name, "faint", "end")]
    parts.append(_text((LEFT + width - RIGHT) / 2, HEIGHT - 12, x.label, "", "middle"))
    parts.append(
        f'<g transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2:g}) rotate(-90)">{_text(0, 0, y.label, "", "middle")}</g>'
    )
    marks = [[(across(px), up(py)) for px, py in one.points] for one in series]
    labels = _Labels([mark for one in marks for mark in one], width)
    for i, (one, places) in enumerate(zip(series, marks, strict=True)):
        colour = i % COLOURS
        if joined:
            parts.append(
                f'<polyline class="line s{colour}" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in places)}"/>'
            )
        parts += [
            labels.put(*place, label) for place, label in zip(places, one.labels, strict=False)
        ]
        parts += [
            f'<circle class="f{colour}" cx="{a:.1f}" cy="{b:.1f}" r="{size:g}"/>' for a, b in places
        ]
    return Panel(width, HEIGHT, "\n".join(part for part in parts if part))


class _Scale:
    """Values of an axis to pixels, with its ticks: (pixel, name)."""

    def __init__(self, values: Sequence[float], axis: Axis, first: float, last: float):
        self.log = axis.log
        if axis.log and min(values) <= 0:
            raise OctavoError(f"axis {axis.label!r} is logarithmic: it cannot show {min(values):g}")
        low = min(values)
        high = max(values)
        # a little room, so that no point lies on the edge; but nothing negative where nothing is
        if not axis.log:
            room = 0.04 * (high - low)
            low = min(low, 0.0) if axis.zero else low - room if low < 0 else max(0.0, low - room)
            high = high + room
        steps = _log_steps(low, high) if axis.log else _steps(low, high)
        self.low, self.high = (self._of(steps[0]), self._of(steps[-1]))
        self.first = first
        self.last = last
        digits = 0 if axis.log and low >= 1 else _digits(steps[1] - steps[0])
        self.ticks = [
            (self(step), f"{step:,g}" if axis.log and step < 1e4 else f"{step:,.{digits}f}")
            for step in steps
        ]

    def _of(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def __call__(self, value: float) -> float:
        return self.first + (self._of(value) - self.low) / (self.high - self.low) * (
            self.last - self.first
        )


def _steps(low: float, high: float) -> list[float]:
    """Round numbers that enclose low and high, about six."""
    span = (high - low) or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / 5))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor * 5 >= span * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def _log_steps(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten that enclose low and high; powers alone where there would be many."""
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high) + 1e-9)
    factors = (1, 2, 5) if last - first < 4 else (1,)
    steps = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    below = max(i for i, step in enumerate(steps) if step <= low * 1.000001)
    above = min(
        (i for i, step in enumerate(steps) if step >= high * 0.999999), default=len(steps) - 1
    )
    return steps[below : max(above, below + 1) + 1]


def _digits(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))


class _Labels:
    """Places for words beside points: of a few, the one that covers least."""

    def __init__(self, marks: list[tuple[float, float]], width: float):
        self.taken = [(a - 5, b - 5, a + 5, b + 5) for a, b in marks]
        self.width = width

    def put(self, a: float, b: float, label: str) -> str:
        wide = LETTER * len(label)
        places = [
            (a + 8 * side - wide * (side < 0), b + 4 + down)
            for down in (0, -12, 12, -24, 24, -36, 36)
            for side in (1, -1)
        ]
        places += [(a - wide / 2, b - 10), (a - wide / 2, b + 18)]
        boxes = [(left - 4, base - 10, left + wide + 4, base + 3) for left, base in places]
        best = min(range(len(boxes)), key=lambda i: (self._covered(boxes[i]), i))
        self.taken.append(boxes[best])
        left, base = places[best]
        far = abs(base - 4 - b) >= 24  # a word that stands further away is tied to its point
        end = min((left - 2, left + wide + 2), key=lambda side: abs(side - a))
        lead = f'<path class="grid" d="M{a:.1f} {b:.1f}L{end:.1f} {base - 4:.1f}"/>' if far else ""
        return lead + _text(left, base, label)

    def _covered(self, box: tuple[float, float, float, float]) -> float:
        """Area that is not free: other words and points, and what is outside of the plot."""
        a, b, c, d = box
        inside = max(0.0, min(c, self.width - 2) - max(a, LEFT)) * max(
            0.0, min(d, HEIGHT - BOTTOM) - max(b, TOP - 12)
        )
        both = (
            max(0.0, min(c, z) - max(a, x)) * max(0.0, min(d, w) - max(b, y))
            for x, y, z, w in self.taken
        )
        return (c - a) * (d - b) - inside + sum(both)


# ---- bars -----------------------------------------------------------------------------------------------


def bars(
    title: str,
    names: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    unit: str,
    width: float = WIDTH,
) -> Panel:
    """Lying bars from 0: for each name one of each series, its value beside it; None: a dash, not measured."""
    known = [value for values in series.values() for value in values if value is not None]
    if (
        not known
        or min(known) < 0
        or not all(map(math.isfinite, known))
        or any(len(v) != len(names) for v in series.values())
    ):
        raise OctavoError(
            f"the chart {title!r} needs a finite number, not negative, or None for each of {len(names)} names"
        )
    most = max(known) or 1.0
    digits = _digits(max(known) / 100) if max(known) else 0
    left = 26 + LETTER * max(map(len, names))
    room = width - left - 24 - LETTER * len(f"{most:,.{digits}f}")
    parts = [_text(14, 22, f"{title}, {unit}", "title")]
    parts.append(_legend([Series(name, ()) for name in series], 14, 42) if len(series) > 1 else "")
    y = 54.0 if len(series) > 1 else 38.0
    for row, name in enumerate(names):
        parts.append(_text(left - 10, y + BAR * len(series) / 2 + 4, name, "", "end"))
        for i, values in enumerate(series.values()):
            value = values[row]
            long = 0.0 if value is None else room * value / most
            parts.append(
                f'<rect class="f{i % COLOURS}" x="{left:.1f}" y="{y:.1f}" width="{long:.1f}" height="{BAR - 2}" rx="2"/>'
            )
            parts.append(
                _text(
                    left + long + 6,
                    y + BAR / 2 + 3,
                    "–" if value is None else f"{value:,.{digits}f}",
                )
            )
            y += BAR
        y += GAP
    return Panel(width, y + 8, "\n".join(part for part in parts if part))


# ---- words ------------------------------------------------------------------------------------------------


def _legend(series: Sequence[Series], x: float, y: float) -> str:
    parts = []
    for i, one in enumerate(series):
        parts.append(
            f'<circle class="f{i % COLOURS}" cx="{x + 4:.1f}" cy="{y - 4:.1f}" r="4"/>{_text(x + 13, y, one.name)}'
        )
        x += 30 + LETTER * len(one.name)
    return "".join(parts)


def _grid(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="grid" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "") -> str:
    kind = f' class="{kind}"' if kind else ""
    anchor = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}{anchor}>{escape(words)}</text>'
