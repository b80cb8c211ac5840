"""Pictures of measurements: SVG that a parser reads, in which values stand where they should."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from octavo.bench.picture import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, draw, svg, ticks
from octavo.errors import InvalidRequest

SVG = "{http://www.w3.org/2000/svg}"


def parsed(*charts: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(svg(list(charts)))


def test_ticks_are_round_and_enclose_what_is_drawn() -> None:
    assert ticks(0, 137) == [0, 50, 100, 150]
    assert ticks(0, 0.031) == pytest.approx([0, 0.01, 0.02, 0.03, 0.04])
    assert ticks(3.2, 450, log=True) == pytest.approx([2, 5, 10, 20, 50, 100, 200, 500])
    for low, high in ((0, 1), (0, 7), (0, 9.99), (5, 5), (-3, 12345), (1e-7, 3e-7)):
        found = ticks(low, high)
        assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 8


def test_a_line_goes_from_corner_to_corner() -> None:
    chart = parsed(Chart("t", "x", "y", {"a": [(0, 0), (10, 20)]}))
    points = chart.find(f".//{SVG}polyline").attrib["points"].split()  # type: ignore[union-attr]
    assert points == [f"{LEFT}.0,{HEIGHT - BOTTOM}.0", f"{WIDTH - RIGHT}.0,{TOP}.0"]


def test_bars_are_as_high_as_their_values_and_say_them() -> None:
    chart = parsed(Chart("t", "x", "y", {"a": [(0, 5), (1, 10)], "b": [(0, 10), (1, 2.5)]}, "bars", ["one", "two"]))
    bars = [rect for rect in chart.iter(f"{SVG}rect") if rect.attrib["y"] != "28"]
    heights = [float(rect.attrib["height"]) for rect in bars]
    assert [h / heights[1] for h in heights] == pytest.approx([0.5, 1, 1, 0.25], rel=0.01)
    texts = [text.text for text in chart.iter(f"{SVG}text")]
    assert {"one", "two", "a", "b", "2.5"} <= set(texts)


def test_points_on_a_log_scale_that_were_foretold_lie_on_the_diagonal() -> None:
    chart = parsed(Chart("t", "x", "y", {"a": [(1, 1), (10, 10), (100, 100)]}, "points", log=True, diagonal=True))
    circles = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in chart.iter(f"{SVG}circle")]
    (x1, y1), (x2, y2), (x3, y3) = circles
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2) and y1 - y2 == pytest.approx(y2 - y3, abs=0.2)


def test_names_are_text_and_never_markup() -> None:
    assert "<b>" not in "".join(parsed(Chart("<b>", "a & b", '"', {"</svg>": [(0, 1)]})).itertext()).replace("<b>", "", 1)


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="SVG"):
        draw([Chart("t", "x", "y", {"a": [(0, 1)]})], tmp_path / "a.png")
    with pytest.raises(InvalidRequest, match="nothing to draw"):
        svg([Chart("t", "x", "y", {"a": []})])
