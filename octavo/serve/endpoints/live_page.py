"""The live page's files, from octavo/web: read once, served as they are. Nothing of the server's
state is in them."""

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
}  # path -> content, type
HEADERS = {
    "cache-control": "no-cache",  # after an upgrade the page and the feed are of one version
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


async def send_page(exchange: Exchange) -> None:
    await exchange.send(*PAGE[exchange.scope["path"]], HEADERS)
