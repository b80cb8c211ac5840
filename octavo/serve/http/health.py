"""Serves /livez on a separate port, in threads, so that a blocked event loop cannot delay it.

The status is 200 while the event loop runs, and 503 when it has been blocked for so long that the
process should be restarted. This module uses only the standard library.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from octavo.serve.front.loop_watchdog import LoopWatchdog

STUCK = 60.0  # The event loop counts as stuck when it is blocked for this many seconds.
REQUEST_SECONDS = 1.0  # A client has this time to send its request.
CLIENTS = 64  # The number of clients that are served at a time.


class HealthServer(ThreadingHTTPServer):
    daemon_threads = True
    # With the library's default of 5, many connections at once delay a probe by a second.
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], watchdog: LoopWatchdog):
        self.watchdog = watchdog
        self.room = threading.BoundedSemaphore(CLIENTS)
        super().__init__(address, Handler)

    def begin(self) -> None:
        threading.Thread(target=self.serve_forever, name="health", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: usually the client has disconnected."""


class Handler(BaseHTTPRequestHandler):
    server: HealthServer
    timeout = REQUEST_SECONDS
    server_version = "octavo"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path == "/livez":
            blocked_seconds = self.server.watchdog.lateness
            is_stuck = blocked_seconds > STUCK
            status = 503 if is_stuck else 200
            reply: dict[str, Any] = {
                "state": "stuck" if is_stuck else "alive",
                "loop_late_s": round(blocked_seconds, 3),
            }
        else:
            status = 404
            reply = {"error": "this port serves only /livez"}
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because probes are frequent."""
