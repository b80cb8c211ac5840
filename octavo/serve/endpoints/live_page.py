"""Serves the files of the live page (octavo/web_page.py), which are read once.

The files contain nothing about the state of the server.
"""

from __future__ import annotations

from octavo.serve.http.exchange import Exchange
from octavo.web_page import page_files

PAGE = page_files()  # path -> (content, type)
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
