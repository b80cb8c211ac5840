"""Charts: sound XML, everything inside its plot, text as it was given."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.bench.picture import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Series,
    bars,
    points,
    svg,
)
from octavo.errors import OctavoError

SVG = "{http://www.w3.org/2000/svg}"
numbers = st.floats(-1e6, 1e6, allow_subnormal=False).map(lambda v: round(v, 6))
positive = st.floats(1e-6, 1e9)
places = st.lists(st.tuples(numbers, positive), min_size=1, max_size=8)


def words(text: str) -> list[str]:
    return [node.text or "" for node in ET.fromstring(text).iter(f"{SVG}text")]


@settings(max_examples=150, deadline=None)
@given(st.lists(places, min_size=1, max_size=8), st.booleans(), st.booleans(), st.booleans())
def test_all_points_and_ticks_lie_inside_the_plot(
    series: list[list[tuple[float, float]]], joined: bool, log: bool, zero: bool
):
    drawn = [
        Series(f"s{i}", points, [f"p{j}" for j in range(len(points))])
        for i, points in enumerate(series)
    ]
    tree = ET.fromstring(svg(points("t", drawn, Axis("x"), Axis("y", log, zero), joined)))
    marks = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in tree.iter(f"{SVG}circle")][
        len(series) * (len(series) > 1) :
    ]
    assert len(marks) == sum(map(len, series))
    lines = [
        [float(line.get(k, 0)) for k in ("x1", "y1", "x2", "y2")]
        for line in tree.iter(f"{SVG}line")
    ]
    for x, y in [*marks, *((a, b) for a, b, _, _ in lines), *((c, d) for _, _, c, d in lines)]:
        assert LEFT - 0.1 <= x <= WIDTH - RIGHT + 0.1 and TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1
    assert 3 <= len(lines) <= 24
    assert len(list(tree.iter(f"{SVG}polyline"))) == joined * len(series)


def test_larger_is_further_right_and_further_up():
    tree = ET.fromstring(svg(points("t", [Series("", [(1, 10), (2, 20)])], Axis("x"), Axis("y"))))
    (x1, y1), (x2, y2) = (
        (float(c.get("cx", 0)), float(c.get("cy", 0))) for c in tree.iter(f"{SVG}circle")
    )
    assert x1 < x2 and y1 > y2


def test_a_log_axis_gives_equal_factors_equal_room():
    tree = ET.fromstring(
        svg(
            points(
                "t",
                [Series("", [(1, 1), (10, 1), (100, 1)])],
                Axis("x", is_logarithmic=True),
                Axis("y"),
            )
        )
    )
    a, b, c = (float(c.get("cx", 0)) for c in tree.iter(f"{SVG}circle"))
    assert b - a == pytest.approx(c - b, abs=0.2)


def test_text_is_escaped_and_complete():
    odd = '<b>&"x"'
    text = svg(
        points(
            odd,
            [Series(odd, [(0, 1)], [odd]), Series("b", [(1, 2)])],
            Axis(odd + "x"),
            Axis(odd + "y"),
        )
    )
    assert {odd, odd + "x", odd + "y"} <= set(words(text))
    assert odd in words(svg(bars("t", [odd], {"a": [1.0]}, odd)))


def test_labels_of_points_near_each_other_do_not_cover_each_other():
    near = [(1.0, 10.0), (1.001, 10.05), (1.002, 10.0), (1.0, 9.9), (3.0, 30.0)]
    names = ["int4-g32-asym", "int4-g64-asym", "int8-g32", "int8", "at the right edge"]
    tree = ET.fromstring(svg(points("t", [Series("", near, names)], Axis("x"), Axis("y"))))
    boxes = []
    for node in tree.iter(f"{SVG}text"):
        if node.text in names:
            x, y = float(node.get("x", 0)), float(node.get("y", 0))
            boxes.append((x, y - 9, x + 6 * len(node.text), y + 2))
    assert len(boxes) == len(names) and all(c <= WIDTH for _, _, c, _ in boxes)
    for i, (a, b, c, d) in enumerate(boxes):
        assert all(c <= x or z <= a or d <= y or w <= b for x, y, z, w in boxes[:i])


def test_bars_are_as_long_as_their_values_and_say_them():
    text = svg(
        bars(
            "speed",
            ["one", "two", "three"],
            {"a": [50.0, 100.0, None], "b": [25.0, 0.0, 1.0]},
            "tok/s",
        )
    )
    long = [float(r.get("width", 0)) for r in ET.fromstring(text).iter(f"{SVG}rect") if r.get("rx")]
    a1, b1, a2, b2, a3, _ = long
    assert (
        a2 == pytest.approx(2 * a1, abs=0.2)
        and a1 == pytest.approx(2 * b1, abs=0.2)
        and b2 == a3 == 0
    )
    assert {"speed, tok/s", "50", "100", "25", "–", "a", "b"} <= set(words(text)) and max(
        long
    ) < WIDTH


def test_panels_stand_side_by_side():
    one = bars("t", ["a"], {"": [1.0]}, "s")
    tree = ET.fromstring(svg(one, one))
    assert float(tree.get("width", 0)) == 2 * one.width and "translate(560 0)" in [
        g.get("transform") for g in tree.iter(f"{SVG}g")
    ]


def test_every_colour_is_there_in_both_themes():
    light, dark = svg(bars("t", ["a"], {"": [1.0]}, "s")).split("@media(prefers-color-scheme:dark)")
    assert re.findall(r"\.[fs]\d|\.paper|\.grid|\.faint", light) == re.findall(
        r"\.[fs]\d|\.paper|\.grid|\.faint", dark
    )


@pytest.mark.parametrize("bad", [[], [(float("nan"), 1.0)], [(1.0, float("inf"))]])
def test_what_cannot_be_drawn_is_refused(bad: list[tuple[float, float]]):
    with pytest.raises(OctavoError, match="finite"):
        points("t", [Series("", bad)], Axis("x"), Axis("y"))
    with pytest.raises(OctavoError, match="logarithmic"):
        points("t", [Series("", [(0.0, 1.0)])], Axis("x", is_logarithmic=True), Axis("y"))
    for values in ([-1.0], [1.0, 2.0], [None], [float("nan")]):
        with pytest.raises(OctavoError, match="not negative"):
            bars("t", ["a"], {"": values}, "s")


@pytest.mark.parametrize(
    ("picture", "first"), [("quant-cpu.svg", "none (float32)"), ("quant-h200.svg", "none (bf16)")]
)
def test_the_pictures_in_the_docs_show_the_numbers_of_their_tables(picture: str, first: str):
    docs = Path(__file__).parents[2] / "docs"
    lines = (docs / "quantisation.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} | "))
    table = [line.split("|")[1:-1] for line in lines[start : lines.index("", start)]]
    shown = words((docs / "pictures" / picture).read_text())
    columns = (1, 3, 5) if "h200" in picture else (3, 4)  # what the bars are
    for row in table:
        for value in (row[column].strip().removesuffix(" GB") for column in columns):
            assert (value or "–") in shown, (row[0], value)
