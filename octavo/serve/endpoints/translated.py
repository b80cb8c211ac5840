"""The path of a request that was translated from another API: it is the path of a chat."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from octavo.serve.api import prompt, validate
from octavo.serve.api.api_errors import unsupported
from octavo.serve.api.replies import ReplyFormat
from octavo.serve.api.request_fields import Field
from octavo.serve.api.translation import FieldNames, Translation
from octavo.serve.api.validate import LABEL, CheckedRequest, Prepared
from octavo.serve.endpoints.completions import prepare_chat, read_chat
from octavo.serve.http.exchange import Exchange


async def prepare(
    exchange: Exchange,
    translation: Translation,
    unknown: dict[str, Any],
    table: Mapping[str, Field],
) -> tuple[Prepared, ReplyFormat]:
    """Check a translated request. `table` has the fields of its API."""
    check_members(exchange, translation.fields)
    prepared, reply_format = await prepare_chat(
        exchange.front, exchange.caller, translation.chat, unknown, table
    )
    finish_headers(translation.fields, prepared.headers)
    return prepared, reply_format


async def count_prompt(
    exchange: Exchange,
    translation: Translation,
    unknown: dict[str, Any],
    table: Mapping[str, Field],
) -> tuple[int, dict[str, str]]:
    """Return the number of tokens in the prompt, and the headers of the reply."""
    checked, reply_format = read(exchange, translation, unknown, table)
    front = exchange.front
    chat = translation.chat
    checked.params.check_vocabulary(front.engine_client.model.vocab_size)
    ids = await prompt.chat_ids(front, chat, checked, reply_format.tools, context=sys.maxsize)
    finish_headers(translation.fields, checked.headers)
    return len(ids), checked.headers


def read(
    exchange: Exchange,
    translation: Translation,
    unknown: dict[str, Any],
    table: Mapping[str, Field],
) -> tuple[CheckedRequest, ReplyFormat]:
    """Check a translated request except for its prompt."""
    check_members(exchange, translation.fields)
    return read_chat(exchange.front, exchange.caller, translation.chat, unknown, table)


def check_members(exchange: Exchange, fields: FieldNames) -> None:
    """Refuse unknown members of objects in a request if the server refuses unknown fields."""
    if fields.unknown and exchange.front.config.strict_params:
        raise unsupported(
            fields.unknown[0], "this server refuses unknown parameters (--strict-params)"
        )


def finish_headers(fields: FieldNames, headers: dict[str, str]) -> None:
    """Name the ignored fields as the client does."""
    names = dict.fromkeys(filter(LABEL.fullmatch, [*fields.ignored, *fields.unknown]))
    validate.ignore(headers, *list(names)[:20])
    if "x-ignored-params" in headers:
        headers["x-ignored-params"] = fields.rename(headers["x-ignored-params"])
