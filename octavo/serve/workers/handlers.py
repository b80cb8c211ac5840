"""The handlers of the worker processes: one function for each job in jobs.py.

A handler takes a Context and a job, and returns a result that msgspec can encode. It raises
ApiError or InvalidRequest if the request is invalid. It may be slow, use much memory or crash. This
module does not import torch, so that a worker process starts in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from octavo.errors import InvalidRequest
from octavo.serve.api import prompt, protocol
from octavo.serve.api.api_errors import invalid_field, prompt_too_long
from octavo.serve.api.parse import count_values, read_request
from octavo.serve.api.protocol import (
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from octavo.serve.channel.jobs import (
    Compile,
    Decode,
    Detokenize,
    Detokenized,
    Encode,
    EncodeChat,
    Encoded,
    Parse,
    ParseMessage,
    Setup,
    Tokenize,
    pack,
    unpack,
)
from octavo.serve.limits import Limits
from octavo.text.chat import render_marked, select_template
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.text.vocabulary import Vocabulary

T = TypeVar("T", bound=msgspec.Struct)
SLICE = 64 * 2**10  # The number of characters that are tokenised at a time.


@dataclass
class Context:
    """The data that all jobs need."""

    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    limits: Limits

    @classmethod
    def read(cls, setup: Setup) -> Context:
        if setup.tokenizer_gguf is not None:
            tokenizer = Tokenizer.from_gguf(setup.tokenizer_gguf)
        else:
            assert setup.tokenizer_directory is not None
            tokenizer = Tokenizer.from_directory(setup.tokenizer_directory)
        if setup.chat_template is not None:
            tokenizer.chat_templates = {"default": setup.chat_template}
        return cls(tokenizer, setup.vocab_size, setup.max_model_len, setup.limits)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer in the form that llguidance needs.

        A trial compilation does not depend on the end token, so any token can take its place.
        """
        from octavo.text.vocabulary import make_vocabulary

        end_ids = tuple(sorted(self.tokenizer.end_ids)) or (0,)
        return make_vocabulary(self.tokenizer, self.vocab_size, end_ids)


# ---- bodies --------------------------------------------------------------------------------------


def parse_body(context: Context, job: Parse) -> tuple[msgspec.Struct, dict[str, Any]]:
    """Parse a body into a request that is small enough for the event loop to decode."""
    kind: type[msgspec.Struct] = getattr(protocol, job.kind)
    request, unknown = read_request(job.data, kind, context.limits)
    check_texts(context, request)
    if isinstance(request, CompletionRequest) and isinstance(request.prompt, list):
        truncates = request.truncate_prompt_tokens is not None
        request.prompt = pack_prompts(context, request.prompt, truncates, "prompt")
    if isinstance(request, EmbeddingRequest) and isinstance(request.input, list):
        truncates = request.truncate_prompt_tokens is not None
        request.input = pack_prompts(context, request.input, truncates, "input")
    if isinstance(request, protocol.OpenAI | protocol.MessagesRequest):
        request.metadata = None  # This field has no effect and may be large.
    check_values(context, request)
    return request, unknown


def parse_message(context: Context, job: ParseMessage) -> tuple[msgspec.Struct, dict[str, Any]]:
    """Parse a gRPC message into a request that is small enough for the event loop to decode."""
    from octavo.serve.api.grpc_request import read_message

    kind: type[msgspec.Struct] = getattr(protocol, job.kind)
    request, unknown = read_message(job.data, kind, context.limits)
    check_texts(context, request)
    check_values(context, request)
    return request, unknown


def check_values(context: Context, request: msgspec.Struct) -> None:
    """Refuse a request that has too many values for the event loop to decode."""
    remaining = context.limits.values
    for name in request.__struct_fields__:
        remaining -= count_values(getattr(request, name), remaining)
        if remaining < 0:
            raise invalid_field(
                name,
                f"the request has more than {context.limits.values} values up to and including "
                f"{name}: remove some of them",
                "param_out_of_range",
            )


def check_texts(context: Context, request: msgspec.Struct) -> None:
    """Refuse texts that are longer than the context, before they are sent to the front process."""
    if isinstance(request, TokenizeRequest) or getattr(request, "truncate_prompt_tokens", None):
        return
    names = ("input",) if isinstance(request, EmbeddingRequest) else ("prompt", "prompts")
    for name in names:
        prompts = getattr(request, name, None)
        for text in prompts if isinstance(prompts, list) else [prompts]:
            if isinstance(text, str):
                prompt.check_size(context.tokenizer, len(text), context.max_model_len, name)


def pack_prompts(context: Context, unpacked: list[Any], truncates: bool, param: str) -> list[Any]:
    """Check the token ids among the prompts, and return the prompts with token ids packed.

    `truncates` is true if prompts that are too long are truncated later instead of refused.
    """
    limits = context.limits
    prompts = prompt.prompt_list(unpacked, limits, param)
    total = 0
    for index, prompt_ids in enumerate(prompts):
        if not isinstance(prompt_ids, list):
            continue
        if not truncates and len(prompt_ids) >= context.max_model_len:
            raise prompt_too_long(len(prompt_ids), context.max_model_len, param)
        total += len(prompt_ids)
        check_total(total, limits, param)
        ids = prompt.check_ids(prompt_ids, context.vocab_size, param)
        prompts[index] = pack(ids)
    return prompts


