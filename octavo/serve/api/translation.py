"""A request of another API, translated to a chat request.

Each API has a module that translates its requests: `anthropic_messages`, `openai_responses` and
`ollama_api`. The chat request then takes the path of /v1/chat/completions, which checks all values.
So an error of that path names a field of the chat request. `FieldNames.errors` gives it the name
that the client used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import InvalidRequest
from octavo.serve.api.api_errors import ApiError, api_error, invalid_field
from octavo.serve.api.protocol import ChatRequest, Common
from octavo.serve.api.request_fields import Members

TYPE_WORDS = {
    str: "a string",
    int: "an integer",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}
WHOLE_MESSAGE = re.compile(r"\w+\.\d+")  # Other places are blocks or fields.
INDEXED = re.compile(r"\bmessages\.(\d+)\b(\.content\b)?")
# The types of blocks that consist of a text. A block may lack the type.
TEXT_BLOCKS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")


@dataclass
class FieldNames:
    """The names that a client used for fields."""

    # Regular expressions for fields of the translated request -> the names that the client used.
    names: dict[str, str]
    # The place of each message of the chat in the request of the client.
    places: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)  # The fields without effect.
    unknown: list[str] = field(default_factory=list)  # The fields that the API does not have.

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Rename the fields in errors."""
        try:
            yield
        except (ApiError, InvalidRequest) as error:
            found = api_error(error)
            raise ApiError(
                found.status,
                self.rename(found.message),
                found.code,
                found.param and self.rename(found.param),
                found.type,
                found.retry_after,
            ) from None

    def rename(self, text: str) -> str:
        """Return the text with the names of fields that the client used."""

        def place(found: re.Match[str]) -> str:
            index = int(found[1])
            if index >= len(self.places):
                return found[0]
            is_message = WHOLE_MESSAGE.fullmatch(self.places[index]) is not None
            return self.places[index] + (found[2] or "" if is_message else "")

        text = INDEXED.sub(place, text)
        for ours, theirs in self.names.items():
            text = re.sub(rf"(?<![\w.]){ours}(?!\w)", theirs, text)
        return text


@dataclass
class Translation:
    chat: ChatRequest
    fields: FieldNames


class Conversation:
    """Collects the messages of the chat. Consecutive messages of the assistant are joined."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        self._tools: dict[str, str] = {}  # id of a call -> name of the tool

    def append(self, message: dict[str, Any], place: str) -> None:
        self.messages.append(message)
        self.places.append(place)

    def turn(self, role: str, place: str) -> dict[str, Any]:
        """Return the last message if it has this role, or else a new one without content."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.append({"role": role, "content": ""}, place)
        return self.messages[-1]

    def add_reasoning(self, text: str, place: str) -> None:
        turn = self.turn("assistant", place)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def add_call(self, id: str, name: str, arguments: Any, place: str) -> None:
        """Add a call of a tool. The arguments are JSON or an object."""
        self._tools[id] = name
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.turn("assistant", place).setdefault("tool_calls", []).append(call)

    def add_result(self, id: str, content: str, place: str, **more: Any) -> None:
        """Add the result of a call. Some templates need the name of the tool."""
        result = {"role": "tool", "tool_call_id": id, "content": content, **more}
        if id in self._tools:
            result["name"] = self._tools[id]
        self.append(result, place)


def common_fields(body: Common) -> dict[str, Any]:
    """Return the fields that all requests for generation have."""
    return {name: getattr(body, name) for name in Common.__struct_fields__}


def several_stops(stop: str | list[str] | None, more: list[str] | None) -> list[str] | None:
    """Join the stop strings of two fields with the same meaning."""
    if more is None:
        return None if stop is None else [stop] if isinstance(stop, str) else stop
    return [*more, *([stop] if isinstance(stop, str) else stop or [])]


def text_of(content: Any, place: str) -> str:
    """Return the text of a string or of a list of text blocks."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid_field(place, f"{place} must be a string or a list of text blocks")
    return "".join(block_text(block, f"{place}.{i}") for i, block in enumerate(content))


def block_text(block: Any, place: str) -> str:
    """Return the text of a block of content."""
    text = block.get("text") if isinstance(block, dict) else None
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(text, str) or not (kind is None or kind in TEXT_BLOCKS):
        raise invalid_field(
            place, f"{place} must be a block of text, got {kind!r:.64}: this server takes text only"
        )
    return text


def member(value: dict[str, Any], name: str, kind: type, place: str) -> Any:
    """Return a member of an object, or None if it is missing. Raises if it has another type."""
    found = value.get(name)
    if kind is int and isinstance(found, float) and found.is_integer():
        return int(found)  # JSON has one type for both.
    is_wrong = kind is int and isinstance(found, bool)  # A bool is an int of Python.
    if found is not None and (is_wrong or not isinstance(found, kind)):
        where = f"{place}.{name}"
        raise invalid_field(where, f"{where} must be {TYPE_WORDS[kind]}")
    return found


def note_members(
    fields: FieldNames, place: str, value: dict[str, Any] | None, members: Members
) -> None:
    """Note the members of an object in a request that have no effect."""
    for name, given in (value or {}).items():
        if name in members.honoured or given is None:
            continue
        known = name in members.ignored
        (fields.ignored if known else fields.unknown).append(f"{place}.{name[:64]}")


def check_object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid_field(place, f"{place} must be an object")
    return value
