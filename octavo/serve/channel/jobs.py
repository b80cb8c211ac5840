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
    chat_template: str | None  # replaces the model's own
    vocab_size: int
    max_model_len: int
    limits: Limits


class Parse(msgspec.Struct, tag=True, array_like=True):
    """Parse a body. The result is a pair of the request and its unknown fields (see
    parse.read_request)."""

    kind: str  # the name of a struct in protocol.py
    data: bytes = b""  # the payload


class ParseMessage(msgspec.Struct, tag=True, array_like=True):
    """Parse a gRPC message. The result is a pair like that of Parse."""

    kind: str
    data: bytes = b""  # the payload


class Encode(msgspec.Struct, tag=True, array_like=True):
    """Tokenise texts. The result is a list of Encoded."""

    texts: list[str]
    context: int  # a text with this many tokens is refused, unless `keep` is given
    keep: int | None = None  # each text is truncated to this many of its last tokens
    keep_first: bool = False  # keep the first tokens instead of the last
    add_special_tokens: bool = True
    parse_special: bool = True


class EncodeChat(msgspec.Struct, tag=True, array_like=True):
    """Render a conversation and tokenise it. The result is an Encoded."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    template: str | None  # from the client; None stands for the model's template
    options: dict[str, Any]  # see octavo.text.chat.render_marked
    context: int
    keep: int | None = None
    keep_first: bool = False
    add_special_tokens: bool = False  # put BOS and EOS around the rendered text


class Tokenize(msgspec.Struct, tag=True, array_like=True):
    """Answer a request to /tokenize. The result is JSON."""

    what: Encode | EncodeChat
    token_strs: bool


class Detokenize(msgspec.Struct, tag=True, array_like=True):
    """Answer a request to /detokenize. The result is a Detokenized."""

    data: bytes = b""  # the payload


class Decode(msgspec.Struct, tag=True, array_like=True):
    """Detokenise token ids. The result is a text."""

    ids: bytes  # packed


class Compile(msgspec.Struct, tag=True, array_like=True):
    """Compile a spec of structured output on trial. The result is None. An invalid spec raises an
    error."""

    spec: StructuredOutputs


Job = Parse | ParseMessage | Encode | EncodeChat | Tokenize | Detokenize | Decode | Compile

# ---- from a worker process -----------------------------------------------------------------------


class JobDone(msgspec.Struct, tag=True, array_like=True):
    """The result of a job. `retire` says that the process uses far more memory than at its start
    and must be replaced."""

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
    """The tokens of a text. They are packed, so that the event loop can unpack many of them in
    several turns."""

    ids: bytes
    total: int  # the number of tokens before the text was truncated


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


def unpack(data: bytes) -> list[int]:
    return array("I", data).tolist()


encode = msgspec.msgpack.Encoder().encode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_job = msgspec.msgpack.Decoder(Job).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
