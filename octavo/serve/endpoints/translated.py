"""The path of a request that was translated from another API: it is the path of a chat."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from octavo.serve.api import prompt, validate
from octavo.serve.api.replies import Shape
from octavo.serve.api.reply_writer import ReplyParser
from octavo.serve.api.request_fields import Field
from octavo.serve.api.translation import FieldNames, Translation
from octavo.serve.api.validate import Prepared
from octavo.serve.endpoints.completions import prepare_chat, read_chat
from octavo.serve.front.front import Front
from octavo.serve.http.exchange import Exchange
from octavo.text.reasoning import CLOSE_TAG, OPEN_TAG, ReasoningFilter
from octavo.text.tokenizer import Tokenizer

PROMPT_END = 16  # An opening tag and white space have at most this many tokens.


async def prepare(
    exchange: Exchange,
    translation: Translation,
    unknown: dict[str, Any],
    table: Mapping[str, Field],
) -> tuple[Prepared, Shape]:
    """Check a translated request. `table` has the fields of its API."""
    prepared, shape = await prepare_chat(
        exchange.front, exchange.caller, translation.chat, unknown, table
    )
    finish_headers(translation.fields, prepared.headers)
    return prepared, shape


async def count_prompt(
    exchange: Exchange,
    translation: Translation,
    unknown: dict[str, Any],
    table: Mapping[str, Field],
) -> tuple[int, dict[str, str]]:
    """Return the number of tokens in the prompt, and the headers of the reply."""
    front = exchange.front
    chat = translation.chat
    asked, shape = read_chat(front, exchange.caller, chat, unknown, table)
    ids = await prompt.chat_ids(front, chat, asked, shape.tools, context=sys.maxsize)
    finish_headers(translation.fields, asked.headers)
    return len(ids), asked.headers


def finish_headers(fields: FieldNames, headers: dict[str, str]) -> None:
    """Name the ignored fields as the client does."""
    validate.ignore(headers, *dict.fromkeys(fields.ignored[:20]))
    if "x-ignored-params" in headers:
        headers["x-ignored-params"] = fields.rename(headers["x-ignored-params"])


def reply_parser(front: Front, prepared: Prepared, shape: Shape) -> ReplyParser:
    return ReplyParser(shape.tools, reasoning_filter(front, prepared))


def reasoning_filter(front: Front, prepared: Prepared) -> ReasoningFilter | None:
    """Return a filter if the chat template of the model has reasoning, and otherwise None.

    A reply that must match a grammar has no reasoning.
    """
    (request,) = prepared.requests
    if request.params.structured_outputs is not None:
        return None
    if not has_reasoning(front.tokenizer):
        return None
    end = front.tokenizer.decode(request.prompt[-PROMPT_END:], skip_special_tokens=False)
    return ReasoningFilter(end.rstrip().endswith(OPEN_TAG))


def has_reasoning(tokenizer: Tokenizer) -> bool:
    """Return whether a chat template of the model separates reasoning from the answer."""
    return any(CLOSE_TAG in template for template in tokenizer.chat_templates.values())
