"""A request of another API, translated to a chat request.

Each API has a module that translates its requests: `anthropic_messages`, `openai_responses` and
`ollama_api`. The chat request then takes the path of /v1/chat/completions, which checks all values.
So an error of that path names a field of the chat request. `FieldNames.errors` gives it the name
that the client used. It leaves the name if the client itself sent a field of that name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
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
MESSAGE_PATH = re.compile(r"\w+\.\d+")  # Other paths lead to blocks or fields.
MESSAGE_FIELD = re.compile(r"\bmessages\.(\d+)\b(\.content\b)?")
# The types of blocks that consist of a text. A block may lack the type.
TEXT_BLOCKS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")


@dataclass
class FieldNames:
    """The names that a client used for fields."""

    # Regular expressions for fields of the translated request -> the names that the client used.
    names: dict[str, str]
    # The path of each chat message in the request of the client, such as messages.3.content.0.
    message_paths: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)  # The fields without effect.
    unknown: list[str] = field(default_factory=list)  # The fields that the API does not have.
    sent: Collection[str] = ()  # The names that are not translated, because the client sent them.

    @contextmanager
    def errors(self, sent: Collection[str] = ()) -> Iterator[None]:
        """Rename the fields in errors, except the fields that the client `sent` itself."""
        self.sent = sent
        try:
            yield
        except (ApiError, InvalidRequest) as error:
            original = api_error(error)
            raise ApiError(
                status=original.status,
                message=self.rename(original.message),
                code=original.code,
                param=original.param and self.rename(original.param),
                type=original.type,
                retry_after=original.retry_after,
            ) from None

    def rename(self, text: str) -> str:
        """Return the text with the names of fields that the client used."""

        def client_path(match: re.Match[str]) -> str:
            index = int(match[1])
            if index >= len(self.message_paths):
                return match[0]
            path = self.message_paths[index]
            if MESSAGE_PATH.fullmatch(path) is None:
                return path
            content = match[2] or ""
            return path + content

        text = MESSAGE_FIELD.sub(client_path, text)
        for pattern, client_name in self.names.items():

            def client_field(match: re.Match[str], client_name: str = client_name) -> str:
                field_name, _, _ = match[0].partition(".")
                return match[0] if field_name in self.sent else match.expand(client_name)

            text = re.sub(rf"(?<![\w.]){pattern}(?!\w)", client_field, text)
        return text


@dataclass
class Translation:
    chat: ChatRequest
    fields: FieldNames


class Conversation:
    """Collects the messages of the chat. Consecutive messages of the assistant are joined."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.message_paths: list[str] = []
        self._tools: dict[str, str] = {}  # id of a call -> name of the tool

    def append(self, message: dict[str, Any], path: str) -> None:
        self.messages.append(message)
        self.message_paths.append(path)

    def open_message(self, role: str, path: str) -> dict[str, Any]:
        """Return the last message if it has this role, or else a new one without content."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.append({"role": role, "content": ""}, path)
        return self.messages[-1]

    def add_reasoning(self, text: str, path: str) -> None:
        message = self.open_message("assistant", path)
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def add_call(self, id: str, name: str, arguments: Any, path: str) -> None:
        """Add a call of a tool. The arguments are JSON or an object."""
        self._tools[id] = name
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        message = self.open_message("assistant", path)
        message.setdefault("tool_calls", []).append(call)

    def add_result(self, id: str, content: str, path: str, **extra: Any) -> None:
        """Add the result of a call. Some templates need the name of the tool."""
        result = {"role": "tool", "tool_call_id": id, "content": content, **extra}
        if id in self._tools:
            result["name"] = self._tools[id]
        self.append(result, path)


def sent_names(body: Common, unknown: Mapping[str, Any]) -> set[str]:
    """Return the fields of a request that the translated request has under the same names."""
    common = {name for name, value in common_fields(body).items() if value is not None}
    return common | unknown.keys()


def common_fields(body: Common) -> dict[str, Any]:
    """Return the fields that all requests for generation have."""
    return {name: getattr(body, name) for name in Common.__struct_fields__}


def join_stops(stop: str | list[str] | None, stop_sequences: list[str] | None) -> list[str] | None:
    """Join the stop strings of two fields with the same meaning. Returns None if both are None."""
    if stop is None:
        return stop_sequences
    stops = [stop] if isinstance(stop, str) else stop
    return [*(stop_sequences or []), *stops]


def text_of(content: Any, path: str) -> str:
    """Return the text of a string or of a list of text blocks."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid_field(path, f"{path} must be a string or a list of text blocks")
    return "".join(block_text(block, f"{path}.{i}") for i, block in enumerate(content))


def block_text(block: Any, path: str) -> str:
    """Return the text of a block of content."""
    text = block.get("text") if isinstance(block, dict) else None
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(text, str) or not (kind is None or kind in TEXT_BLOCKS):
        raise invalid_field(
            path, f"{path} must be a block of text, got {kind!r:.64}: this server takes text only"
        )
    return text


def member(value: dict[str, Any], name: str, kind: type, path: str) -> Any:
    """Return a member of an object, or None if it is missing. Raises if it has another type."""
    content = value.get(name)
    if content is None:
        return None
    if kind is int and isinstance(content, float) and content.is_integer():
        return int(content)  # JSON has one type for integers and floats.
    is_bool_as_int = kind is int and isinstance(content, bool)  # bool is a subclass of int.
    if is_bool_as_int or not isinstance(content, kind):
        member_path = f"{path}.{name}"
        raise invalid_field(member_path, f"{member_path} must be {TYPE_WORDS[kind]}")
    return content


def note_members(
    fields: FieldNames, path: str, value: dict[str, Any] | None, members: Members
) -> None:
    """Note the members of an object in a request that have no effect."""
    for name, content in (value or {}).items():
        if name in members.honoured or content is None:
            continue
        names = fields.ignored if name in members.ignored else fields.unknown
        names.append(f"{path}.{name[:64]}")


def check_object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid_field(path, f"{path} must be an object")
    return value
