"""The jobs of the worker processes and their replies: msgspec structs, encoded as msgpack.

To add a job, define its struct here, write its handler in handlers.py and add it to HANDLERS there.
The front calls `await front.pool.run(job, type_of_the_result)`.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import msgspec

from octavo.params import StructuredOutputs
from octavo.serve.limits import Limits

# ---- to a worker process -------------------------------------------------------------------------


class Setup(msgspec.Struct, array_like=True):
    """The first message to a worker process: the data that its jobs need."""

    tokenizer_directory: str | None
    tokenizer_gguf: dict[str, Any] | None
    chat_template: str | None  # It replaces the template of the model, unless it is None.
    vocab_size: int
    max_model_len: int
    limits: Limits


class Parse(msgspec.Struct, tag=True, array_like=True):
    """Parse a body. The result is the request and its unknown fields (see parse.read_request)."""

    kind: str  # The name of a struct in protocol.py.
    data: bytes = b""  # The payload.


class ParseMessage(msgspec.Struct, tag=True, array_like=True):
    """Parse a gRPC message. The result is the request and its unknown fields."""

    kind: str
    data: bytes = b""  # The payload.


class Encode(msgspec.Struct, tag=True, array_like=True):
    """Tokenise texts. The result is a list of Encoded."""

    texts: list[str]
    context: int  # A text with this many tokens is refused, unless `keep` is given.
    keep: int | None = None  # Each text is truncated to this many of its last tokens.
    keep_first: bool = False  # The first tokens are kept instead of the last.
    add_special_tokens: bool = True
    parse_special: bool = True


class EncodeChat(msgspec.Struct, tag=True, array_like=True):
    """Render a conversation and tokenise it. The result is an Encoded."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    template: str | None  # The client's template. None stands for the template of the model.
    options: dict[str, Any]  # The options of octavo.text.chat.render_marked.
    context: int
    keep: int | None = None
    keep_first: bool = False
    add_special_tokens: bool = False  # BOS and EOS are put around the rendered text.


class Tokenize(msgspec.Struct, tag=True, array_like=True):
    """Compute the reply of /tokenize. The result is JSON."""

    encoding: Encode | EncodeChat
    token_strs: bool


class Detokenize(msgspec.Struct, tag=True, array_like=True):
    """Compute the reply of /detokenize. The result is a Detokenized."""

    data: bytes = b""  # The payload.


class Decode(msgspec.Struct, tag=True, array_like=True):
    """Detokenise token ids. The result is a text."""

    ids: bytes  # The token ids, packed.


class Compile(msgspec.Struct, tag=True, array_like=True):
    """Compile a spec of structured output as a trial. Raises an error if the spec is invalid."""

    spec: StructuredOutputs


Job = Parse | ParseMessage | Encode | EncodeChat | Tokenize | Detokenize | Decode | Compile

# ---- from a worker process -----------------------------------------------------------------------


class JobDone(msgspec.Struct, tag=True, array_like=True):
    """The result of a job.

    `retire` is true if the process uses far more memory than at its start and must be replaced.
    """

    value: msgspec.Raw
    retire: bool = False


class JobRefused(msgspec.Struct, tag=True, array_like=True):
    """The input of a job is invalid. The fields are those of an ApiError."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retire: bool = False


class JobFailed(msgspec.Struct, tag=True, array_like=True):
    """A job has raised an unexpected exception, which is logged."""

    traceback: str
    retire: bool = False


Reply = JobDone | JobRefused | JobFailed


class Encoded(msgspec.Struct, array_like=True):
    """The tokens of a text. They are packed, so that the event loop can unpack a few at a time."""

    ids: bytes
    total: int  # The number of tokens before the text was truncated.


class Tokens(NamedTuple):
    """The tokens of a text, unpacked."""

    ids: list[int]
    total: int


class Detokenized(msgspec.Struct, array_like=True):
    model: str | None
    unknown: dict[str, Any]
    reply: bytes  # JSON


def pack(ids: list[int]) -> bytes:
    """Encode token ids as four bytes each."""
    return array("I", ids).tobytes()


def unpack(packed: bytes) -> list[int]:
    return array("I", packed).tolist()


encode = msgspec.msgpack.Encoder().encode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_job = msgspec.msgpack.Decoder(Job).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
