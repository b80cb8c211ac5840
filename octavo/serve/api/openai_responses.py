"""OpenAI's Responses API: requests become chat requests, and replies become responses.

A response consists of items: messages, calls of functions and reasoning. A request may continue an
earlier response by its id, if that response is stored (`front/response_store.py`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec

from octavo.collect import Collector
from octavo.outputs import CompletionOutput
from octavo.serve.api.api_errors import ApiError, invalid_field, unsupported
from octavo.serve.api.protocol import ChatRequest, ResponsesRequest
from octavo.serve.api.replies import KEEP_ALIVE, ReplyFormat, prompt_text
from octavo.serve.api.reply_writer import (
    EVENT_STREAM,
    Delta,
    ReplyParser,
    delta_kind,
)
from octavo.serve.api.request_fields import RESPONSES_MEMBERS
from octavo.serve.api.translation import (
    Conversation,
    FieldNames,
    Translation,
    check_object,
    common_fields,
    member,
    note_members,
    text_of,
)
from octavo.serve.limits import Limits
from octavo.text.reasoning import CLOSE_TAG
from octavo.text.tokenizer import Tokenizer
from octavo.text.tool_calls import CallDelta

NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    r"tools\.(\d+)\.function": r"tools.\1",
    r"tool_choice\.function\.name": "tool_choice.name",
    "reasoning_effort": "reasoning.effort",
    r"response_format\.json_schema": "text.format",
    "response_format": "text.format",
}
LOGPROBS = "message.output_text.logprobs"
METADATA_PAIRS = 16
METADATA_NAME = 64  # characters
METADATA_VALUE = 512  # characters
CHOICES = "none, auto, required, a function or allowed_tools"
# Types of tools that clients such as Codex offer with every request. The model answers without
# them. Tools of other types name data or servers that the answer depends on, and are refused.
IGNORED_TOOL_TYPES = (
    "apply_patch",
    "computer",
    "computer_use_preview",
    "custom",
    "image_generation",
    "local_shell",
    "namespace",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
)

# ---- requests ------------------------------------------------------------------------------------


def to_chat(
    body: ResponsesRequest, earlier: list[dict[str, Any]], limits: Limits
) -> tuple[Translation, list[dict[str, Any]]]:
    """Return the chat request, and the conversation without instructions, which may be stored.

    `earlier` is the conversation of the previous response.
    """
    check_metadata(body.metadata)
    conversation = Conversation()
    chat_tools_by_index = chat_tools(body.tools or [])
    names = renumbered_tools(chat_tools_by_index) | NAMES
    fields = FieldNames(names, conversation.message_paths)
    for path in ("reasoning", "text"):
        note_members(fields, path, getattr(body, path), RESPONSES_MEMBERS[path])
    if isinstance(body.tool_choice, dict):
        note_members(fields, "tool_choice", body.tool_choice, RESPONSES_MEMBERS["tool_choice"])
    for tool in body.tools or []:
        if tool.get("type") in IGNORED_TOOL_TYPES:
            fields.ignored.append(f"tools.{tool['type']}")
        else:
            note_members(fields, "tools", tool, RESPONSES_MEMBERS["tools"])
    for message in earlier:
        conversation.append(message, "previous_response_id")
    for i, item in enumerate(input_items(body.input, limits)):
        add_item(conversation, check_object(item, f"input.{i}"), f"input.{i}")
    messages = list(conversation.messages)
    if body.instructions:
        conversation.messages.insert(0, {"role": "system", "content": body.instructions})
        conversation.message_paths.insert(0, "instructions")
    choice, tools = tool_choice(body.tool_choice, list(chat_tools_by_index.values()))
    if not tools and body.tools and choice in ("auto", "none"):
        choice = None  # The chat request has no tools to choose from.
    included = body.include or []
    if any(name != LOGPROBS for name in included):
        fields.ignored.append("include")
    wants_logprobs = LOGPROBS in included or body.top_logprobs is not None
    chat_fields = {
        **common_fields(body),
        "messages": conversation.messages,
        "max_tokens": body.max_output_tokens,
        "stream": body.stream,
        "tools": tools or None,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "logprobs": wants_logprobs or None,
        "top_logprobs": body.top_logprobs,
        "truncate_prompt_tokens": truncation(body.truncation),
        "reasoning_effort": member(body.reasoning or {}, "effort", str, "reasoning"),
        "response_format": text_format(body),
        "chat_template_kwargs": body.chat_template_kwargs,
        "return_prompt_text": body.enable_response_messages,
    }
    return Translation(ChatRequest(**chat_fields), fields), messages


def input_items(value: str | list[Any] | None, limits: Limits) -> list[Any]:
    if not value:
        raise invalid_field("input", "input must be a text or a list of at least one item")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    parts = [item.get("content") for item in value if isinstance(item, dict)]
    count = len(value) + sum(len(part) for part in parts if isinstance(part, list))
    if count > limits.parts:
        raise invalid_field(
            "input",
            f"input can have at most {limits.parts} items and parts, got {count}",
            "param_out_of_range",
        )
    return value


def add_item(conversation: Conversation, item: dict[str, Any], path: str) -> None:
    """Add an item of the input to the conversation."""
    kind = item.get("type", "message")
    if kind == "message" and item.get("role") == "assistant":
        text = text_of(item.get("content"), f"{path}.content")
        conversation.open_message("assistant", path)["content"] += text
    elif kind == "message":
        message = {"role": item.get("role"), "content": item.get("content")}
        conversation.append(message, path)
    elif kind == "function_call":
        conversation.add_call(
            member(item, "call_id", str, path) or "",
            member(item, "name", str, path) or "",
            member(item, "arguments", str, path) or "",
            path,
        )
    elif kind == "function_call_output":
        text = text_of(item.get("output"), f"{path}.output")
        conversation.add_result(member(item, "call_id", str, path) or "", text, path)
    elif kind == "reasoning":
        content = item.get("content")
        if content in (None, "", []):
            content = item.get("summary")
        conversation.add_reasoning(text_of(content, f"{path}.content"), path)
    else:
        raise unsupported(
            f"{path}.type",
            f"the type {kind!r:.64} needs a tool or a store that this server does not have: use "
            "the types message, function_call, function_call_output and reasoning",
        )


def chat_tools(tools: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the tools of the chat request by their index in the request of the client.

    Tools of ignored types are left out.
    """
    return {
        index: chat_tool(tool)
        for index, tool in enumerate(tools)
        if tool.get("type") not in IGNORED_TOOL_TYPES
    }


