"""Anthropic's Messages API: requests become chat requests, and replies become messages.

The system prompt, tools, calls and results have other forms than in a chat. Reasoning of the model
is a block of the type `thinking`. Stop strings that the client sent are reported by
`stop_sequence`.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import msgspec

from octavo.collect import Collector
from octavo.outputs import CompletionOutput
from octavo.serve.api.api_errors import ApiError, invalid_field
from octavo.serve.api.prompt import check_messages
from octavo.serve.api.protocol import ChatRequest, MessagesRequest
from octavo.serve.api.reply_writer import (
    EVENT_STREAM,
    Delta,
    Part,
    ReplyParser,
    arguments_object,
    complete_parts,
    delta_kind,
)
from octavo.serve.api.request_fields import MESSAGES_MEMBERS
from octavo.serve.api.translation import (
    Conversation,
    FieldNames,
    Translation,
    block_text,
    check_object,
    common_fields,
    join_stops,
    member,
    note_members,
    text_of,
)
from octavo.serve.limits import Limits
from octavo.text.tool_calls import CallDelta

# Claude Code begins its system prompt with such lines, which are data for Anthropic's servers and
# change with every request. In the prompt of a model, the lines would only prevent cache hits.
HEADER_LINES = re.compile(r"\A(?:x-anthropic-[a-z-]+:[^\n]*(?:\n|\Z))+")
NAMES = {
    r"stop(?= can have|$)": "stop_sequences",
    r"tools\.(\d+)\.function\.parameters": r"tools.\1.input_schema",
    r"tools\.(\d+)\.function": r"tools.\1",
    r"tool_choice\.function\.name": "tool_choice.name",
    r"chat_template_kwargs\.enable_thinking": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
THINKING = {"enabled": True, "disabled": False, "adaptive": None, "between_tools": None}
ERROR_TYPES = {"server_error": "api_error"}
STOP_REASONS = {"length": "max_tokens"}

# ---- requests ------------------------------------------------------------------------------------


def to_chat(body: MessagesRequest, limits: Limits) -> Translation:
    conversation = Conversation()
    fields = FieldNames(NAMES, conversation.message_paths)
    for path in ("output_config", "thinking", "tool_choice"):
        note_members(fields, path, getattr(body, path), MESSAGES_MEMBERS[path])
    tools = body.tools or []
    for tool in tools:
        note_members(fields, "tools", tool, MESSAGES_MEMBERS["tools"])
    add_system(conversation, body.system)
    for i, message in enumerate(check_messages(body.messages, limits)):
        add_message(conversation, message, f"messages.{i}")
    messages = conversation.messages
    choice, parallel = tool_choice(body.tool_choice)
    config = body.output_config or {}
    prefilled = bool(messages) and messages[-1]["role"] == "assistant"
    chat_fields = {
        **common_fields(body),
        "stop": join_stops(body.stop, body.stop_sequences),
        "messages": messages,
        "max_tokens": body.max_tokens,
        "stream": body.stream,
        "tools": [chat_tool(tool, f"tools.{i}") for i, tool in enumerate(tools)] or None,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "chat_template_kwargs": thinking_options(body.thinking),
        "thinking_token_budget": member(body.thinking or {}, "budget_tokens", int, "thinking"),
        "reasoning_effort": member(config, "effort", str, "output_config"),
        "response_format": output_format(body),
        "continue_final_message": prefilled,
        "add_generation_prompt": not prefilled,
    }
    return Translation(ChatRequest(**chat_fields), fields)


def add_system(conversation: Conversation, system: str | list[dict[str, Any]] | None) -> None:
    """Add the system prompt without the header lines of its blocks."""
    blocks = [system] if isinstance(system, str) else system or []
    texts = [
        block if isinstance(block, str) else block_text(block, f"system.{i}")
        for i, block in enumerate(blocks)
    ]
    text = "\n".join(filter(None, (HEADER_LINES.sub("", text) for text in texts)))
    if text:
        conversation.append({"role": "system", "content": text}, "system")


def add_message(conversation: Conversation, message: dict[str, Any], path: str) -> None:
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        raise invalid_field(
            f"{path}.role", f"{path}.role must be user, assistant or system, got {role!r:.40}"
        )
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise invalid_field(
            f"{path}.content", f"{path}.content must be a string or a list of blocks"
        )
    for i, block in enumerate(content):
        block_path = f"{path}.content.{i}"
        kind = check_object(block, block_path).get("type")
        if role == "user" and kind == "tool_result":
            id = member(block, "tool_use_id", str, block_path) or ""
            text = text_of(block.get("content"), f"{block_path}.content")
            is_error = member(block, "is_error", bool, block_path)  # A template may use it.
            conversation.add_result(id, text, block_path, is_error=is_error)
        elif role == "assistant" and kind == "tool_use":
            id = member(block, "id", str, block_path) or ""
            name = member(block, "name", str, block_path) or ""
            arguments = member(block, "input", dict, block_path) or {}
            conversation.add_call(id, name, arguments, block_path)
        elif role == "assistant" and kind == "thinking":
            conversation.add_reasoning(member(block, "thinking", str, block_path) or "", block_path)
        elif role == "assistant" and kind == "redacted_thinking":
            conversation.open_message(role, path)
        else:
            conversation.open_message(role, path)["content"] += block_text(block, block_path)
    if not content:
        conversation.open_message(role, path)


def chat_tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a tool in the form of a chat request."""
    if tool.get("type") not in (None, "custom"):
        raise invalid_field(
            f"{path}.type", f"{path}.type must be custom: this server has no built-in tools"
        )
    if tool.get("input_schema") is None:
        raise invalid_field(
            f"{path}.input_schema",
            f"{path}.input_schema is missing: it must be a JSON schema of an object",
        )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
        "strict": tool.get("strict"),
    }
    present = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": present}


