"""Progress of long work: a bar on a terminal; in a log or a pipe a line when something else begins, and now and then."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID

EVERY = 10.0  # seconds between two lines of one task


class Steps(Progress):
    def __init__(self, *columns: str | ProgressColumn):
        console = Console(stderr=True)
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._said: tuple[str, float] = "", 0.0  # what the last line was about, and when

    def add_task(self, description: str, *args: Any, **options: Any) -> TaskID:
        task = super().add_task(description, *args, **options)
        self._say(task)
        return task

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._say(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._say(task_id)

    def _say(self, task_id: TaskID) -> None:
        if self.console.is_terminal:
            return
        task, now = self._tasks[task_id], time.monotonic()
        if task.description == self._said[0] and now - self._said[1] < EVERY:
            return
        self._said = task.description, now
        so_far = f" {task.completed:g} of {task.total:g}" if task.total else ""
        self.console.print(f"{task.description}{so_far}", highlight=False)
