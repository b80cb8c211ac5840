"""The `octavo` command. commands.py lists the subcommands, and shared options are in options.py.

This module imports only what starts quickly, so that a status line appears at once. No module of
the package imports torch at the top.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
from typing import Any

from octavo.cli import status

# Options that answer at once.
QUICK = ("-h", "--help", "--version")


# Commands that run for days. Their log lines have the time.
COMMANDS_WITH_TIMESTAMPS = ("serve",)


class OneLine(logging.Formatter):
    """Formats a log record without its traceback, and with the message of the exception."""

    def __init__(self, has_time: bool = False):
        super().__init__()
        self.has_time = has_time

    def formatException(self, info: object) -> str:
        return ""

    def format(self, record: logging.LogRecord) -> str:
        reason = f": {record.exc_info[1]}" if record.exc_info and record.exc_info[1] else ""
        time = f"{self.formatTime(record, '%Y-%m-%d %H:%M:%S')} " if self.has_time else ""
        return f"{time}{record.levelname.lower()}: {record.getMessage()}{reason}"


def interrupt_again(lost_exception: sys.UnraisableHookArgs) -> None:
    """Repeat a Ctrl-C that arrived inside a callback of a library, such as numba's compiler. Python
    only prints such an exception and continues. Other lost exceptions are printed."""
    if lost_exception.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(lost_exception)
        return
    timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()


def main(program: str | None = None) -> None:
    """Run the command of sys.argv. Help texts and errors call it `program`."""
    arguments = sys.argv[1:]
    # Input may contain invalid bytes, and a terminal may lack some characters.
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if arguments and not any(option in arguments for option in QUICK):
        status.begin(f"octavo {arguments[0]}: starting")
    handler = logging.StreamHandler()
    if not os.environ.get("OCTAVO_DEBUG"):
        handler.setFormatter(
            OneLine(has_time=bool(arguments) and arguments[0] in COMMANDS_WITH_TIMESTAMPS)
        )
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    sys.unraisablehook = interrupt_again
    from octavo.cli.commands import COMMANDS, application

    is_known = bool(arguments) and arguments[0] in COMMANDS
    try:
        application(arguments[:1] if is_known else COMMANDS)(prog_name=program)
    finally:
        status.end()


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'octavo.cli' has no attribute {name!r}")
    from octavo.cli.commands import application

    app = application()
    globals()[name] = app
    return app