def tool_choice(choice: dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """Return the fields tool_choice and parallel_tool_calls of a chat request."""
    if choice is None:
        return None, None
    kind = choice.get("type")
    is_parallel_disabled = member(choice, "disable_parallel_tool_use", bool, "tool_choice")
    parallel = None if is_parallel_disabled is None else not is_parallel_disabled
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    if not isinstance(kind, str) or kind not in CHOICES:
        raise invalid_field("tool_choice.type", "tool_choice.type must be auto, any, tool or none")
    return CHOICES[kind], parallel


def thinking_options(thinking: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the variables of the chat template that turn reasoning on or off."""
    if thinking is None:
        return None
    kind = thinking.get("type")
    if not isinstance(kind, str) or kind not in THINKING:
        raise invalid_field("thinking.type", f"thinking.type must be one of {', '.join(THINKING)}")
    return None if THINKING[kind] is None else {"enable_thinking": THINKING[kind]}


def output_format(body: MessagesRequest) -> dict[str, Any] | None:
    format = member(body.output_config or {}, "format", dict, "output_config")
    if format is None:
        return body.response_format
    if format.get("type") != "json_schema":
        raise invalid_field(
            "output_config.format.type", "output_config.format.type must be json_schema"
        )
    return {"type": "json_schema", "json_schema": {"schema": format.get("schema")}}


# ---- replies -------------------------------------------------------------------------------------


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = "request_too_large" if error.status == 413 else ERROR_TYPES.get(error.type, error.type)
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": request_id,
    }


class MessageWriter:
    """Builds a message, as one object or as a stream of events."""

    content_type = EVENT_STREAM

    def __init__(
        self, request_id: str, model: str, parser: ReplyParser, body: MessagesRequest
    ) -> None:
        self._request_id = request_id
        self._model = model
        self._parser = parser
        self._omits_thinking = (body.thinking or {}).get("display") == "omitted"
        self._has_started = False
        self._block: str | None = None  # The kind of the block that is open.
        self._index = -1  # The index of the latest block.

    @property
    def keep_alive(self) -> bytes:
        return event("ping") if self._has_started else b": keep-alive\n\n"

    def full_reply(self, collectors: list[Collector]) -> dict[str, Any]:
        (collector,) = collectors
        (completion,) = collector.best
        parts = complete_parts(self._parser, completion.text)
        return {
            **self._message(),
            "content": [self._content(part) for part in parts],
            **self._stop_fields(completion),
            "usage": usage(collector),
        }

    def begin(self) -> bytes:
        return b""

    def piece(
        self, prompt_index: int, piece: CompletionOutput, collectors: list[Collector]
    ) -> bytes:
        (collector,) = collectors
        is_last = piece.finish_reason is not None
        events: list[bytes] = []
        if not self._has_started:
            self._has_started = True
            message = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None}
            message["usage"] = {**usage(collector), "output_tokens": 0}
            events.append(event("message_start", message=message))
        for delta in self._parser.push(piece.text, is_last):
            events += self._delta(delta)
        if is_last:
            events += self._close()
            stop_fields = self._stop_fields(piece)
            events.append(event("message_delta", delta=stop_fields, usage=usage(collector)))
        return b"".join(events)

    def end(self, collectors: list[Collector], error: ApiError | None) -> bytes:
        if error is not None:
            return sse("error", error_body(error, self._request_id))
        return event("message_stop")

    def _message(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self._request_id.removeprefix('req_')}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
        }

    def _stop_fields(self, completion: CompletionOutput) -> dict[str, Any]:
        """Return the fields that say why the reply ended."""
        reason = STOP_REASONS.get(completion.finish_reason or "", "end_turn")
        sequence = completion.stop_reason if isinstance(completion.stop_reason, str) else None
        if completion.finish_reason == "stop" and self._parser.calls:
            reason = "tool_use"
        elif sequence is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _content(self, part: Part) -> dict[str, Any]:
        """Return a complete block."""
        if part.kind == "call":
            return {**call_block(part.name), "input": arguments_object(part.text)}
        if part.kind == "text":
            return {"type": "text", "text": part.text}
        return thinking_block("" if self._omits_thinking else part.text)

    def _delta(self, delta: Delta) -> list[bytes]:
        """Return the events for a new part of the reply."""
        events: list[bytes] = []
        kind = delta_kind(delta)
        if kind != self._block or (isinstance(delta, CallDelta) and delta.name is not None):
            events += self._close()
            self._block = kind
            self._index += 1
            block = {"type": "text", "text": ""} if kind == "text" else thinking_block("")
            if isinstance(delta, CallDelta):
                block = call_block(delta.name or "")
            events.append(event("content_block_start", index=self._index, content_block=block))
        if isinstance(delta, CallDelta):
            change = {"type": "input_json_delta", "partial_json": delta.arguments}
        elif isinstance(delta, str):
            change = {"type": "text_delta", "text": delta}
        else:
            text = "" if self._omits_thinking else delta.text
            change = {"type": "thinking_delta", "thinking": text}
        events.append(event("content_block_delta", index=self._index, delta=change))
        return events

    def _close(self) -> list[bytes]:
        if self._block is None:
            return []
        self._block = None
        return [event("content_block_stop", index=self._index)]


def usage(collector: Collector) -> dict[str, int]:
    """Return the counts of tokens. Anthropic counts cached tokens apart from the others."""
    return {
        "input_tokens": len(collector.request.prompt) - collector.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": collector.cached,
        "output_tokens": sum(len(output.token_ids) for output in collector.completions),
    }


def call_block(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name, "input": {}}


def thinking_block(text: str) -> dict[str, Any]:
    """Return a block of reasoning. The signature, which Anthropic's servers check, is empty."""
    return {"type": "thinking", "thinking": text, "signature": ""}


def event(kind: str, **members: Any) -> bytes:
    return sse(kind, {"type": kind, **members})


def sse(kind: str, body: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(body))
