"""The files of the live page, and the page as one file with a recording inside.

The scripts are modules that import each other by relative paths. In a single file, an import map
gives each of them an address that contains its text, so nothing is translated or joined.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "web"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
PLACEHOLDER = "@RECORDING@"
IMPORT = re.compile(r'(from|import) "\./([\w.-]+)"')
# The content security policy of a page in a single file: it loads nothing from elsewhere.
SINGLE_FILE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)


@cache
def page_files() -> dict[str, tuple[bytes, str]]:
    """Return path -> (content, type) of the files that a browser loads.

    One of the files is the page as a single file without a recording. To save a recording, the page
    puts the recording into this file."""
    files = {
        "/" if file.name == "index.html" else f"/web/{file.name}": (
            file.read_bytes(),
            TYPES[file.suffix],
        )
        for file in sorted(FOLDER.iterdir())
        if file.suffix in TYPES
    }
    empty = _single_file([PLACEHOLDER], "Octavo, recording", lesson="")
    return files | {"/web/single-file.html": (empty.encode(), TYPES[".html"])}


def page_of_recording(has_lesson: bool = False) -> bytes:
    """Return the page that loads ./recording-0 and, if there is one, ./lesson."""
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    source = "lesson" if has_lesson else "recording"
    return page.replace("<body>", f'<body data-source="{source}">').encode()


def single_file(recordings: list[bytes], title: str = "Octavo, recording", lesson: str = "") -> str:
    """Return the page as one HTML file that shows a recording. `lesson` is the text of a lesson, as
    JSON. A lesson may have several recordings."""
    packed = [
        base64.b64encode(gzip.compress(recording, mtime=0)).decode() for recording in recordings
    ]
    return _single_file(packed, title, lesson)


def _single_file(packed: list[str], title: str, lesson: str) -> str:
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    parts = [
        f'<script type="text/plain" id="recording-{index}">{text}</script>'
        for index, text in enumerate(packed)
    ]
    if lesson:
        parts.append(f'<script type="application/json" id="lesson-text">{_inline(lesson)}</script>')
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    replaced = {
        "<title>Octavo, live</title>": f"<title>{html.escape(title)}</title>",
        '<meta charset="utf-8">': '<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{SINGLE_FILE_POLICY}">',
        '<link rel="stylesheet" href="./web/page.css">': f"<style>\n{style}</style>",
        '<script type="module" src="./web/page.js"></script>': f"{_import_map()}\n"
        '<script type="module">import "octavo/page.js";</script>',
        "</body>": "\n".join(parts) + "\n</body>",
    }
    for old, new in replaced.items():
        assert page.count(old) == 1, f"the page must contain {old} once"
        page = page.replace(old, new)
    return page


def _import_map() -> str:
    """Return the import map that gives each script an address with its text in it."""
    addresses = {}
    for file in sorted(FOLDER.glob("*.js")):
        script = IMPORT.sub(r'\1 "octavo/\2"', file.read_text(encoding="utf-8"))
        encoded = base64.b64encode(script.encode()).decode()
        addresses[f"octavo/{file.name}"] = f"data:text/javascript;base64,{encoded}"
    return f'<script type="importmap">{json.dumps({"imports": addresses})}</script>'


def _inline(text: str) -> str:
    """Return JSON that may stand inside a script element."""
    return text.replace("<", "\\u003c")
