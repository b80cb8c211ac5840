"""Octavo: an LLM inference engine small enough to read. `from octavo import LLM, SamplingParams`.

The public names are loaded when they are first used, so that `import octavo` costs nothing and
imports no torch. Scripts for vLLM find its other names and modules too (octavo/compat/).
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from octavo.compat import vllm_modules

if TYPE_CHECKING:
    from octavo.compat.async_llm import AsyncLLM as AsyncLLMEngine
    from octavo.compat.engine_args import AsyncEngineArgs, EngineArgs
    from octavo.compat.llm_engine import LLMEngine
    from octavo.compat.prompts import PromptType, TextPrompt, TokensPrompt
    from octavo.llm import LLM
    from octavo.outputs import (
        BeamSearchOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from octavo.params import (
        BeamSearchParams,
        RepetitionDetectionParams,
        SamplingParams,
        StructuredOutputsParams,
    )
    from octavo.pooling import PoolingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RepetitionDetectionParams",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
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
    "EmbeddingOutput": "octavo.outputs",
    "EmbeddingRequestOutput": "octavo.outputs",
    "PoolingOutput": "octavo.outputs",
    "PoolingParams": "octavo.pooling",
    "PoolingRequestOutput": "octavo.outputs",
    "ScoringOutput": "octavo.outputs",
    "ScoringRequestOutput": "octavo.outputs",
    "RequestOutput": "octavo.outputs",
    "SamplingParams": "octavo.params",
    "RepetitionDetectionParams": "octavo.params",
    "StructuredOutputsParams": "octavo.params",
    # Names of vLLM's.
    "AsyncEngineArgs": "octavo.engine.arg_utils",
    "AsyncLLMEngine": "octavo.engine.async_llm_engine",
    "EngineArgs": "octavo.engine.arg_utils",
    "LLMEngine": "octavo.engine.llm_engine",
    "PromptType": "octavo.inputs",
    "TextPrompt": "octavo.inputs",
    "TokensPrompt": "octavo.inputs",
}
vllm_modules.install()


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
