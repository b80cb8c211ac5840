"""The interface between the code that runs requests and the formats of the APIs.

`endpoints/completions.py` runs a request and passes its output to a ReplyWriter, which builds the
bytes of one API. The writers of the APIs that have blocks of content, such as Anthropic's, read the
text of the model with a ReplyParser. A reply without streaming and a stream of the same reply have
the same parts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from octavo.collect import Collector
from octavo.outputs import CompletionOutput
from octavo.serve.api.api_errors import ApiError
from octavo.serve.api.request_tools import ToolUse
from octavo.text.reasoning import ReasoningFilter, ReasoningStyle
from octavo.text.tool_calls import CallDelta

EVENT_STREAM = "text/event-stream; charset=utf-8"


class ReplyWriter(Protocol):
    """Builds the bytes of one reply."""

    @property
    def content_type(self) -> str:
        """The content type of a stream."""

    @property
    def keep_alive(self) -> bytes:
        """The bytes that a stream sends while it has no text. They may be empty."""

    def full_reply(self, collectors: list[Collector]) -> Any:
        """Return the reply without streaming, as a value for JSON."""

    def begin(self) -> bytes:
        """Return the start of a stream, before any text is generated. It may be empty."""

    def piece(
        self, prompt_index: int, piece: CompletionOutput, collectors: list[Collector]
    ) -> bytes:
        """Return the part of a stream for a piece of text, which may be empty."""

    def end(self, collectors: list[Collector], error: ApiError | None) -> bytes:
        """Return the end of a stream."""


class ReasoningDelta(NamedTuple):
    """New text of the reasoning that precedes an answer."""

    text: str


Delta = str | ReasoningDelta | CallDelta


class ReasoningStart(NamedTuple):
    """The beginning of a reply that may have reasoning."""

    style: ReasoningStyle
    in_reasoning: bool  # The prompt has opened the reasoning.

    def filter(self) -> ReasoningFilter:
        return ReasoningFilter(self.in_reasoning, self.style)


class ReplyParser:
    """Separates the text of one reply into reasoning, answer and calls of tools."""

    def __init__(self, tools: ToolUse | None, reasoning: ReasoningFilter | None):
        """`reasoning` is None if the model writes no reasoning."""
        self._tools = None if tools is None else tools.parser()
        self._reasoning = reasoning
        self._has_answer = False

    @property
    def calls(self) -> int:
        return 0 if self._tools is None else self._tools.calls

    def push(self, text: str, is_last: bool) -> list[Delta]:
        """Return the new parts in the order in which the model wrote them."""
        if self._reasoning is None:
            return list(self._split_answer(text, is_last))
        pieces = self._reasoning.push(text)
        if is_last:
            pieces += self._reasoning.finish()
        deltas: list[Delta] = []
        for is_reasoning, part in pieces:
            if is_reasoning:
                deltas.append(ReasoningDelta(part))
                continue
            if not self._has_answer:
                part = part.lstrip()  # Models put white space between reasoning and answer.
            if part:
                self._has_answer = True
                deltas += self._split_answer(part, is_last=False)
        if is_last:
            deltas += self._split_answer("", is_last=True)
        return deltas

    def _split_answer(self, text: str, is_last: bool) -> list[str | CallDelta]:
        """Return the new parts of the answer: texts and calls of tools."""
        if self._tools is None:
            return [text] if text else []
        deltas = self._tools.push(text)
        if is_last:
            deltas += self._tools.finish()
        return deltas


@dataclass
class Part:
    """A complete part of a reply: a text, reasoning, or a call of a tool."""

    kind: str  # "text", "reasoning" or "call"
    text: str  # The arguments, if the part is a call.
    name: str = ""  # The name of the tool, if the part is a call.


def complete_parts(parser: ReplyParser, text: str) -> list[Part]:
    """Return the parts of a complete reply."""
    parts: list[Part] = []
    for delta in parser.push(text, is_last=True):
        kind = delta_kind(delta)
        if isinstance(delta, CallDelta):
            if delta.name is not None:
                parts.append(Part(kind, "", delta.name))
            parts[-1].text += delta.arguments
            continue
        if not parts or parts[-1].kind != kind:
            parts.append(Part(kind, ""))
        parts[-1].text += delta if isinstance(delta, str) else delta.text
    return parts


def delta_kind(delta: Delta) -> str:
    if isinstance(delta, str):
        return "text"
    return "reasoning" if isinstance(delta, ReasoningDelta) else "call"


def arguments_object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object, for APIs that do not send them as text.

    Arguments that are not a JSON object are not repaired: the object has their text.
    """
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}
