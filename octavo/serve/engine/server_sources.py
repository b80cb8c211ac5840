"""Finds the lines of source code in which the server decides about requests outside the scheduler.

The live page shows these lines when it explains a refusal, or a request whose structured output is
being compiled. The files are read as text, because the engine process does not import the API
server.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from octavo.core.decision_sources import SourceLine, lines_with

PACKAGE = Path(__file__).parents[2]
# The code of an error, or "compiling" -> the file, and the beginning of the statement.
DECIDED_IN = {
    "compiling": ("serve/engine/engine_process.py", "self.compiling[message.id] ="),
    "context_length_exceeded": ("serve/api/validate.py", "raise prompt_too_long("),
    "kv_capacity_exceeded": ("serve/api/validate.py", "raise invalid_field(param, str(KVCapacity"),
    "queue_full": ("serve/front/queue_bound.py", "raise queue_full("),
    "queue_timeout": ("serve/front/engine_client.py", "call.fail(api_errors.queue_timeout("),
    "deadline_exceeded": (
        "serve/front/engine_client.py",
        "call.fail(api_errors.deadline_exceeded(",
    ),
    "rate_limit_exceeded": ("serve/front/keys.py", '"rate_limit_exceeded",'),
}


@cache
def server_sources() -> dict[str, SourceLine]:
    """Return the lines by the keys of DECIDED_IN.

    The result is empty if the files are not installed as source code.
    """
    source_lines: dict[str, SourceLine] = {}
    for key, (path, statement) in DECIDED_IN.items():
        file = PACKAGE / path
        if not file.exists():
            continue
        lines = file.read_text(encoding="utf-8").splitlines()
        places = lines_with(f"octavo/{path}", lines, re.compile(re.escape(statement)))
        if places:
            source_lines[key] = places[0]
    return source_lines
