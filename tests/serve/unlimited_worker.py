"""A worker process that does not check how deep a spec of structured output is, and has little
stack: it crashes over deep ones."""

from __future__ import annotations

import sys

from octavo.serve.workers import worker
from octavo.text import grammar, schema, spec_trial

if __name__ == "__main__":
    grammar.MAX_DEPTH = schema.MAX_DEPTH = 10**9  # type: ignore[attr-defined]
    spec_trial.STACK_BYTES = 2**20
    sys.exit(worker.main(int(sys.argv[1])))
