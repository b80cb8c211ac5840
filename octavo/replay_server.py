"""Serves the live page with a recording, for `octavo replay` and `octavo lesson`. It needs only
Python's own packages.

It listens on a loopback address, and answers only requests for that address: a recording may have
text, and a web page elsewhere must not read it.
"""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from octavo.web_page import page_files, page_of_recording

LOOPBACK = "127.0.0.1"
NAMES = frozenset({LOOPBACK, "localhost"})  # host names of requests that are answered
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
MAX_BODY = 2**16
Answer = Callable[[bytes], bytes]  # body of a POST -> JSON


class ReplayServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self,
        recordings: list[bytes],
        port: int,
        lesson: str = "",
        answers: dict[str, Answer] | None = None,
    ):
        """The page opens the first recording. `lesson` is the text of a lesson, as JSON. `answers`
        are functions for POST requests, by path. Raises OSError if the port is in use."""
        super().__init__((LOOPBACK, port), ReplayHandler)
        self.files: dict[str, tuple[bytes, str]] = {
            **page_files(),
            "/": (page_of_recording(has_lesson=bool(lesson)), "text/html; charset=utf-8"),
        }
        for index, recording in enumerate(recordings):
            self.files[f"/recording-{index}"] = (recording, "application/x-ndjson")
        if lesson:
            self.files["/lesson"] = (lesson.encode(), "application/json")
        self.answers = answers or {}

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"


class ReplayHandler(BaseHTTPRequestHandler):
    server: ReplayServer

    def do_GET(self) -> None:
        file = self.server.files.get(self.path.partition("?")[0])
        if self._is_foreign() or file is None:
            return self._reply(404, b"not found\n", "text/plain")
        self._reply(200, *file)

    def do_POST(self) -> None:
        answer = self.server.answers.get(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        origin = self.headers.get("Origin")
        is_same_origin = (
            origin is None or origin.rstrip("/") == f"http://{self.headers.get('Host')}"
        )
        if self._is_foreign() or answer is None or not is_same_origin or length > MAX_BODY:
            return self._reply(404, b"not found\n", "text/plain")
        self._reply(200, answer(self.rfile.read(length)), "application/json")

    def _is_foreign(self) -> bool:
        """Return whether the request names another host (DNS rebinding)."""
        return self.headers.get("Host", "").partition(":")[0] not in NAMES

    def _reply(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not logged."""
