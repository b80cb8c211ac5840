"""The engine process, which is not there for a minute: for tests of a server that is still
starting."""

from __future__ import annotations

import sys
import time

from octavo.serve.engine import engine_process

time.sleep(60)
sys.exit(engine_process.main(sys.argv[1], int(sys.argv[2])))
