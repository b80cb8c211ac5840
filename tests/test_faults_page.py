"""docs/faults.md and the table of defects in docs/testing.md are maps: every line of them names
tests, and every test that they name exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "faults.md").read_text()
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def lines() -> list[list[str]]:
    """Return the cells of each line of the tables, except their heads."""
    cells_of_lines = [
        line.strip().strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("|")
    ]
    return [
        cells
        for cells in cells_of_lines
        if cells[0].strip() != "fault" and not cells[0].startswith("---")
    ]


def test_every_line_names_a_test() -> None:
    assert len(lines()) > 90
    assert [cells[0] for cells in lines() if len(cells) != 3 or not TEST.findall(cells[2])] == []


def test_every_test_that_is_named_is_there() -> None:
    named = TEST.findall(PAGE)
    assert [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).exists() or name not in names_in(path)
    ] == []
    assert len(set(named)) > 120


def test_every_defect_on_the_testing_page_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "testing.md").read_text()
    head = "| defect | tests |\n|---|---|\n"
    rows = page.partition(head)[2].partition("\n\n")[0].splitlines()
    assert len(rows) > 25
    for row in rows:
        named = TEST.findall(row)
        assert named, row
        for path, name in named:
            assert name in names_in(path), f"{path}::{name}"


def test_every_section_is_there_and_the_index_leads_to_it() -> None:
    assert re.findall(r"^## ([A-G])\. ", PAGE, re.MULTILINE) == list("ABCDEFG")
    assert "(faults.md)" in (ROOT / "docs" / "index.md").read_text()
