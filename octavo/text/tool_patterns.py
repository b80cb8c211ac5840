"""Parses calls that are not JSON objects: a header with the name, then arguments in any notation.

The parser follows the patterns of a format (octavo.text.tool_formats) and the rules of
octavo.text.tool_calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from octavo.text.literals import (
    keywords_as_json,
    members_as_json,
    parameters_of,
    text_as_json,
    to_json,
)
from octavo.text.tool_calls import BLANK, NAME, JsonParser, ToolParser
from octavo.text.tool_formats import PatternStep, ToolFormat, steps_of

MAX_SKIP = 200  # the most characters of {name}, {id}, {skip} or {key}
_WORD = re.compile(r"[\w.-]*+", re.ASCII)
_PAYLOADS = ("arguments", "parameters", "python", "gemma")
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_OUTSIDE_QUOTES = {
    "python": re.compile(r"[^()\[\]{}\"']*+"),
    "gemma": re.compile(r"[^()\[\]{}<]*+"),
}

_IN_QUOTES = {
    mark: re.compile(rf"[^{mark}\\]*+(?:\\.[^{mark}\\]*+)*+", re.DOTALL) for mark in "\"'"
}


def make_parser(format: ToolFormat, tools: Mapping[str, Any], parallel: bool = True) -> ToolParser:
    """Return the parser for a reply in this format. `tools` has the schema of each tool's
    parameters by the tool's name."""
    parser_class = JsonParser if format.is_json else PatternParser
    return parser_class(format, tools, parallel)


def split_at(
    steps: tuple[PatternStep, ...], kinds: tuple[str, ...]
) -> tuple[tuple[PatternStep, ...], str, tuple[PatternStep, ...]]:
    """Split a pattern at the first step of these kinds. Return the steps before it, its kind, and
    the steps after it."""
    for index, step in enumerate(steps):
        if step.kind in kinds:
            return steps[:index], step.kind, steps[index + 1 :]
    return steps, "", ()


