"""The engine process with little patience for schemas that take long to compile."""

from __future__ import annotations

import sys

from octavo.serve import engine_process
from octavo.text import guide

guide.DEADLINE = 0.3
sys.exit(engine_process.main(sys.argv[1], int(sys.argv[2])))
