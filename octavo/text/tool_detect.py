"""Finds the format in which a model writes tool calls, from its chat template.

A template renders the calls of earlier turns as the model writes them. So the format is the one
whose parser reads back a call that the template has rendered. If a template leaves calls out, the
tags in its text decide, and then the tokens of the tokenizer.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from octavo.errors import InvalidRequest
from octavo.text.chat import ChatTemplate
from octavo.text.tokenizer import Tokenizer
from octavo.text.tool_calls import CallDelta
from octavo.text.tool_formats import FORMATS, HERMES, NO_FORMAT, ToolFormat
from octavo.text.tool_patterns import make_parser

PROBE_USER = {"role": "user", "content": "How is the weather?"}
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city."}},
            "required": ["city"],
        },
    },
}
PROBE_ARGUMENTS = {"city": "Paris"}
# Some templates need an id of nine letters and digits. Others write the id in place of the name.
CALL_IDS = ("call00001", "functions.{name}:0")
_UP_TO_LAST_BREAK = re.compile(r".*[\s>\]]", re.DOTALL)
_LEADING_TAGS = re.compile(r"^(?:\s|<[^<>\s]+>)*")
_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


@lru_cache(maxsize=16)
def detect_format(template: ChatTemplate, tokenizer: Tokenizer) -> ToolFormat:
    """Return the format of a model with this template. If the template does not show tools, they
    are described in words (octavo.text.tool_prompt), which ask for the hermes format."""
    if not template.knows_tools:
        return HERMES
    texts = [written_call(template, PROBE_TOOL, PROBE_ARGUMENTS, call_id) for call_id in CALL_IDS]
    # Tags before a call may belong to the turn. But they may also be the opening tags of a format,
    # so each text is tried with its tags first.
    texts += [_LEADING_TAGS.sub("", text) for text in texts]
    for text in texts:
        for format in FORMATS.values():
            if read_call(format, text, PROBE_TOOL) == ("get_weather", PROBE_ARGUMENTS):
                return format
    return _format_by_tags(template.source) or _format_by_tokens(tokenizer) or NO_FORMAT


def guess_format(source: str) -> ToolFormat:
    """Return the format of a template that must not be rendered here, from its text alone."""
    return _format_by_tags(source) or (NO_FORMAT if "tools" in source else HERMES)


def written_call(
    template: ChatTemplate, tool: dict[str, Any], arguments: dict[str, Any], call_id: str
) -> str:
    """Return what the template renders for a call, after the opening of the assistant's turn. The
    text is empty if the template cannot render a call."""
    name = tool["function"]["name"]
    call = {
        "id": call_id.format(name=name),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        prompt = template.render([PROBE_USER], [tool])
        text = template.render([PROBE_USER, turn], [tool], add_generation_prompt=False)
    except InvalidRequest:
        return ""
    common = _common_length(prompt, text)
    # The texts may have the beginning of a tag in common, which belongs to the call.
    last_break = _UP_TO_LAST_BREAK.match(text, 0, common)
    return text[last_break.end() if last_break else 0 :]


def _common_length(first: str, second: str) -> int:
    """Return the length of the longest common prefix of two texts."""
    length = min(len(first), len(second))
    return next((index for index in range(length) if first[index] != second[index]), length)


def read_call(format: ToolFormat, text: str, tool: dict[str, Any]) -> tuple[str, Any] | None:
    """Return the name and the arguments of the only call in a text."""
    function = tool["function"]
    parser = make_parser(format, {function["name"]: function["parameters"]})
    deltas = parser.push(text) + parser.finish()
    call_deltas = [delta for delta in deltas if isinstance(delta, CallDelta)]
    if parser.calls != 1:
        return None
    try:
        arguments = json.loads("".join(delta.arguments for delta in call_deltas))
    except ValueError:
        return None
    return str(call_deltas[0].name), arguments


def _format_by_tags(source: str) -> ToolFormat | None:
    """Return the format whose tags are all in the template's text. Of several formats, the one with
    the longest tags is returned."""
    best: ToolFormat | None = None
    best_length = 0
    for format in FORMATS.values():
        tags = _tags_of_every_call(format)
        length = sum(map(len, tags))
        if length > best_length and all(tag in source for tag in tags):
            best = format
            best_length = length
    return best


def _tags_of_every_call(format: ToolFormat) -> list[str]:
    texts = [part for text in format.call_texts for part in _TAG.findall(text) or [text]]
    return [text for text in texts if len(text.strip("[](){} ")) > 3]


def _format_by_tokens(tokenizer: Tokenizer) -> ToolFormat | None:
    """Return the first format whose opening tag is a token."""
    for format in FORMATS.values():
        tags = () if format.start else format.opening
        if any(tokenizer.backend.token_to_id(tag) is not None for tag in tags):
            return format
    return None
