"""Octavo: an LLM inference engine small enough to read. `from octavo import LLM, SamplingParams`.

The public names are loaded when they are first used, so that `import octavo` costs nothing and
imports no torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.outputs import BeamSearchOutput, CompletionOutput, RequestOutput
    from octavo.params import (
        BeamSearchParams,
        RepetitionDetectionParams,
        SamplingParams,
        StructuredOutputsParams,
    )

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "RepetitionDetectionParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]  # fmt: skip

# GNU OpenMP, which torch uses on Linux, reads this variable when torch is imported. By default its
# threads wait for each other by spinning for about a millisecond. On a machine with other work,
# this made a small model 40 times slower. A short spin costs almost nothing on an idle machine.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

_HOME = {
    "LLM": "octavo.llm",
    "BeamSearchOutput": "octavo.outputs",
    "BeamSearchParams": "octavo.params",
    "CompletionOutput": "octavo.outputs",
    "RequestOutput": "octavo.outputs",
    "SamplingParams": "octavo.params",
    "RepetitionDetectionParams": "octavo.params",
    "StructuredOutputsParams": "octavo.params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module 'octavo' has no attribute {name!r}; it offers {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # the next use is an ordinary attribute
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