def check_total(count: int, limits: Limits, param: str = "prompt") -> None:
    if count > limits.prompt_tokens:
        raise invalid_field(
            param,
            f"the prompts of one request can have at most {limits.prompt_tokens} tokens together: "
            "send fewer prompts in one request",
            "param_out_of_range",
        )


# ---- text to tokens ------------------------------------------------------------------------------


def encode_texts(context: Context, job: Encode) -> list[Encoded]:
    encoded: list[Encoded] = []
    total = 0
    for text in job.texts:
        check_length(context.tokenizer, text, job)
        ids = context.tokenizer.encode(text, job.add_special_tokens, job.parse_special)
        encoded.append(pack_ids(ids, job))
        total += len(encoded[-1].ids) // 4
        check_total(total, context.limits)
    return encoded


def encode_messages(context: Context, job: EncodeChat) -> Encoded:
    tokenizer = context.tokenizer
    with as_template_errors(job.template):
        template = select_template(tokenizer, job.template, job.tools is not None)
        text, mark = render_marked(tokenizer, template, job.messages, job.tools, **job.options)
    check_length(tokenizer, text, job)
    if mark is None:
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    else:
        ids = tokenizer.encode_marked(text, mark)
    if job.add_special_tokens:
        ids = tokenizer.with_special_tokens(ids)
    return pack_ids(ids, job)


@contextmanager
def as_template_errors(template: str | None) -> Iterator[None]:
    """Report every error of a template that came with the request as an invalid request."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        param = error.param if isinstance(error, InvalidRequest) else None
        if template is None or param not in (None, "messages"):
            raise
        raise invalid_field("chat_template", str(error)[:500], "chat_template_error") from None


def check_length(tokenizer: Tokenizer, text: str, job: Encode | EncodeChat) -> None:
    """Refuse a text that is far too long without tokenising all of it.

    The text is tokenised slice by slice until there are twice as many tokens as the context holds.
    The factor of two is a margin: slicing changes the number of tokens by a few per slice.
    """
    if job.keep is not None or len(text) <= 8 * job.context:
        return
    count = 0
    for start in range(0, len(text), SLICE):
        count += len(tokenizer.encode(text[start : start + SLICE], add_special_tokens=False))
        if count > 2 * job.context:
            raise prompt_too_long(f"more than {job.context}", job.context, param_of(job))


def pack_ids(ids: list[int], job: Encode | EncodeChat) -> Encoded:
    """Truncate token ids as the job says, or refuse them if they exceed the context."""
    if job.keep is not None:
        return Encoded(pack(prompt.cut(ids, job.keep, job.keep_first)), len(ids))
    if len(ids) >= job.context:
        raise prompt_too_long(len(ids), job.context, param_of(job))
    return Encoded(pack(ids), len(ids))


def param_of(job: Encode | EncodeChat) -> str:
    return "prompt" if isinstance(job, Encode) else "messages"


def tokenize(context: Context, job: Tokenize) -> bytes:
    if isinstance(job.encoding, Encode):
        (encoded,) = encode_texts(context, job.encoding)
    else:
        encoded = encode_messages(context, job.encoding)
    return tokenize_reply(context, unpack(encoded.ids), job.token_strs)


def tokenize_reply(context: Context, ids: list[int], token_strs: bool) -> bytes:
    strings = [context.tokenizer.token_str(id) for id in ids] if token_strs else None
    reply = {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": context.max_model_len,
        "token_strs": strings,
    }
    return msgspec.json.encode(reply)


# ---- tokens to text ------------------------------------------------------------------------------


def detokenize(context: Context, job: Detokenize) -> Detokenized:
    request, unknown = read_request(job.data, DetokenizeRequest, context.limits)
    if request.tokens is None:
        raise invalid_field("tokens", "tokens is missing: it must be a list of token ids")
    if len(request.tokens) > context.limits.prompt_tokens:
        raise invalid_field(
            "tokens",
            f"tokens can have at most {context.limits.prompt_tokens} token ids, "
            f"got {len(request.tokens)}",
            "param_out_of_range",
        )
    if request.tokens:
        prompt.check_ids(request.tokens, context.vocab_size, "tokens")
    text = context.tokenizer.decode(request.tokens, skip_special_tokens=False)
    return Detokenized(request.model, unknown, msgspec.json.encode({"prompt": text}))


def decode_ids(context: Context, job: Decode) -> str:
    return context.tokenizer.decode(unpack(job.ids), skip_special_tokens=False)


# ---- structured output ---------------------------------------------------------------------------


def compile_guide(context: Context, job: Compile) -> None:
    from octavo.text.spec_trial import try_spec

    try_spec(context.vocabulary, job.spec)


HANDLERS: dict[type[msgspec.Struct], Callable[[Context, Any], Any]] = {
    Parse: parse_body,
    ParseMessage: parse_message,
    Encode: encode_texts,
    EncodeChat: encode_messages,
    Tokenize: tokenize,
    Detokenize: detokenize,
    Decode: decode_ids,
    Compile: compile_guide,
}
