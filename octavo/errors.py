"""Every error that a caller can cause or must handle.

A message says what is wrong, what is allowed, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OctavoError(Exception):
    """Root of all errors that Octavo raises on purpose."""


class InvalidRequest(OctavoError, ValueError):
    """The request is invalid. `param` names the field; `code` is stable and meant for programs."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthExceeded(InvalidRequest):
    """The prompt alone does not fit the model's context."""

    def __init__(self, message: str):
        super().__init__(message, param="prompt", code="context_length_exceeded")


class KVCapacityExceeded(InvalidRequest):
    """The request does not fit in the KV cache, even if it runs alone."""

    def __init__(self, message: str):
        super().__init__(message, param="max_tokens", code="kv_capacity_exceeded")


class ChatTemplateError(InvalidRequest):
    """A chat template cannot be compiled, or it cannot render the messages it was given."""

    def __init__(self, message: str, param: str = "messages"):
        super().__init__(message, param=param, code="chat_template_error")


class GuideError(OctavoError):
    """The text cannot continue to match its structured_outputs specification."""

    code = "structured_output_failed"


class ModelError(OctavoError):
    """The model cannot be used as it is: config, weights or tokenizer."""


class UnknownArchitecture(ModelError):
    """The config names an architecture that is not registered."""


class CheckpointError(ModelError):
    """A weight file is damaged, or its tensors are not those the model needs."""


class ModelNotFound(ModelError):
    """No such directory or file, and the hub did not have it or could not be reached."""


class KVCorrupted(OctavoError):
    """The KV canary found that a sequence would read KV of another one: a bug in the engine."""


class NotEnoughMemory(OctavoError):
    """The weights or the smallest useful KV cache do not fit; the message names values that do."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the known name that resembles a wrong one, or an empty text."""
    close_names = difflib.get_close_matches(name, list(known), n=1, cutoff=0.8)
    return f"Did you mean {close_names[0]}? " if close_names else ""


# The advice if an allocation fails all the same.
MEMORY_RAN_OUT = (
    "memory ran out. Use a smaller model or quantised weights (--quant), fewer sequences at once "
    "(--max-num-seqs) or a shorter context (--max-model-len), or close other programs; "
    "`octavo plan MODEL` shows what fits"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python or torch means that memory ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


class NotANumber(OctavoError):
    """The model computed logits without a finite value."""

    code = "not_a_number"


class DeviceOutOfMemory(OctavoError):
    """A step needs more memory than the device has. A smaller step may succeed."""

    code = "out_of_memory"


class RankLost(OctavoError):
    """A rank of tensor parallelism has ended, and the engine cannot continue without it."""


class MessageError(OctavoError):
    """A message between processes has a value of another type than its field is declared with."""
