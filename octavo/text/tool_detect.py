"""Finds out how a model writes calls of tools.

The chat template knows: it writes the calls of earlier turns as the model writes them. So the
format is the one whose parser reads back a call that the template has written. Where a template
leaves calls out, the tags that it mentions tell, and then the tokens of the tokenizer.
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

NAME = "get_weather"
ARGUMENTS = {"city": "Paris"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "A city."}},
    "required": ["city"],
}
TOOL = {
    "type": "function",
    "function": {"name": NAME, "description": "Tells the weather.", "parameters": SCHEMA},
}
# Some templates insist on nine letters and digits, others write the id in place of the name.
IDS = ("call00001", f"functions.{NAME}:0")
_BREAK = re.compile(r".*[\s>\]]", re.DOTALL)
_LEADING_TAGS = re.compile(r"^(?:\s|<[^<>\s]+>)*")
_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
USER = {"role": "user", "content": "How is the weather?"}


@lru_cache(maxsize=16)
def detect_format(template: ChatTemplate, tokenizer: Tokenizer) -> ToolFormat:
    """The format of a model with this template. A template that shows no tools is told of them in
    words (octavo.text.tool_prompt), which ask for the hermes form."""
    if not template.knows_tools:
        return HERMES
    for id in IDS:
        text = written_call(template, id)
        for format in FORMATS.values():
            if read_call(format, text) == (NAME, ARGUMENTS):
                return format
    return (
        _most_mentioned(template.source)
        or next((f for f in FORMATS.values() if _has_tags(f, tokenizer)), None)
        or NO_FORMAT
    )


def guess_format(source: str) -> ToolFormat:
    """The format of a template that must not be run here, by its text alone."""
    return _most_mentioned(source) or (NO_FORMAT if "tools" in source else HERMES)


def written_call(template: ChatTemplate, id: str) -> str:
    """What the template writes for a call, after the opening of the assistant's turn."""
    call = {"id": id, "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        before = template.render([USER], [TOOL])
        text = template.render([USER, called], [TOOL], add_generation_prompt=False)
    except InvalidRequest:
        return ""
    same = next(
        (i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before)
    )
    # not from within a tag that only begins alike
    found = _BREAK.match(text, 0, same)
    return text[found.end() if found else 0 :]


def read_call(format: ToolFormat, text: str) -> tuple[str, Any] | None:
    """The name and the arguments of the one call in a text."""
    if format.start:
        text = _LEADING_TAGS.sub("", text)
    parser = make_parser(format, {NAME: SCHEMA})
    events = parser.push(text) + parser.finish()
    deltas = [event for event in events if isinstance(event, CallDelta)]
    if parser.calls != 1:
        return None
    try:
        arguments = json.loads("".join(delta.arguments for delta in deltas))
    except ValueError:
        return None
    return next(delta.name for delta in deltas if delta.name is not None), arguments


def _most_mentioned(source: str) -> ToolFormat | None:
    """The format all of whose tags are in the template's text, and the most of them."""
    best: ToolFormat | None = None
    most = 0
    for format in FORMATS.values():
        tags = _tags(format)
        if tags and all(tag in source for tag in tags) and sum(map(len, tags)) > most:
            best = format
            most = sum(map(len, tags))
    return best


def _tags(format: ToolFormat) -> list[str]:
    """The tags that every call in this format has."""
    texts = [part for text in format.call_texts for part in _TAG.findall(text) or [text]]
    return [text for text in texts if len(text.strip("[](){} ")) > 3]


def _has_tags(format: ToolFormat, tokenizer: Tokenizer) -> bool:
    """Whether the tag that opens a call is a token."""
    if format.start:
        return False
    return any(tokenizer.backend.token_to_id(tag) is not None for tag in format.opening)
