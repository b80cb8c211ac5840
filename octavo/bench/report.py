"""Turns result files into one HTML page that needs nothing else: tables, charts and sources.

    write_report([Path("results")], Path("report.html"))

The page has a section for each result, with the same tables and charts as the bench itself
(views.py). A file without a view, or that cannot be read, is named at the end of the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import NamedTuple

from octavo.bench.picture import STYLE as CHART_STYLE
from octavo.bench.picture import svg
from octavo.bench.views import VIEWS, Result, ResultTable, source_line, view_of
from octavo.errors import InvalidRequest

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Octavo: measurements</title>
<style>
:root {{ color-scheme: light dark; --line: #d0d7de; --faint: #57606a; }}
@media (prefers-color-scheme: dark) {{ :root {{ --line: #30363d; --faint: #9aa4af; }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; }}
body {{ padding: 0 1rem; }}
table {{ border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }}
th, td {{ padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; }}
th.left, td.left {{ text-align: left; }}
.source, .partial {{ color: var(--faint); }}
.partial {{ font-weight: 600; }}
svg {{ max-width: 100%; height: auto; }}
code {{ font-size: .9em; }}
</style>
</head>
<body>
<h1>Measurements</h1>
<ul>
{index}
</ul>
{sections}
</body>
</html>
"""


class LoadedResult(NamedTuple):
    path: Path
    result: Result


def find_files(paths: Iterable[Path]) -> list[Path]:
    """Return the result files among some files and directories."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(path.glob("*.json"))
        elif path.exists():
            files.append(path)
        else:
            raise InvalidRequest(f"there is no result file {path}", "results")
    return files


def load_results(paths: Iterable[Path]) -> tuple[list[LoadedResult], dict[str, str]]:
    """Return the results that can be shown, and why others cannot."""
    loaded = []
    skipped: dict[str, str] = {}
    for path in find_files(paths):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            skipped[path.name] = f"it cannot be read: {error}"
            continue
        name = result.get("bench") if isinstance(result, dict) else None
        if name in VIEWS:
            loaded.append(LoadedResult(path, result))
        else:
            skipped[path.name] = f"there is no view of the bench {name!r}"
    return loaded, skipped


def as_html(text: str) -> str:
    """Return a cell or a sentence, in which Markdown marks code and what is strong."""
    marked = re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*\*([^*]*)\*\*", r"<strong>\1</strong>", marked)


def table_html(table: ResultTable) -> str:
    def row_html(cells: Iterable[str], tag: str) -> str:
        cells_html = []
        for number, cell in enumerate(cells):
            side = ' class="left"' if number in table.left else ""
            cells_html.append(f"<{tag}{side}>{as_html(cell)}</{tag}>")
        return f"<tr>{''.join(cells_html)}</tr>"

    title = f"<h3>{as_html(table.title)}</h3>" if table.title else ""
    body = "\n".join(row_html(row, "td") for row in table.rows)
    return f"{title}<table>\n{row_html(table.columns, 'th')}\n{body}\n</table>"


def section_html(loaded: LoadedResult, anchor: str) -> str:
    result = loaded.result
    view = view_of(result)
    elements = [f'<section id="{anchor}">', f"<h2>{escape(title_of(loaded))}</h2>"]
    elements.append(f'<p class="source">{escape(source_line([result]))}</p>')
    if result.get("partial"):
        reason = result.get("stopped", "something was not measured")
        elements.append(f'<p class="partial">Partial result: {escape(str(reason))}</p>')
    if result.get("rows") or result.get("results"):
        elements += [table_html(table) for table in view.tables(result)]
        elements += [f"<p>{as_html(note)}</p>" for note in view.notes(result)]
        # One picture each, so that a narrow window shows them below each other.
        elements += [svg(panel) for panel in view.panels(result)]
    elements += [
        f"<p>Not measured: {escape(name)}: {escape(reason)}</p>"
        for name, reason in result.get("skipped", {}).items()
    ]
    return "\n".join([*elements, "</section>"])


def title_of(loaded: LoadedResult) -> str:
    result = loaded.result
    machine = result["provenance"]["machine"]
    hardware = machine.get("gpu") or machine["cpu"]
    model = result.get("model") or "the embedded model"
    return f"{result['bench']}: {model} on {hardware}"


def page_html(results: list[LoadedResult], skipped: dict[str, str]) -> str:
    index = "\n".join(
        f'<li><a href="#r{number}">{escape(title_of(loaded))}</a></li>'
        for number, loaded in enumerate(results)
    )
    sections = [section_html(loaded, f"r{number}") for number, loaded in enumerate(results)]
    # Every chart has the same style sheet; the page needs it once.
    text = "\n".join(sections)
    text = CHART_STYLE + text.replace(CHART_STYLE, "")
    for name, reason in skipped.items():
        text += f'\n<p class="source">Left out: {escape(name)}: {escape(reason)}</p>'
    return PAGE.format(index=index, sections=text)


def write_report(paths: Iterable[Path], target: Path) -> tuple[int, dict[str, str]]:
    """Write the page. Returns how many results it has, and why others are left out."""
    results, skipped = load_results(paths)
    if not results:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise InvalidRequest(f"no result can be shown ({reasons or 'no files'})", "results")
    target.write_text(page_html(results, skipped), encoding="utf-8")
    return len(results), skipped
