"""Shows the progress of long work.

On a terminal it is a bar. In a log or a pipe it is a line for each new task, repeated after some
time.
"""

from __future__ import annotations

import time
from threading import Event, Thread
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID, TimeElapsedColumn

from octavo.cli import status

REPEAT_SECONDS = 10.0  # between two lines about one task


class Steps(Progress):
    def __init__(self, *columns: str | ProgressColumn):
        console = Console(stderr=True)
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._last_line: tuple[str, float] = "", 0.0  # description and time of the last line
        self._started = time.monotonic()
        self._stopped = Event()

    @classmethod
    def get_default_columns(cls) -> tuple[ProgressColumn, ...]:
        """Description, bar and percentage, and the elapsed time, which moves in long steps too."""
        *columns, _ = super().get_default_columns()
        return (*columns, TimeElapsedColumn())

    def start(self) -> None:
        if self.console.is_terminal:
            status.hide_for_progress_bar()
        super().start()
        if not self.console.is_terminal:
            Thread(target=self._repeat, daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        super().stop()
        status.resume()

    def add_task(self, description: str, *args: Any, **options: Any) -> TaskID:
        task_id = super().add_task(description, *args, **options)
        self._print_line(task_id)
        return task_id

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._print_line(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._print_line(task_id)

    def _repeat(self) -> None:
        """Print the current task again from time to time, because one step may take minutes."""
        while not self._stopped.wait(REPEAT_SECONDS):
            for task_id in self.task_ids[-1:]:
                self._print_line(task_id)

    def _print_line(self, task_id: TaskID) -> None:
        if self.console.is_terminal:
            return
        task = self._tasks[task_id]
        now = time.monotonic()
        if task.description == self._last_line[0] and now - self._last_line[1] < REPEAT_SECONDS:
            return
        self._last_line = task.description, now
        progress_text = f", {task.completed:g} of {task.total:g} done" if task.total else ""
        self.console.print(
            f"{now - self._started:4.0f} s  {task.description}{progress_text}", highlight=False
        )
