"""/livez on a port of its own, answered by threads: it works whatever the event loop does. Standard
library only.

The answer is 200 while the event loop runs, and 503 once it has been blocked for so long that a new
process is better.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from octavo.serve.front.loop_watchdog import LoopWatchdog

STUCK = 60.0  # seconds
REQUEST_SECONDS = 1.0  # that a client has to send its request
CLIENTS = 64  # that are answered at a time


class HealthServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = (
        128  # with the library's 5, a crowd of connections delays a probe by a second
    )

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
        """A client that leaves is no error of the server."""


class Handler(BaseHTTPRequestHandler):
    server: HealthServer
    timeout = REQUEST_SECONDS
    server_version = "octavo"
    sys_version = ""

    def do_GET(self) -> None:
        late = self.server.watchdog.late
        known = self.path == "/livez"
        state = {
            "state": "stuck" if late > STUCK else "alive",
            "loop_late_s": round(late, 3),
        }
        body = json.dumps(state if known else {"error": "this port answers /livez alone"}).encode()
        self.send_response(404 if not known else 503 if late > STUCK else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Probes are not logged."""
