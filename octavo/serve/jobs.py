"""The jobs of the worker processes, and their replies: msgspec structs as msgpack. Data only, no sockets.

To add a job: define its struct here, write its handler in worker.py, and enter the handler in HANDLERS there. The front calls
`await front.pool.run(job, type_of_the_result)`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.params import StructuredOutputs
from octavo.serve.limits import Limits

# ---- to a worker process ----------------------------------------------------------------------------


class Setup(msgspec.Struct, array_like=True):
    """The first message to a worker process: what its jobs need to know."""

    tokenizer_directory: str | None
    tokenizer_gguf: dict[str, Any] | None
    chat_template: str | None  # replaces the model's own
    vocab_size: int
    max_model_len: int
    limits: Limits


class Encode(msgspec.Struct, tag=True, array_like=True):
    """Tokenise a text. The result is a list of token ids."""

    text: str
    add_special_tokens: bool
    parse_special: bool = True


class EncodeChat(msgspec.Struct, tag=True, array_like=True):
    """Render a conversation and tokenise it. The result is a list of token ids."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    template: str | None  # the client's own; None: the model's
    options: dict[str, Any]  # see octavo.text.chat.render_marked


class Decode(msgspec.Struct, tag=True, array_like=True):
    """Detokenise. The result is a text."""

    ids: list[int]


class Compile(msgspec.Struct, tag=True, array_like=True):
    """Compile a specification of structured output on trial. The result is None, or the error that it deserves."""

    spec: StructuredOutputs


Job = Encode | EncodeChat | Decode | Compile

# ---- from a worker process --------------------------------------------------------------------------


class Done(msgspec.Struct, tag=True, array_like=True):
    """The job's result. `retire`: the process holds far more memory than at its start and must be replaced."""

    value: msgspec.Raw
    retire: bool = False


class Refused(msgspec.Struct, tag=True, array_like=True):
    """The input is at fault. The fields are those of an ApiError."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retire: bool = False


class Failed(msgspec.Struct, tag=True, array_like=True):
    """An unexpected exception, for the log."""

    traceback: str
    retire: bool = False


Reply = Done | Refused | Failed

encode = msgspec.msgpack.Encoder().encode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_job = msgspec.msgpack.Decoder(Job).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