def renumbered_tools(tools: dict[int, dict[str, Any]]) -> dict[str, str]:
    """Return the names of FieldNames for tools whose index in the chat request is another one."""
    renumbered = [(index, original) for index, original in enumerate(tools) if index != original]
    return {
        rf"tools\.{index}(\.function)?": f"tools.{original}"
        for index, original in reversed(renumbered)
    }


def chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of a chat request, which refuses other types than functions."""
    if tool.get("type") != "function":
        return tool
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def tool_choice(
    choice: str | dict[str, Any] | None, tools: list[dict[str, Any]]
) -> tuple[str | dict[str, Any] | None, list[dict[str, Any]]]:
    """Return the field tool_choice of a chat request, and the tools that may be called."""
    if not isinstance(choice, dict):
        return choice, tools
    kind = choice.get("type")
    if kind == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}, tools
    if kind != "allowed_tools":
        raise invalid_field("tool_choice.type", f"tool_choice must be {CHOICES}")
    allowed = member(choice, "tools", list, "tool_choice") or []
    names = [tool.get("name") for tool in allowed if isinstance(tool, dict)]
    allowed_tools = [tool for tool in tools if tool.get("function", {}).get("name") in names]
    if not allowed_tools:
        raise invalid_field("tool_choice.tools", "tool_choice.tools names no tool of the request")
    return member(choice, "mode", str, "tool_choice") or "auto", allowed_tools


def truncation(mode: str | None) -> int | None:
    """Return truncate_prompt_tokens: -1 removes the start of a prompt that does not fit."""
    if mode not in (None, "auto", "disabled"):
        raise invalid_field("truncation", "truncation must be auto or disabled")
    return -1 if mode == "auto" else None


def text_format(body: ResponsesRequest) -> dict[str, Any] | None:
    format: dict[str, Any] | None = member(body.text or {}, "format", dict, "text")
    if format is None:
        return body.response_format
    if format.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": format.get("schema")}}
    return format


def check_metadata(metadata: dict[str, Any] | None) -> None:
    """Check the size of the metadata, which the response repeats."""
    for name, value in (metadata or {}).items():
        is_short = isinstance(value, str) and len(value) <= METADATA_VALUE
        if not is_short or len(name) > METADATA_NAME or len(metadata or {}) > METADATA_PAIRS:
            raise invalid_field(
                "metadata",
                f"metadata can have at most {METADATA_PAIRS} pairs, with names of at most "
                f"{METADATA_NAME} and texts of at most {METADATA_VALUE} characters",
                "param_out_of_range",
            )


# ---- replies -------------------------------------------------------------------------------------


def response_id(request_id: str) -> str:
    return f"resp_{request_id.removeprefix('req_')}"


def request_id(response_id: str) -> str:
    return f"req_{response_id.removeprefix('resp_')}"


def error_event(error: ApiError, number: int) -> bytes:
    """Return the event that ends a stream whose response object is lost."""
    body = {
        "type": "error",
        "sequence_number": number,
        "code": error.code or error.type,
        "message": error.message,
        "param": error.param,
    }
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(body)


class ResponseWriter:
    """Builds a response, as one object or as a stream of events."""

    content_type = EVENT_STREAM
    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        response: dict[str, Any],
        parser: ReplyParser,
        reply_format: ReplyFormat,
        tokenizer: Tokenizer,
        completed: Callable[[dict[str, Any]], None],
    ):
        """`completed` is called with the complete response before the client receives it."""
        self.response = response
        self._parser = parser
        self._reply_format = reply_format
        self._tokenizer = tokenizer
        self._completed = completed
        self._number = 0  # The number of the next event.
        self._open: str | None = None  # The kind of the item that is open.
        self._logprobs: list[dict[str, Any]] = []  # These belong to the next text.

    @property
    def _output(self) -> list[dict[str, Any]]:
        output: list[dict[str, Any]] = self.response["output"]
        return output

    def full_reply(self, collectors: list[Collector]) -> dict[str, Any]:
        (collector,) = collectors
        (completion,) = collector.best
        self._add(completion, is_last=True)
        self._finish(collector, completion)
        return self.response

    def begin(self) -> bytes:
        return self._state("response.created") + self._state("response.in_progress")

    def piece(
        self, prompt_index: int, piece: CompletionOutput, collectors: list[Collector]
    ) -> bytes:
        is_last = piece.finish_reason is not None
        events = self._add(piece, is_last)
        if is_last:
            (collector,) = collectors
            self._finish(collector, piece)
        return b"".join(events)

    def end(self, collectors: list[Collector], error: ApiError | None) -> bytes:
        if error is not None:
            self.fail(error)
        return self._state(f"response.{self.response['status']}")

    def fail(self, error: ApiError) -> None:
        self.response["status"] = "failed"
        self.response["error"] = {"code": error.code or error.type, "message": error.message}

    # ---- events ----

    def _event(self, kind: str, **members: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **members}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(body))

    def _state(self, kind: str) -> bytes:
        return self._event(kind, response=self.response)

    def _item_event(self, kind: str, **members: Any) -> bytes:
        """Return an event about the latest item."""
        index = len(self._output) - 1
        id = self._output[index]["id"]
        return self._event(f"response.{kind}", item_id=id, output_index=index, **members)

    def _item_state(self, kind: str) -> bytes:
        index = len(self._output) - 1
        return self._event(f"response.{kind}", output_index=index, item=self._output[index])

    # ---- items ----

    def _add(self, piece: CompletionOutput, is_last: bool) -> list[bytes]:
        """Add a piece of text to the output, and return the events."""
        if self._reply_format.logprobs is not None and piece.logprobs:
            logprobs = self._reply_format.logprobs.chat(self._tokenizer, piece.logprobs)
            self._logprobs += logprobs["content"]
        events: list[bytes] = []
        for delta in self._parser.push(piece.text, is_last):
            kind = delta_kind(delta)
            if kind != self._open or (isinstance(delta, CallDelta) and delta.name is not None):
                events += self._close("completed")
                events += self._start(kind, delta)
            events.append(self._extend(delta))
        if is_last:
            is_cut = piece.finish_reason == "length"
            events += self._close("incomplete" if is_cut else "completed")
        return events

    def _start(self, kind: str, delta: Delta) -> list[bytes]:
        self._open = kind
        item = new_item(delta)
        self._output.append(item)
        events = [self._item_state("output_item.added")]
        if kind != "call":
            part = {"type": "reasoning_text", "text": ""}
            if kind == "text":
                part = text_part()
            item["content"] = [part]
            events.append(self._item_event("content_part.added", content_index=0, part=part))
        return events

    def _extend(self, delta: Delta) -> bytes:
        item = self._output[-1]
        if isinstance(delta, CallDelta):
            item["arguments"] += delta.arguments
            return self._item_event("function_call_arguments.delta", delta=delta.arguments)
        (part,) = item["content"]
        if not isinstance(delta, str):
            part["text"] += delta.text
            return self._item_event("reasoning_text.delta", content_index=0, delta=delta.text)
        part["text"] += delta
        part["logprobs"] += self._logprobs
        event = self._item_event(
            "output_text.delta", content_index=0, delta=delta, logprobs=self._logprobs
        )
        self._logprobs = []
        return event

    def _close(self, status: str) -> list[bytes]:
        """Complete the item that is open."""
        if self._open is None:
            return []
        item = self._output[-1]
        item["status"] = status
        events: list[bytes] = []
        if self._open == "call":
            event = self._item_event(
                "function_call_arguments.done", name=item["name"], arguments=item["arguments"]
            )
            events.append(event)
        else:
            (part,) = item["content"]
            members = {"content_index": 0, "text": part["text"]}
            if self._open == "text":
                members["logprobs"] = part["logprobs"]
            name = "output_text" if self._open == "text" else "reasoning_text"
            events.append(self._item_event(f"{name}.done", **members))
            events.append(self._item_event("content_part.done", content_index=0, part=part))
        self._open = None
        return [*events, self._item_state("output_item.done")]

    def _finish(self, collector: Collector, completion: CompletionOutput) -> None:
        """Add the fields that are set at the end of the reply."""
        if completion.finish_reason == "length":
            self.response["status"] = "incomplete"
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["status"] = "completed"
            self.response["completed_at"] = int(time.time())
        self.response["usage"] = self._usage(collector)
        if self._reply_format.prompt_text:
            self._add_messages(collector)
        self._completed(self.response)

    def _add_messages(self, collector: Collector) -> None:
        """Add the texts and the token ids of the prompt and of the reply, as vLLM does."""
        prompt = prompt_text(self._tokenizer, collector)
        reply = [id for output in collector.completions for id in output.token_ids]
        text = self._tokenizer.decode(reply, skip_special_tokens=False)
        self.response["input_messages"] = [raw_message(prompt, collector.request.prompt)]
        self.response["output_messages"] = [raw_message(text, reply)]

    def _usage(self, collector: Collector) -> dict[str, Any]:
        prompt = len(collector.request.prompt)
        ids = [id for output in collector.completions for id in output.token_ids]
        reasoning = 0
        if any(item["type"] == "reasoning" for item in self._output):
            reasoning = reasoning_tokens(self._tokenizer, ids)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": collector.cached, "cache_write_tokens": 0},
            "output_tokens": len(ids),
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": prompt + len(ids),
        }


def new_item(delta: Delta) -> dict[str, Any]:
    """Return the item that begins with this part of a reply."""
    if isinstance(delta, CallDelta):
        return {
            "id": f"fc_{secrets.token_hex(12)}",
            "type": "function_call",
            "call_id": f"call_{secrets.token_hex(12)}",
            "name": delta.name,
            "arguments": "",
            "status": "in_progress",
        }
    if isinstance(delta, str):
        return {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "content": [],
            "status": "in_progress",
        }
    return {
        "id": f"rs_{secrets.token_hex(12)}",
        "type": "reasoning",
        "summary": [],
        "content": [],
        "status": "in_progress",
    }


def raw_message(text: str, ids: list[int]) -> dict[str, Any]:
    return {"type": "raw_message_tokens", "message": text, "tokens": ids}


def text_part() -> dict[str, Any]:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def reasoning_tokens(tokenizer: Tokenizer, ids: list[int]) -> int:
    """Return how many tokens the reasoning has, including the closing tag.

    It is all tokens if no closing tag follows, and 0 if the tag is not a token of the model.
    """
    closing = tokenizer.convert_tokens_to_ids(CLOSE_TAG)
    if not isinstance(closing, int):
        return 0
    return ids.index(closing) + 1 if closing in ids else len(ids)


def new_response(body: ResponsesRequest, id: str, model: str) -> dict[str, Any]:
    """Return the response before anything is generated. It repeats fields of the request."""
    config = body.text or {}
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {**config, "format": config.get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def reply_messages(response: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the output of a response as messages of a chat, for a request that continues it."""
    conversation = Conversation()
    for item in response["output"]:
        add_item(conversation, item, "previous_response_id")
    return conversation.messages
