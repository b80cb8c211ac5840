"""Draws charts of points, lines and bars as SVG text, without a library.

    svg(points("title", series, x_axis, y_axis), bars("title", names, series, "tok/s"))

returns the text of a file with the panels side by side. Colours follow the light or dark theme of
the reader. This module draws numbers and names, whatever was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from octavo.errors import InvalidRequest, OctavoError

# The size of a panel with points or lines.
WIDTH = 560
HEIGHT = 380
# Margins around a plot.
LEFT = 66
RIGHT = 24
TOP = 62
BOTTOM = 50
# The height of a bar, and the gap between the bars of two names.
BAR_HEIGHT = 16
BAR_GAP = 12
LETTER_WIDTH = 6.4  # an average at font size 11

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
COLOUR_COUNT = len(LIGHT) - 4


def _colour_rules(colours: Sequence[str]) -> str:
    background, text_colour, faint_colour, grid_colour, *series_colours = colours
    named_rules = (
        f".paper{{fill:{background}}}text{{fill:{text_colour}}}"
        f".faint{{fill:{faint_colour}}}.grid{{stroke:{grid_colour}}}"
    )
    return named_rules + "".join(
        f".f{index}{{fill:{colour}}}.s{index}{{stroke:{colour}}}"
        for index, colour in enumerate(series_colours)
    )


STYLE = (
    "<style>text{font:11px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
    ".title{font-size:14px;font-weight:600}.line{fill:none;stroke-width:2}"
    f"{_colour_rules(LIGHT)}@media(prefers-color-scheme:dark){{{_colour_rules(DARK)}}}</style>"
)


class Axis(NamedTuple):
    label: str  # name with its unit
    is_logarithmic: bool = False
    starts_at_zero: bool = False


class Series(NamedTuple):
    name: str  # shown in the legend if there are several series
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()  # beside the points


class Panel(NamedTuple):
    width: float
    height: float
    body: str


def svg(*panels: Panel) -> str:
    """Return the text of a file with the panels side by side."""
    width = sum(panel.width for panel in panels)
    height = max(panel.height for panel in panels)
    groups = []
    panel_left = 0.0
    for panel in panels:
        groups.append(f'<g transform="translate({panel_left:g} 0)">{panel.body}</g>')
        panel_left += panel.width
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img">{STYLE}'
        '<rect class="paper" width="100%" height="100%"/>\n' + "\n".join(groups) + "\n</svg>\n"
    )


def draw(path: Path, *panels: Panel) -> None:
    if path.suffix != ".svg":
        raise InvalidRequest(
            f"a picture is an SVG file: its name must end with .svg, got {path.name}", "picture"
        )
    path.write_text(svg(*panels), encoding="utf-8")


# ---- points and lines ----------------------------------------------------------------------------


def points(
    title: str,
    series: Sequence[Series],
    x_axis: Axis,
    y_axis: Axis,
    connected: bool = False,
    width: float = WIDTH,
    mark_size: float = 4,
) -> Panel:
    """Draw a mark for each point, and lines between the points if `connected`.

    A `mark_size` of 0 draws lines without marks. Labels are placed where they cover nothing.
    """
    all_points = [position for line in series for position in line.points]
    all_values = [value for position in all_points for value in position]
    if not all_values or not all(map(math.isfinite, all_values)):
        raise OctavoError(f"the chart {title!r} needs at least one point, and finite numbers")
    x_scale = _Scale([position[0] for position in all_points], x_axis, LEFT, width - RIGHT)
    y_scale = _Scale([position[1] for position in all_points], y_axis, HEIGHT - BOTTOM, TOP)
    elements = [
        _text_element(14, 22, title, "title"),
        _legend(series, 14, 42) if len(series) > 1 else "",
    ]
    for pixel, tick_label in x_scale.ticks:
        elements += [
            _grid_line(pixel, TOP, pixel, HEIGHT - BOTTOM),
            _text_element(pixel, HEIGHT - BOTTOM + 16, tick_label, "faint", "middle"),
        ]
    for pixel, tick_label in y_scale.ticks:
        elements += [
            _grid_line(LEFT, pixel, width - RIGHT, pixel),
            _text_element(LEFT - 8, pixel + 4, tick_label, "faint", "end"),
        ]
    elements.append(
        _text_element((LEFT + width - RIGHT) / 2, HEIGHT - 12, x_axis.label, "", "middle")
    )
    y_label = _text_element(0, 0, y_axis.label, "", "middle")
    y_middle = (TOP + HEIGHT - BOTTOM) / 2
    elements.append(f'<g transform="translate(16 {y_middle:g}) rotate(-90)">{y_label}</g>')
    pixels_of_series = [
        [(x_scale(x_value), y_scale(y_value)) for x_value, y_value in line.points]
        for line in series
    ]
    labels = _Labels(list(chain.from_iterable(pixels_of_series)), width)
    for index, (line, pixels) in enumerate(zip(series, pixels_of_series, strict=True)):
        colour = index % COLOUR_COUNT
        if connected:
            corners = " ".join(f"{pixel_x:.1f},{pixel_y:.1f}" for pixel_x, pixel_y in pixels)
            elements.append(f'<polyline class="line s{colour}" points="{corners}"/>')
        elements += [
            labels.place_label(*pixel_position, label)
            for pixel_position, label in zip(pixels, line.labels, strict=False)
        ]
        if mark_size:
            circle = f'<circle class="f{colour}" r="{mark_size:g}"'
            elements += [
                f'{circle} cx="{pixel_x:.1f}" cy="{pixel_y:.1f}"/>' for pixel_x, pixel_y in pixels
            ]
    return Panel(width, HEIGHT, "\n".join(element for element in elements if element))


class _Scale:
    """Maps the values of an axis to pixels. `ticks` are (pixel, label) pairs."""

    def __init__(self, values: Sequence[float], axis: Axis, first_pixel: float, last_pixel: float):
        self.is_logarithmic = axis.is_logarithmic
        if axis.is_logarithmic and min(values) <= 0:
            raise OctavoError(f"axis {axis.label!r} is logarithmic: it cannot show {min(values):g}")
        lowest = min(values)
        highest = max(values)
        if axis.is_logarithmic:
            tick_values = _logarithmic_ticks(lowest, highest)
        else:
            tick_values = _linear_ticks(*_with_margin(lowest, highest, axis.starts_at_zero))
        self.first_pixel = first_pixel
        self.low_value = self._transform(tick_values[0])
        value_range = self._transform(tick_values[-1]) - self.low_value
        self.pixels_per_unit = (last_pixel - first_pixel) / value_range
        decimals = _decimals(tick_values[1] - tick_values[0])
        if axis.is_logarithmic and lowest >= 1:
            decimals = 0
        self.ticks = [
            (self(tick_value), self._tick_label(tick_value, decimals)) for tick_value in tick_values
        ]

    def _tick_label(self, value: float, decimals: int) -> str:
        if self.is_logarithmic and value < 1e4:
            return f"{value:,g}"
        return f"{value:,.{decimals}f}"

    def _transform(self, value: float) -> float:
        return math.log10(value) if self.is_logarithmic else value

    def __call__(self, value: float) -> float:
        return self.first_pixel + (self._transform(value) - self.low_value) * self.pixels_per_unit


def _with_margin(lowest: float, highest: float, starts_at_zero: bool) -> tuple[float, float]:
    """Widen a range so that no point lies on the edge. Positive values get no negative margin."""
    margin = 0.04 * (highest - lowest)
    if starts_at_zero:
        return min(lowest, 0.0), highest + margin
    if lowest < 0:
        return lowest - margin, highest + margin
    return max(0.0, lowest - margin), highest + margin


def _linear_ticks(lowest: float, highest: float) -> list[float]:
    """Return about six round numbers that enclose the range."""
    value_range = (highest - lowest) or abs(highest) or 1.0
    power_of_ten = 10.0 ** math.floor(math.log10(value_range / 5))
    distance = next(
        power_of_ten * factor
        for factor in (1, 2, 5, 10)
        if power_of_ten * factor * 5 >= value_range * 0.999
    )
    first_multiple = math.floor(lowest / distance + 1e-9)
    last_multiple = math.ceil(highest / distance - 1e-9)
    return [
        multiple * distance
        for multiple in range(first_multiple, max(last_multiple, first_multiple + 1) + 1)
    ]


def _logarithmic_ticks(lowest: float, highest: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten that enclose the range.

    If there would be many, only the powers are returned.
    """
    first_power = math.floor(math.log10(lowest))
    last_power = math.ceil(math.log10(highest) + 1e-9)
    factors = (1, 2, 5) if last_power - first_power < 4 else (1,)
    tick_values = [
        factor * 10.0**power for power in range(first_power, last_power + 1) for factor in factors
    ]
    first_index = max(
        index for index, tick_value in enumerate(tick_values) if tick_value <= lowest * 1.000001
    )
    last_index = min(
        (index for index, tick_value in enumerate(tick_values) if tick_value >= highest * 0.999999),
        default=len(tick_values) - 1,
    )
    return tick_values[first_index : max(last_index, first_index + 1) + 1]


