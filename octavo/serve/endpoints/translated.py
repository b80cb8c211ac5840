"""The path of a request that was translated from another API: it is the path of a chat."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from octavo.serve.api import prompt, validate
from octavo.serve.api.replies import Shape
from octavo.serve.api.request_fields import Field
from octavo.serve.api.translation import FieldNames, Translation
from octavo.serve.api.validate import Prepared
from octavo.serve.endpoints.completions import prepare_chat, read_chat
from octavo.serve.http.exchange import Exchange


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
