"""The documentation is true: its code runs and prints what the page says, its links lead somewhere,
the files, options and classes it names exist.

A page's ```python blocks run in order in one namespace, in an empty directory, as a reader would
type them. An ```output block right after one is what it prints. `OCTAVO_DOCS=write pytest
tests/test_docs.py` writes down what is printed now.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parent.parent
TEMPLATE = ROOT / "docs" / "decisions" / "0000-template.md"  # its links are blanks
PAGES = [ROOT / "README.md", *sorted(set(ROOT.glob("docs/**/*.md")) - {TEMPLATE})]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
MOST_NOT_RUN = 4
# compiled and not run here, and other pages' blocks with the server's address too:
NEEDS_A_SERVER = {"docs/serving.md"}
ADDRESS = "127.0.0.1:8000"  # tests/serve/test_snippets.py runs them all against a server

FENCED = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]\n]*\]\((?P<target>[^)\s]+)\)")
# A path below the root (`octavo/core/blocks.py`, `tests/`, `octavo/ops/__init__.py:select`) or a
# dotted name.
FILE = re.compile(r"`(?P<path>(?:octavo|tests|docs)/[\w./-]*)(?:::?\w+)?`")
MODULE = re.compile(r"`(?P<name>(?:octavo|tests)(?:\.\w+)+)(?:\(\))?`")


class Block(NamedTuple):
    kind: str  # the word after the three backticks
    body: str
    fence: int  # index of the opening fence in the page
    start: int  # index of the body
    end: int  # index of the end of the body
    next: int  # index after the closing fence


def blocks(text: str) -> Iterator[Block]:
    for match in FENCED.finditer(text):
        yield Block(
            match["kind"].strip(),
            match["body"],
            match.start(),
            match.start("body"),
            match.end("body"),
            match.end(),
        )


def prose(text: str) -> str:
    return FENCED.sub("", text)


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def run(page: Path, namespace: dict[str, object]) -> str:
    """Run the page's code, and return the page with the real output in place of its output blocks."""
    text = page.read_text(encoding="utf-8")
    page_blocks = list(blocks(text))
    printed, at = [], 0
    for i, block in enumerate(page_blocks):
        if block.kind != "python":
            continue
        lines = text.count("\n", 0, block.start)
        # so that a traceback names the page's line
        code = compile("\n" * lines + block.body, str(page), "exec")
        if str(page.relative_to(ROOT)) in NEEDS_A_SERVER or ADDRESS in block.body:
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, namespace)
        if i + 1 < len(page_blocks) and page_blocks[i + 1].kind == "output":
            after = page_blocks[i + 1]
            assert not text[block.next : after.fence].strip(), (
                f"{page}: words between code and its output"
            )
            printed += [
                text[at : after.start],
                "".join(f"{line}\n" for line in lines_of(out.getvalue())),
            ]
            at = after.end
    return "".join(printed) + text[at:]


@pytest.mark.parametrize("name", NAMES)
def test_the_code_runs_and_prints_what_the_page_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.model import registry

    page = ROOT / name
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    # a page may register an architecture
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    default = torch.get_default_dtype()
    true = run(page, {"__name__": "__main__"})
    assert torch.get_default_dtype() == default
    if os.environ.get("OCTAVO_DOCS") == "write":
        page.write_text(true, encoding="utf-8")
    assert lines_of(page.read_text(encoding="utf-8")) == lines_of(true)