def _decimals(distance: float) -> int:
    return max(0, -math.floor(math.log10(distance) + 1e-9))


class _Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def area(self) -> float:
        return (self.right - self.left) * (self.bottom - self.top)

    def overlap(self, other: _Box) -> float:
        """Return the area that two rectangles share."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, width) * max(0.0, height)


class _Labels:
    """Places a label beside each point, where it covers the least of other labels and points."""

    def __init__(self, points: list[tuple[float, float]], panel_width: float):
        self.occupied = [_Box(x - 5, y - 5, x + 5, y + 5) for x, y in points]
        self.plot = _Box(LEFT, TOP - 12, panel_width - 2, HEIGHT - BOTTOM)

    def place_label(self, point_x: float, point_y: float, label: str) -> str:
        label_width = LETTER_WIDTH * len(label)
        positions = []
        for vertical_offset in (0, -12, 12, -24, 24, -36, 36):
            positions.append((point_x + 8, point_y + 4 + vertical_offset))
            positions.append((point_x - 8 - label_width, point_y + 4 + vertical_offset))
        positions.append((point_x - label_width / 2, point_y - 10))
        positions.append((point_x - label_width / 2, point_y + 18))
        boxes = [
            _Box(left - 4, baseline - 10, left + label_width + 4, baseline + 3)
            for left, baseline in positions
        ]
        areas = [self._covered_area(box) for box in boxes]
        best_index = areas.index(min(areas))
        self.occupied.append(boxes[best_index])
        left, baseline = positions[best_index]
        text = _text_element(left, baseline, label)
        if abs(baseline - 4 - point_y) < 24:
            return text
        ends = (left - 2, left + label_width + 2)
        line_end = min(ends, key=lambda end: abs(end - point_x))
        # A line connects a distant label with its point.
        line = f"M{point_x:.1f} {point_y:.1f}L{line_end:.1f} {baseline - 4:.1f}"
        return f'<path class="grid" d="{line}"/>{text}'

    def _covered_area(self, box: _Box) -> float:
        """Return the area of other labels and points under a box, and its area outside the plot."""
        outside = box.area() - box.overlap(self.plot)
        return outside + sum(box.overlap(other) for other in self.occupied)


# ---- bars ----------------------------------------------------------------------------------------


def bars(
    title: str,
    bar_names: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    unit: str,
    width: float = WIDTH,
) -> Panel:
    """Draw horizontal bars: for each name one bar of each series, with its value beside it.

    A value of None was not measured and becomes a dash.
    """
    known_values = [value for values in series.values() for value in values if value is not None]
    if (
        not known_values
        or min(known_values) < 0
        or not all(map(math.isfinite, known_values))
        or any(len(values) != len(bar_names) for values in series.values())
    ):
        raise OctavoError(
            f"the chart {title!r} needs a finite number that is not negative, or None, for each of "
            f"{len(bar_names)} names"
        )
    largest = max(known_values) or 1.0
    decimals = _decimals(max(known_values) / 100) if max(known_values) else 0
    bar_left = 26 + LETTER_WIDTH * max(map(len, bar_names))
    max_bar_length = width - bar_left - 24 - LETTER_WIDTH * len(f"{largest:,.{decimals}f}")
    elements = [_text_element(14, 22, f"{title}, {unit}", "title")]
    bar_top = 38.0
    if len(series) > 1:
        elements.append(_legend([Series(series_name, ()) for series_name in series], 14, 42))
        bar_top = 54.0
    for row_index, bar_name in enumerate(bar_names):
        name_baseline = bar_top + BAR_HEIGHT * len(series) / 2 + 4
        elements.append(_text_element(bar_left - 10, name_baseline, bar_name, "", "end"))
        for index, values in enumerate(series.values()):
            value = values[row_index]
            bar_length = 0.0 if value is None else max_bar_length * value / largest
            elements.append(
                f'<rect class="f{index % COLOUR_COUNT}" x="{bar_left:.1f}" y="{bar_top:.1f}" '
                f'width="{bar_length:.1f}" height="{BAR_HEIGHT - 2}" rx="2"/>'
            )
            label = "–" if value is None else f"{value:,.{decimals}f}"
            label_left = bar_left + bar_length + 6
            elements.append(_text_element(label_left, bar_top + BAR_HEIGHT / 2 + 3, label))
            bar_top += BAR_HEIGHT
        bar_top += BAR_GAP
    return Panel(width, bar_top + 8, "\n".join(element for element in elements if element))


# ---- texts and lines -----------------------------------------------------------------------------


def _legend(series: Sequence[Series], entry_left: float, baseline: float) -> str:
    elements = []
    for index, entry in enumerate(series):
        elements.append(
            f'<circle class="f{index % COLOUR_COUNT}" cx="{entry_left + 4:.1f}" '
            f'cy="{baseline - 4:.1f}" r="4"/>'
        )
        elements.append(_text_element(entry_left + 13, baseline, entry.name))
        entry_left += 30 + LETTER_WIDTH * len(entry.name)
    return "".join(elements)


def _grid_line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="grid" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text_element(
    left: float, baseline: float, content: str, css_class: str = "", text_anchor: str = ""
) -> str:
    css_class = f' class="{css_class}"' if css_class else ""
    text_anchor = f' text-anchor="{text_anchor}"' if text_anchor else ""
    return (
        f'<text x="{left:.1f}" y="{baseline:.1f}"{css_class}{text_anchor}>{escape(content)}</text>'
    )
