"""/livez on a port and in threads of its own: it answers whatever the event loop does. Standard library only.

200 while the loop was seen running of late; 503 once it has stood still for so long that a new process is better.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from octavo.serve.lag import Seen

STUCK = 60.0  # seconds
PATIENCE = 1.0  # seconds that a client has for its request
CLIENTS = 64  # at a time


class HealthServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # the library's 5 let a crowd of connections cost a probe a second

    def __init__(self, address: tuple[str, int], seen: Seen):
        self.seen = seen
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
        """A client that leaves is none of ours."""


class Handler(BaseHTTPRequestHandler):
    server: HealthServer
    timeout = PATIENCE
    server_version = "octavo"
    sys_version = ""

    def do_GET(self) -> None:
        late = time.monotonic() - self.server.seen.last
        known = self.path == "/livez"
        state = {
            "state": "stuck" if late > STUCK else "alive",
            "loop_late_s": round(max(late, 0.0), 3),
        }
        body = json.dumps(state if known else {"error": "only /livez is here"}).encode()
        self.send_response(404 if not known else 503 if late > STUCK else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Probes are not worth a line."""