def test_few_blocks_are_left_out() -> None:
    left_out = [
        name
        for name, page in zip(NAMES, PAGES, strict=True)
        for b in blocks(page.read_text())
        if b.kind == "python no-run"
    ]
    assert len(left_out) <= MOST_NOT_RUN, left_out


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_closed_and_outputs_follow_code(name: str) -> None:
    text = (ROOT / name).read_text()
    assert text.count("\n```") % 2 == 0, "a fence is not closed"
    kinds = [block.kind for block in blocks(text)]
    assert {kind for kind in kinds if kind.startswith("py")} <= {"python", "python no-run"}
    for before, kind in zip(["", *kinds], kinds, strict=False):
        assert kind != "output" or before == "python", (
            "an output block must follow the code that prints it"
        )


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files_and_headings(name: str) -> None:
    page = ROOT / name
    for match in LINK.finditer(prose(page.read_text())):
        target, _, heading = match["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{name} links to {target}"
        assert not heading or heading in anchors(path), f"{name} links to {target}#{heading}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings: lower case, dashes between words, no punctuation."""
    headings = re.findall(r"^#+ (.*)$", prose(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_files_and_modules_that_are_named_exist(name: str) -> None:
    text = prose((ROOT / name).read_text())
    lost = [match["path"] for match in FILE.finditer(text) if not (ROOT / match["path"]).exists()]
    lost += [match["name"] for match in MODULE.finditer(text) if not importable(match["name"])]
    assert lost == []


PYTHON_FILE = re.compile(r"(?P<path>[\w/]+\.py)(?P<names>(?::\w+(?:\.\w+)?)?)")


def test_the_steps_of_a_request_name_files_and_code_that_exist() -> None:
    (diagram,) = blocks((ROOT / "docs" / "request.md").read_text())
    places = list(PYTHON_FILE.finditer(diagram.body))
    assert len(places) > 15
    for place in places:
        path = ROOT / "octavo" / place["path"]
        assert path.exists(), place[0]
        module = ast.parse(path.read_text(encoding="utf-8"))
        for name in filter(None, re.split(r"[:.]", place["names"])):
            assert defines(module, name), place[0]


def defines(module: ast.Module, name: str) -> bool:
    """Return whether a file defines a class, function or method of this name."""
    definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return any(isinstance(node, definition) and node.name == name for node in ast.walk(module))


def test_the_packages_of_the_server_name_files_that_exist() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    table = text.split("lists the packages and where to start in each:\n\n")[1].split("\n\n")[0]
    for row in table.splitlines()[2:]:
        package = FILE.search(row)
        assert package is not None, row
        names = re.findall(r"`(\w+\.py)`", row)
        assert names, row
        lost = [name for name in names if not (ROOT / package["path"] / name).exists()]
        assert lost == [], row


def importable(name: str) -> bool:
    """Return whether this is a module, a name in a module, or an attribute of such a name."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


def test_every_page_is_reached_from_the_index_and_every_decision_from_their_list() -> None:
    for folder in (ROOT / "docs", ROOT / "docs" / "decisions"):
        index = folder / ("index.md" if folder.name == "docs" else "README.md")
        linked = {
            (folder / match["target"].partition("#")[0]).resolve()
            for match in LINK.finditer(index.read_text())
        }
        assert {page.name for page in folder.glob("*.md") if page != index} <= {
            page.name for page in linked
        }


def test_options_on_the_command_line_page_exist() -> None:
    typer = pytest.importorskip("typer")
    from octavo.cli import app

    def options(command: object) -> set[str]:
        own = {name for p in command.params for name in p.opts}  # type: ignore[attr-defined]
        return own.union(*(options(c) for c in getattr(command, "commands", {}).values()))

    known = options(typer.main.get_command(app)) | {"--help"}
    text = (ROOT / "docs" / "cli.md").read_text()
    shell = "".join(block.body for block in blocks(text) if block.kind == "sh")
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", prose(text) + shell))
    assert named <= known, sorted(named - known)
    assert len(named) > 10


MOST_LINES_OF_THE_READING_PATH = 2000


def reading_path() -> tuple[list[str], list[str]]:
    """Return the files that docs/core.md tells its readers to read, and those to take on trust."""
    section = (ROOT / "docs" / "core.md").read_text().split("## The files to read")[1]
    tables = re.split(r"^\|[-|]+\|$", section.split("\n## ")[0], flags=re.MULTILINE)[1:]
    path, trusted = ([match["path"] for match in FILE.finditer(table)] for table in tables)
    return path, trusted


def test_the_reading_path_of_the_core_is_as_short_as_the_pages_say() -> None:
    path, _ = reading_path()
    lines = sum(len((ROOT / name).read_text().splitlines()) for name in path)
    assert lines <= MOST_LINES_OF_THE_READING_PATH
    hundreds = (lines // 100 + 1) * 100
    for page in ("README.md", "docs/index.md", "docs/core.md"):
        text = (ROOT / page).read_text()
        stated = re.findall(r"fewer than ([\d,]+)\s+lines", text)
        assert stated == [f"{hundreds:,}"], f"{page}: the reading path has {lines:,} lines"
    index = (ROOT / "docs" / "index.md").read_text().split("Its reading path is ")[1]
    assert [match["path"] for match in FILE.finditer(index.split("\n\n")[0])] == path


def test_the_reading_path_of_the_core_is_complete() -> None:
    """Every module that it imports is on it or among those to take on trust."""
    path, trusted = reading_path()
    imported = set()
    for name in path:
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "octavo.core":
                imported |= {f"octavo/core/{alias.name}.py" for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("octavo."):
                imported.add((node.module or "").replace(".", "/") + ".py")
    assert imported - set(path) == set(trusted)


MOST_LINES_OF_A_LOG_ENTRY = 15


def test_entries_of_the_log_are_short_dated_and_newest_first() -> None:
    entries = re.split(r"^## ", (ROOT / "docs" / "LOG.md").read_text(), flags=re.MULTILINE)[1:]
    dates = []
    for entry in entries:
        title, *body = entry.rstrip().splitlines()
        assert len(body) <= MOST_LINES_OF_A_LOG_ENTRY, f"{title}: {len(body)} lines"
        dated = re.match(r"\*(?P<date>\d{4}-\d\d-\d\d)(, [0-9a-f]{7})+\.\* ", body[0])
        assert dated, f"{title}: begin with *date, commit.*"
        dates.append(dated["date"])
    assert dates == sorted(dates, reverse=True)
