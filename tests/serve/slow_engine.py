"""The engine process on a machine where steps may take long, and the step of a prompt of the token
18 does."""

from __future__ import annotations

import sys
import time
from typing import Any

from octavo.runner.runner import Runner
from octavo.serve.engine import engine_process
from octavo.types import Plan

launch = Runner.launch


def slow(self: Runner, plan: Plan) -> Any:
    if any(list(row.tokens[:2]) == [18, 18] for row in plan.slot_fills):
        time.sleep(4)
    return launch(self, plan)


Runner.launch = slow  # type: ignore[method-assign]
engine_process.slowest_token = lambda llm: 5.0
sys.exit(engine_process.main(sys.argv[1], int(sys.argv[2])))
