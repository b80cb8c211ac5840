"""The command `vllm` of the run: `octavo` with the embedded model under every name."""

from __future__ import annotations

import os
import sys

from tests.utils import translated


def main() -> None:
    command, *args = sys.argv[1:]
    model = args[args.index("--model") + 1] if "--model" in args else "smollm2"
    if "--model" in args:
        del args[args.index("--model") : args.index("--model") + 2]
    given = ["--model", "smollm2", *translated(model, args)]
    os.execv(sys.executable, [sys.executable, "-m", "octavo", command, *given])


main()
