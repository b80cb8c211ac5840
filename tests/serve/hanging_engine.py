"""The engine process with a forward that never returns for a prompt of the token 13, raises for one of 14, ends the
process for one of 15, and lacks memory for one of 16."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

from octavo.runner.runner import Runner
from octavo.serve import engine_process
from octavo.types import Plan

launch, begin = Runner.launch, Runner._begin
short: set[int] = set()  # rows for which memory is never enough


def faulty(self: Runner, plan: Plan) -> Any:
    for row in plan.new_slots:
        if list(row.tokens[:2]) == [13, 13]:
            time.sleep(3600)
        if list(row.tokens[:2]) == [14, 14]:
            raise RuntimeError("a secret: /etc/passwd")
        if list(row.tokens[:2]) == [15, 15]:
            os._exit(9)
    return launch(self, plan)


def lacking(self: Runner, plan: Plan) -> Any:
    for row in plan.new_slots:
        (short.add if list(row.tokens[:2]) == [16, 16] else short.discard)(row.slot)
    if any(item.slot in short for item in plan.items):
        raise torch.OutOfMemoryError("CUDA out of memory at 0x7f0000000000, see /etc/passwd")
    return begin(self, plan)


Runner._begin = lacking  # type: ignore[method-assign]
Runner.launch = faulty  # type: ignore[method-assign]
sys.exit(engine_process.main(sys.argv[1], int(sys.argv[2])))
