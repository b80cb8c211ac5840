"""Serves the files of the live page, which are read from octavo/web once.

The files contain nothing about the state of the server.
"""

from __future__ import annotations

from pathlib import Path

from octavo.serve.http.exchange import Exchange

FOLDER = Path(__file__).parents[2] / "web"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
PAGE = {
    "/" if file.name == "index.html" else f"/web/{file.name}": (
        file.read_bytes(),
        TYPES[file.suffix],
    )
    for file in sorted(FOLDER.iterdir())
    if file.suffix in TYPES
}  # path -> (content, type)
HEADERS = {
    "cache-control": "no-cache",  # After an upgrade, the page and the feed must match.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


async def send_page(exchange: Exchange) -> None:
    await exchange.send(*PAGE[exchange.scope["path"]], HEADERS)
