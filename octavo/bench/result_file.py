"""The result of one run of a bench, which is saved after each row.

A result is a dictionary: the name of the bench, facts about the run, the measured rows, the skipped
parts with their reasons, and the origin (provenance.py). `partial` is true until the bench has
finished, and stays true if a part was skipped. The file is written again after each row, so an
interrupt, a crash or a signal loses at most one row.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from octavo.bench.provenance import provenance


class BenchRun:
    def __init__(self, bench: str, path: Path | None = None, **facts: Any):
        self.path = path
        self.result: dict[str, Any] = {
            "bench": bench,
            "partial": True,
            **facts,
            "rows": [],
            "skipped": {},
            "provenance": provenance(),
        }

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.result["rows"]
        return rows

    def add_row(self, **row: Any) -> None:
        self.rows.append(row)
        self.save()

    def set_fact(self, **facts: Any) -> None:
        """Record facts that all rows have in common."""
        self.result |= facts

    def skip(self, name: str, reason: str) -> None:
        """Record a part of the run that could not be measured, with the reason."""
        self.result["skipped"][name] = reason
        self.save()

    def finish(self) -> None:
        """Save the result of a complete run. It is partial only if something was skipped."""
        self.result["partial"] = bool(self.result["skipped"])
        self.save()

    def stop(self, reason: str) -> None:
        """Save the result of a run that was stopped early, with the reason."""
        self.result["stopped"] = reason
        self.save()

    def save(self) -> None:
        """Write the file atomically, so that a reader never sees an incomplete file."""
        if self.path is None:
            return
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_text(self.line() + "\n")
        os.replace(temporary, self.path)

    def line(self) -> str:
        return json.dumps(self.result)
