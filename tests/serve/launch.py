"""Runs a server with what the command line does not offer: tight limits, quick watchdogs, another engine program, and a loop
that a SIGUSR2 blocks.

python -m tests.serve.launch PORT '{"limits": {"header_seconds": 0.3}, "stall_dump": 0.5}'
"""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Any

from octavo.serve.config import ServeConfig
from octavo.serve.limits import Limits
from octavo.serve.server import Server


def main(port: str, text: str) -> None:
    options: dict[str, Any] = json.loads(text)
    program = options.pop("program", None)
    limits = Limits(**options.pop("limits", {}))
    found = Server(ServeConfig(port=int(port), limits=limits, **options))
    if program is not None:
        found.front.client.supervisor.command = (sys.executable, "-m", program)
    signal.signal(signal.SIGUSR2, lambda *_: time.sleep(2.5))  # in the loop's thread: it stands still
    found.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
