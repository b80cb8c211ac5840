"""Runs a command of Octavo under the name of one of vLLM's programs.

`python -m octavo.entrypoints.openai.api_server --model NAME` is `octavo serve --model NAME`.
"""

import sys

from octavo.cli import main
from octavo.compat.vllm_modules import PROGRAMS

if __name__ == "__main__":
    sys.argv = ["octavo", PROGRAMS[__spec__.name], *sys.argv[1:]]
    main(program="octavo")
