"""The engine process with lower tiers of KV that take their time: a block from host memory 5 ms,
one from disk 10 ms."""

from __future__ import annotations

import sys
import time
from typing import Any

from octavo.runner.disk import Record
from octavo.runner.tier_store import TierStore
from octavo.serve.engine import engine_process

load, read = TierStore.load, Record.read


def slow_load(self: TierStore, loads: Any) -> None:
    time.sleep(0.005 * len(loads))
    load(self, loads)


def slow_read(self: Record, *args: Any) -> None:
    time.sleep(0.01)
    read(self, *args)


TierStore.load = slow_load  # type: ignore[method-assign]
Record.read = slow_read  # type: ignore[method-assign]
sys.exit(engine_process.main(sys.argv[1], int(sys.argv[2])))
