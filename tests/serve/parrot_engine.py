"""The engine process with a model that says what it was told: the text of the last user's message,
then the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, islice, repeat
from typing import Any

from octavo.runner.runner import Runner
from octavo.serve.engine import engine_process
from octavo.types import Plan, SlotFill, StepResult
from tests import tiny

END, USER = 258, 259  # of tests/tiny.py's tokenizer
launch = Runner.launch
scripts: dict[int, Iterator[int]] = {}  # by row: what it is to say


class Parrot:
    def __init__(self, plan: Plan, handle: Any):
        self.handle = handle
        self.tokens = [[next(scripts[item.slot])] if item.sample else [] for item in plan.items]

    def wait(self) -> StepResult:
        result: StepResult = self.handle.wait()
        result.tokens = self.tokens
        return result


def script(row: SlotFill) -> Iterator[int]:
    prompt = list(row.tokens[: row.prompt_len])
    begin = max((i for i, token in enumerate(prompt) if token == USER), default=len(prompt))
    end = prompt.index(END, begin) if END in prompt[begin:] else len(prompt)
    said = len(row.tokens) - row.prompt_len
    return islice(chain(prompt[begin + 1 : end], repeat(tiny.EOS)), said, None)


def say(self: Runner, plan: Plan) -> Any:
    scripts.update({row.slot: script(row) for row in plan.slot_fills})
    return Parrot(plan, launch(self, plan))


Runner.launch = say  # type: ignore[assignment,method-assign]
sys.exit(engine_process.main(sys.argv[1], int(sys.argv[2])))