class PatternParser(ToolParser):
    """Parses calls by following the steps of a pattern."""

    def __init__(self, format: ToolFormat, tools: Mapping[str, Any], parallel: bool = True):
        before = steps_of(format.before)
        call = steps_of(format.call)
        self._header, self._payload, self._tail = split_at(call, _PAYLOADS)
        self._headers = {
            tag: (PatternStep("space"), *before, *self._header) for tag in format.openers
        }
        for steps in ((*before, PatternStep("space"), *self._header), self._header):
            for tag in format.opening:
                if steps and steps[0].text.startswith(tag):
                    first_step = steps[0]._replace(text=steps[0].text.removeprefix(tag))
                    self._headers.setdefault(tag, (first_step, *steps[1:]))
        steps_before_value, _, steps_after_value = split_at(steps_of(format.parameter), ("value",))
        texts_after_value = [step.text for step in steps_after_value if step.kind == "text"]
        self._value_end = texts_after_value[0] if texts_after_value else ""
        # The pattern has white space around the value, which is not part of it.
        self._value_is_padded = bool(steps_before_value) and steps_before_value[-1].kind == "space"
        self._parameter_header = (
            steps_before_value[:-1] if self._value_is_padded else steps_before_value
        )
        tail_texts = [step.text for step in self._tail if step.kind == "text"]
        self._closing_text = tail_texts[0] if tail_texts else ""
        super().__init__(format, tools, parallel)

    @property
    def _value_end_tags(self) -> tuple[str, ...]:
        return (self._closing_text,) if self._closing_text.startswith("<") else ()

    # ---- where a call begins ----

    def _begin_tagged_call(self, tag: str) -> None:
        self._follow(self._headers[tag], self._begin_payload)

    def _read_untagged_start(self, text: str, pos: int) -> int:
        pos = self._hold_match(BLANK, text, pos)
        if pos < len(text):
            steps, _, _ = split_at(steps_of(self._format.start), _PAYLOADS)
            self._follow(steps, self._begin_payload)
        return pos

    def _read_between_calls(self, text: str, pos: int) -> int:
        pos, more_follows = self._skip_call_end(text, pos)
        if not more_follows:
            return pos
        if self._header[0].kind == "text":
            self._return_to_content()  # reading content finds the opening tag of the next call
        else:
            has_opening_tag = self._has_opening_tag
            self._begin_candidate("".join(self._held_text))
            self._has_opening_tag = has_opening_tag
            self._follow(self._header, self._begin_payload)
        return pos

    # ---- headers ----

    def _follow(self, steps: tuple[PatternStep, ...], on_end: Callable[[], None]) -> None:
        """Set the state that reads these steps and calls `on_end` after the last one."""
        self._steps = steps
        self._step_index = 0
        self._on_end = on_end
        self._matched_texts: dict[str, str] = {}
        self._state = self._read_steps

    def _read_steps(self, text: str, pos: int) -> int:
        while self._step_index < len(self._steps):
            step = self._steps[self._step_index]
            if step.kind == "space":
                pos = self._hold_match(BLANK, text, pos)
                if pos == len(text):
                    return pos
                end: int | None = pos
            else:
                end = self._match_end(step, text, pos)
            if end is None:
                return pos
            if end < 0:
                self._return_to_content()
                return pos
            self._held_text.append(text[pos:end])
            self._matched_texts[step.kind] = text[pos:end]
            pos = end
            self._step_index += 1
        self._on_end()
        return pos

    def _match_end(self, step: PatternStep, text: str, pos: int) -> int | None:
        """Return the position at which the step ends. It is None if the step may continue in text
        that has not arrived, and -1 if the text does not match."""
        may_grow = not self._is_complete
        if step.kind == "text":
            if text.startswith(step.text, pos):
                return pos + len(step.text)
            return None if may_grow and step.text.startswith(text[pos:]) else -1
        if step.kind in ("name", "id"):
            match = _WORD.match(text, pos)
            assert match is not None
            if may_grow and match.end() == len(text) and match.end() - pos <= MAX_SKIP:
                return None
            if step.kind == "name" and not NAME.fullmatch(match[0]):
                return -1
            return match.end()
        # Any text matches up to the literal text of the next step.
        end = text.find(self._steps[self._step_index + 1].text, pos)
        if end < 0 and may_grow and len(text) - pos <= MAX_SKIP:
            return None
        return end if end - pos <= MAX_SKIP else -1

    def _begin_payload(self) -> None:
        """Begin the arguments after a complete header. A header without an opening tag is content
        unless it names a tool."""
        name = self._matched_texts["name"]
        if self._format.plain and name == self._format.plain:
            self._held_text = []
            self._return_to_content()
        elif not self._has_opening_tag and name not in self._tools:
            self._return_to_content()
        else:
            self._start_call(name)
            self._held_text = []
            self._schemas = parameters_of(self._tools.get(name))
            self._value_parts: list[str] = []
            if self._payload == "arguments":
                self._state = self._read_space_before_value
            elif self._payload == "parameters":
                self._separator = "{"
                self._state = self._read_between_parameters
            else:
                self._nesting = 0
                self._open_quote = ""
                self._state = self._read_literal

    def _end_payload(self) -> None:
        """Continue with the steps of the pattern that follow the arguments."""
        self._held_text = []
        self._follow(self._tail, self._end_call)
        if not self._tail:
            self._end_call()

    def _finish_cut_off_call(self) -> None:
        if self._state == self._read_parameter_value:
            text = "".join(self._value_parts) + self._unread_text
            self._add_arguments(to_json(text)[:-1])
        elif self._state == self._read_literal:
            self._add_arguments("".join(self._value_parts) + self._unread_text)

    # ---- arguments in JSON ----

    def _read_space_before_value(self, text: str, pos: int) -> int:
        pos = self._hold_match(BLANK, text, pos)
        if pos < len(text):
            self._held_text = []
            self._begin_value()
        return pos

    def _end_value(self, is_cut_off: bool) -> None:
        self._end_payload()

    # ---- parameters in tags ----

    def _read_between_parameters(self, text: str, pos: int) -> int:
        pos = self._hold_match(BLANK, text, pos)
        if pos == len(text):
            return pos
        opening = self._parameter_header[0].text
        if text.startswith(opening, pos):
            self._held_text = []
            self._follow(self._parameter_header, self._begin_parameter)
        elif text.startswith(self._closing_text, pos):
            self._add_arguments("{}" if self._separator == "{" else "}")
            self._end_payload()
        elif self._is_complete or not (
            opening.startswith(text[pos:]) or self._closing_text.startswith(text[pos:])
        ):
            self._return_to_content()
        return pos

    def _begin_parameter(self) -> None:
        self._parameter_name = self._matched_texts["key"]
        self._parameter_kind = self._matched_texts.get("kind")
        self._value_parts = []
        self._held_text = []
        self._add_arguments(f"{self._separator}{to_json(self._parameter_name)}: ")
        self._separator = ", "
        self._state = self._read_parameter_value

    def _read_parameter_value(self, text: str, pos: int) -> int:
        end = text.find(self._value_end, pos)
        if end < 0:
            end = (
                len(text) if self._is_complete else _possible_tag_start(text, pos, self._value_end)
            )
            self._value_parts.append(text[pos:end])
            return end
        self._value_parts.append(text[pos:end])
        value = "".join(self._value_parts)
        if self._value_is_padded:
            value = value.removeprefix("\n").removesuffix("\n")
        schema = (
            {"type": "string"}
            if self._parameter_kind == "true"
            else self._schemas.get(self._parameter_name)
        )
        self._add_arguments(text_as_json(value, schema))
        self._state = self._read_between_parameters
        return end + len(self._value_end)

    # ---- arguments in another notation ----

    def _read_literal(self, text: str, pos: int) -> int:
        """Read arguments up to their closing bracket. Brackets inside strings do not count."""
        start = pos
        is_closed = False
        while pos < len(text) and not is_closed:
            if self._open_quote:
                end = self._quote_end(text, pos)
                if end < 0:
                    pos = -end - 1
                    break
                self._open_quote = ""
                pos = end
                continue
            match = _OUTSIDE_QUOTES[self._payload].match(text, pos)
            assert match is not None
            pos = match.end()
            if pos == len(text):
                break
            change = _BRACKETS.get(text[pos], 0)
            is_closed = change < 0 and self._nesting == 0
            if change:
                self._nesting += change
                pos += not is_closed
                continue
            quote = self._format.quote or text[pos]
            if text.startswith(quote, pos):
                self._open_quote = quote
                pos += len(quote)
            elif quote.startswith(text[pos:]) and not self._is_complete:
                break
            else:
                pos += 1
        self._value_parts.append(text[start:pos])
        if is_closed:
            self._add_arguments(self._as_json("".join(self._value_parts)))
            self._end_payload()
        return pos

    def _quote_end(self, text: str, pos: int) -> int:
        """Return the position after the closing quotation mark. If the mark has not arrived, return
        -1 - p instead: the text up to the position p is certainly quoted."""
        if self._format.quote:
            end = text.find(self._open_quote, pos)
            if end >= 0:
                return end + len(self._open_quote)
            return -1 - (
                len(text) if self._is_complete else _possible_tag_start(text, pos, self._open_quote)
            )
        match = _IN_QUOTES[self._open_quote].match(text, pos)
        assert match is not None
        end = match.end()
        if end < len(text) and text[end] == self._open_quote:
            return end + 1
        return -1 - (len(text) if self._is_complete else end)

    def _as_json(self, text: str) -> str:
        """Return the arguments in JSON. Arguments that cannot be parsed stay unchanged."""
        if self._payload == "python":
            json_text = keywords_as_json(text)
        else:
            json_text = members_as_json(text, self._format.quote)
        return text if json_text is None else json_text


def _possible_tag_start(text: str, pos: int, tag: str) -> int:
    """Return the position at which an incomplete tag may begin."""
    for start in range(max(pos, len(text) - len(tag) + 1), len(text)):
        if tag.startswith(text[start:]):
            return start
    return len(text)
