"""The engine process with a forward that never returns for a prompt of the token 13, and raises for one of 14."""

from __future__ import annotations

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
    return launch(self, plan)


Runner.launch = faulty  # type: ignore[method-assign]
sys.exit(engine_process.main(sys.argv[1], int(sys.argv[2])))
