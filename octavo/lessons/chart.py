"""A run of a lesson as text: one line for each request, one character for one or more steps."""

from __future__ import annotations

from octavo.lessons.facts import RunFacts

# A column shows the first of these activities that one of its steps has.
SIGNS = {"preempted": "x", "prefill": "P", "waiting": ".", "decode": "d"}
LEGEND = ". waits or skips a step   P prefill   d decode   x preempted, waits"


def draw_run(run: RunFacts, width: int) -> list[str]:
    """Return lines of at most about `width` columns."""
    names = sorted({name for name, _ in run.activity})
    gutter = max(map(len, names)) + 1
    last_step = max(step for _, step in run.activity)
    steps_per_column = max(1, -(-last_step // max(width - gutter, 10)))
    starts = range(1, last_step + 1, steps_per_column)
    lines = []
    for name in names:
        columns = [
            _sign(run, name, range(first_step, first_step + steps_per_column))
            for first_step in starts
        ]
        lines.append(f"{name:{gutter}}{''.join(columns).rstrip()}")
    scale = "one step" if steps_per_column == 1 else f"{steps_per_column} steps"
    lines.append(f"{'':{gutter}}{last_step} steps; a character is {scale}")
    return lines


def _sign(run: RunFacts, name: str, steps: range) -> str:
    activities = {run.activity.get((name, step)) for step in steps}
    return next((sign for kind, sign in SIGNS.items() if kind in activities), " ")
