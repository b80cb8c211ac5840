"""vLLM's /inference/v1/generate, whose prompts and replies are token ids, and the render routes.

A request becomes a CompletionRequest whose prompt is the token ids. The reply has no text.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import msgspec

from octavo.collect import Collector
from octavo.outputs import CompletionOutput
from octavo.params import SamplingParams
from octavo.serve.api.api_errors import ApiError, invalid_field
from octavo.serve.api.logprobs import Offsets, prompt_logprobs_of
from octavo.serve.api.protocol import CompletionRequest, OpenAI, TokensRequest
from octavo.serve.api.replies import DONE, KEEP_ALIVE, ReplyFormat, event, usage_of
from octavo.serve.api.reply_writer import EVENT_STREAM
from octavo.text.tokenizer import Tokenizer

encode = msgspec.json.Encoder().encode
# Fields of vLLM's SamplingParams that have no effect here.
NEUTRAL = ("detokenize", "output_kind", "skip_clone", "flat_logprobs", "output_text_buffer_length")
# Fields of SamplingParams that a rendered request shows.
SHOWN = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p",
    "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens",
    "logprobs", "prompt_logprobs", "skip_special_tokens", "include_stop_str_in_output",
    "logit_bias", "allowed_token_ids",
)  # fmt: skip


def to_completion(body: TokensRequest) -> tuple[CompletionRequest, dict[str, Any]]:
    """Return the request as a completion, and the sampling parameters that it does not have."""
    if not body.token_ids:
        raise invalid_field("token_ids", "token_ids must be a list of at least one token id")
    sampling_params = body.sampling_params or {}
    params = {name: value for name, value in sampling_params.items() if value is not None}
    if params.get("stop") and params.get("detokenize") is False:
        raise invalid_field("sampling_params.stop", "stop strings need text: remove detokenize")
    fields: dict[str, Any] = {"max_tokens": -1}
    unknown: dict[str, Any] = {}
    for name, value in params.items():
        if name in NEUTRAL:
            continue
        target = fields if name in CompletionRequest.__struct_fields__ else unknown
        target[name] = value
    shared = ("model", "stream", "stream_options", "cache_salt", "priority", "request_id", "user")
    fields |= {name: getattr(body, name) for name in shared if hasattr(body, name)}
    try:
        completion = msgspec.convert({**fields, "prompt": body.token_ids}, CompletionRequest)
    except msgspec.ValidationError as error:
        raise invalid_field("sampling_params", f"sampling_params: {error}") from None
    return completion, unknown


class TokensWriter:
    """Builds the reply of /inference/v1/generate, as one object or in chunks."""

    content_type = EVENT_STREAM
    keep_alive = KEEP_ALIVE

    def __init__(
        self, request_id: str, model: str, tokenizer: Tokenizer, reply_format: ReplyFormat
    ):
        self._request_id = request_id
        self._model = model
        self._tokenizer = tokenizer
        self._reply_format = reply_format

    def _choice(self, index: int, completion: CompletionOutput) -> dict[str, Any]:
        layout = self._reply_format.logprobs
        logprobs = None
        if layout is not None and completion.logprobs is not None:
            logprobs = layout.chat(self._tokenizer, completion.logprobs)
        return {
            "index": index,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "token_ids": completion.token_ids,
        }

    def full_reply(self, collectors: list[Collector]) -> dict[str, Any]:
        (collector,) = collectors
        choices = [
            self._choice(index, completion) for index, completion in enumerate(collector.best)
        ]
        prompt_logprobs = (
            prompt_logprobs_of(collector) if self._reply_format.prompt_logprobs else None
        )
        return {
            "request_id": self._request_id,
            "model": self._model,
            "created": int(time.time()),
            "choices": choices,
            "usage": usage_of(collectors),
            "prompt_logprobs": prompt_logprobs,
            "kv_transfer_params": None,
        }

    def begin(self) -> bytes:
        return b""

    def piece(
        self, prompt_index: int, piece: CompletionOutput, collectors: list[Collector]
    ) -> bytes:
        if not piece.token_ids and piece.finish_reason is None:
            return b""
        choice = self._choice(piece.index, piece)
        return event(encode({"request_id": self._request_id, "choices": [choice]}))

    def end(self, collectors: list[Collector], error: ApiError | None) -> bytes:
        events = b""
        if self._reply_format.usage is not None:
            chunk = {"request_id": self._request_id, "choices": [], "usage": usage_of(collectors)}
            events += event(encode(chunk))
        if error is not None:
            events += event(error.encode())
        return events + DONE


# ---- rendered requests -------------------------------------------------------------------------


def rendered(
    request_id: str,
    model: str,
    prompt: tuple[str, list[int]],
    params: SamplingParams,
    body: OpenAI,
    offsets: list[tuple[int, int]] | None,
) -> dict[str, Any]:
    """Return the rendered form of a request, which /inference/v1/generate accepts."""
    text, ids = prompt
    fields = {name: value for name, value in asdict(params).items() if name in SHOWN}
    return {
        "request_id": request_id,
        "model": model,
        "prompt": text,
        "token_ids": ids,
        "count": len(ids),
        "sampling_params": fields,
        "stream": bool(body.stream),
        "stream_options": body.stream_options,
        "token_offsets": offsets,
        "assistant_tokens_mask": None,
    }


def token_offsets(tokenizer: Tokenizer, text: str, ids: list[int]) -> list[tuple[int, int]]:
    """Return the start and the end of each token in the text of a prompt, in characters."""
    offsets = Offsets(tokenizer, skip_special_tokens=False, continuing=False)
    starts = offsets.push(ids, len(text))
    ends = [*starts[1:], len(text)]
    return [(min(start, len(text)), end) for start, end in zip(starts, ends, strict=True)]
