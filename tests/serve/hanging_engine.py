"""The engine process with a forward that never returns for a prompt of the token 13, raises for one of 14, and ends the
process for one of 15."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from octavo.runner.runner import Runner
from octavo.serve import engine_process
from octavo.types import Plan

launch = Runner.launch


def faulty(self: Runner, plan: Plan) -> Any:
    for row in plan.rows:
        if list(row.tokens[:2]) == [13, 13]:
            time.sleep(3600)
        if list(row.tokens[:2]) == [14, 14]:
            raise RuntimeError("a secret: /etc/passwd")
        if list(row.tokens[:2]) == [15, 15]:
            os._exit(9)
    return launch(self, plan)


Runner.launch = faulty  # type: ignore[method-assign]
sys.exit(engine_process.main(sys.argv[1], int(sys.argv[2])))
