"""The engine process with a forward that never returns for a prompt of the token 13, raises for one
of 14, ends the process for one of 15, and lacks memory for one of 16."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

from octavo.runner.runner import Runner
from octavo.runner.staging import StepTimer
from octavo.serve.engine import engine_process
from octavo.types import Plan

launch = Runner.launch
launch_step = Runner._launch_step
short: set[int] = set()  # batch slots for which memory is never enough


def faulty(self: Runner, plan: Plan) -> Any:
    for new in plan.slot_fills:
        if list(new.tokens[:2]) == [13, 13]:
            time.sleep(3600)
        if list(new.tokens[:2]) == [14, 14]:
            raise RuntimeError("a secret: /etc/passwd")
        if list(new.tokens[:2]) == [15, 15]:
            os._exit(9)
    return launch(self, plan)


def lacking(self: Runner, plan: Plan, timer: StepTimer | None = None) -> Any:
    for new in plan.slot_fills:
        (short.add if list(new.tokens[:2]) == [16, 16] else short.discard)(new.slot)
    if any(item.slot in short for item in plan.items):
        raise torch.OutOfMemoryError("CUDA out of memory at 0x7f0000000000, see /etc/passwd")
    return launch_step(self, plan, timer)


Runner._launch_step = lacking  # type: ignore[method-assign]
Runner.launch = faulty  # type: ignore[method-assign]
sys.exit(engine_process.main(sys.argv[1], int(sys.argv[2])))
