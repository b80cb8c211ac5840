"""Progress of long work: a bar on a terminal; in a log or a pipe a line when something else begins, and now and then."""

from __future__ import annotations

import time
from threading import Event, Thread
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID

EVERY = 10.0  # seconds between two lines of one task


class Steps(Progress):
    def __init__(self, *columns: str | ProgressColumn):
        console = Console(stderr=True)
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._said: tuple[str, float] = "", 0.0  # what the last line was about, and when
        self._begun = time.monotonic()
        self._over = Event()

    def start(self) -> None:
        super().start()
        if not self.console.is_terminal:
            Thread(target=self._go_on, daemon=True).start()

    def stop(self) -> None:
        self._over.set()
        super().stop()

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

    def _go_on(self) -> None:
        """A single step may take minutes: what is going on is said again meanwhile."""
        while not self._over.wait(EVERY):
            for task in self.task_ids[-1:]:
                self._say(task)

    def _say(self, task_id: TaskID) -> None:
        if self.console.is_terminal:
            return
        task = self._tasks[task_id]
        now = time.monotonic()
        if task.description == self._said[0] and now - self._said[1] < EVERY:
            return
        self._said = task.description, now
        so_far = f" {task.completed:g} of {task.total:g}" if task.total else ""
        self.console.print(
            f"{now - self._begun:4.0f} s  {task.description}{so_far}", highlight=False
        )
