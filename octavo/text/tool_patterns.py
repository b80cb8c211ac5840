"""Reads calls that are not JSON objects: a header with the name, then arguments in any notation.

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

MAX_SKIP = 200  # maximum number of characters of {name}, {id}, {skip} or {key}
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
    """Split at the first step of these kinds. Return the steps before, its kind, and the rest."""
    for at, step in enumerate(steps):
        if step.kind in kinds:
            return steps[:at], step.kind, steps[at + 1 :]
    return steps, "", ()


class PatternParser(ToolParser):
    """Reads calls by following the steps of a pattern."""

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
                    rest = steps[0]._replace(text=steps[0].text.removeprefix(tag))
                    self._headers.setdefault(tag, (rest, *steps[1:]))
        head, _, rest_of_parameter = split_at(steps_of(format.parameter), ("value",))
        texts = [step.text for step in rest_of_parameter if step.kind == "text"]
        self._value_end = texts[0] if texts else ""
        # The pattern has white space around the value, which is not part of it.
        self._padded = bool(head) and head[-1].kind == "space"
        self._parameter = head[:-1] if self._padded else head
        tail_texts = [step.text for step in self._tail if step.kind == "text"]
        self._closing_text = tail_texts[0] if tail_texts else ""
        super().__init__(format, tools, parallel)

    @property
    def _cutters(self) -> tuple[str, ...]:
        return (self._closing_text,) if self._closing_text.startswith("<") else ()

    # ---- where a call begins ----

    def _opened(self, tag: str) -> None:
        self._follow(self._headers[tag], self._begin_payload)

    def _untagged(self, text: str, pos: int) -> int:
        pos = self._hold(BLANK, text, pos)
        if pos < len(text):
            steps, _, _ = split_at(steps_of(self._format.start), _PAYLOADS)
            self._follow(steps, self._begin_payload)
        return pos

    def _between(self, text: str, pos: int) -> int:
        pos, goes_on = self._after_call(text, pos)
        if not goes_on:
            return pos
        if self._header[0].kind == "text":
            self._give_up()  # the opening tag of a call is found in the content
        else:
            tagged = self._tagged
            self._begin("".join(self._held))
            self._tagged = tagged
            self._follow(self._header, self._begin_payload)
        return pos

    # ---- headers ----

    def _follow(self, steps: tuple[PatternStep, ...], then: Callable[[], None]) -> None:
        """Set the state that reads these steps and calls `then` after the last."""
        self._steps = steps
        self._at = 0
        self._then = then
        self._words: dict[str, str] = {}
        self._state = self._step

    def _step(self, text: str, pos: int) -> int:
        while self._at < len(self._steps):
            step = self._steps[self._at]
            if step.kind == "space":
                pos = self._hold(BLANK, text, pos)
                if pos == len(text):
                    return pos
                end: int | None = pos
            else:
                end = self._match(step, text, pos)
            if end is None:
                return pos
            if end < 0:
                self._give_up()
                return pos
            self._held.append(text[pos:end])
            self._words[step.kind] = text[pos:end]
            pos = end
            self._at += 1
        self._then()
        return pos

    def _match(self, step: PatternStep, text: str, pos: int) -> int | None:
        """Return the position at which the step ends: None if it depends on text that has not
        arrived, -1 if the text does not match."""
        wait = not self._ending
        if step.kind == "text":
            if text.startswith(step.text, pos):
                return pos + len(step.text)
            return None if wait and step.text.startswith(text[pos:]) else -1
        if step.kind in ("name", "id"):
            found = _WORD.match(text, pos)
            assert found is not None
            if wait and found.end() == len(text) and found.end() - pos <= MAX_SKIP:
                return None
            if step.kind == "name" and not NAME.fullmatch(found[0]):
                return -1
            return found.end()
        end = text.find(self._steps[self._at + 1].text, pos)  # up to the next text
        if end < 0 and wait and len(text) - pos <= MAX_SKIP:
            return None
        return end if end - pos <= MAX_SKIP else -1

    def _begin_payload(self) -> None:
        """Begin the arguments after a complete header. Without a tag, a header whose name is not
        the name of a tool is content."""
        name = self._words["name"]
        if self._format.plain and name == self._format.plain:
            self._held = []
            self._give_up()
        elif not self._tagged and name not in self._tools:
            self._give_up()
        else:
            self._start_call(name)
            self._held = []
            self._schemas = parameters_of(self._tools.get(name))
            self._parts: list[str] = []
            if self._payload == "arguments":
                self._state = self._before_value
            elif self._payload == "parameters":
                self._separator = "{"
                self._state = self._between_parameters
            else:
                self._nesting = 0
                self._quoting = ""
                self._state = self._literal

    def _end_payload(self) -> None:
        """Go on with the rest of the pattern after complete arguments."""
        self._held = []
        self._follow(self._tail, self._end_call)
        if not self._tail:
            self._end_call()

    def _cut(self) -> None:
        if self._state == self._parameter_value:
            text = "".join(self._parts) + self._unread
            self._add_arguments(to_json(text)[:-1])
        elif self._state == self._literal:
            self._add_arguments("".join(self._parts) + self._unread)

    # ---- arguments in JSON ----

    def _before_value(self, text: str, pos: int) -> int:
        pos = self._hold(BLANK, text, pos)
        if pos < len(text):
            self._held = []
            self._begin_value()
        return pos

    def _value_over(self, cut: bool) -> None:
        self._end_payload()

    # ---- parameters in tags ----

    def _between_parameters(self, text: str, pos: int) -> int:
        pos = self._hold(BLANK, text, pos)
        if pos == len(text):
            return pos
        opening = self._parameter[0].text
        if text.startswith(opening, pos):
            self._held = []
            self._follow(self._parameter, self._begin_parameter)
        elif text.startswith(self._closing_text, pos):
            self._add_arguments("{}" if self._separator == "{" else "}")
            self._end_payload()
        elif self._ending or not (
            opening.startswith(text[pos:]) or self._closing_text.startswith(text[pos:])
        ):
            self._give_up()
        return pos

    def _begin_parameter(self) -> None:
        self._key = self._words["key"]
        self._kind = self._words.get("kind")
        self._parts = []
        self._held = []
        self._add_arguments(f"{self._separator}{to_json(self._key)}: ")
        self._separator = ", "
        self._state = self._parameter_value

    def _parameter_value(self, text: str, pos: int) -> int:
        end = text.find(self._value_end, pos)
        if end < 0:
            end = len(text) if self._ending else _partial(text, pos, self._value_end)
            self._parts.append(text[pos:end])
            return end
        self._parts.append(text[pos:end])
        value = "".join(self._parts)
        if self._padded:
            value = value.removeprefix("\n").removesuffix("\n")
        schema = {"type": "string"} if self._kind == "true" else self._schemas.get(self._key)
        self._add_arguments(text_as_json(value, schema))
        self._state = self._between_parameters
        return end + len(self._value_end)

    # ---- arguments in another notation ----

    def _literal(self, text: str, pos: int) -> int:
        """Read arguments up to their closing bracket. Brackets in quotation marks do not count."""
        start = pos
        closed = False
        while pos < len(text) and not closed:
            if self._quoting:
                end = self._end_of_quoted(text, pos)
                if end < 0:
                    pos = -end - 1
                    break
                self._quoting = ""
                pos = end
                continue
            found = _OUTSIDE_QUOTES[self._payload].match(text, pos)
            assert found is not None
            pos = found.end()
            if pos == len(text):
                break
            turn = _BRACKETS.get(text[pos], 0)
            closed = turn < 0 and self._nesting == 0
            if turn:
                self._nesting += turn
                pos += not closed
                continue
            quote = self._format.quote or text[pos]
            if text.startswith(quote, pos):
                self._quoting = quote
                pos += len(quote)
            elif quote.startswith(text[pos:]) and not self._ending:
                break
            else:
                pos += 1
        self._parts.append(text[start:pos])
        if closed:
            self._add_arguments(self._as_json("".join(self._parts)))
            self._end_payload()
        return pos

    def _end_of_quoted(self, text: str, pos: int) -> int:
        """Return the position after the closing quotation mark. If the mark has not arrived, return
        -1 - position, up to which the text is certainly quoted."""
        if self._format.quote:
            end = text.find(self._quoting, pos)
            if end >= 0:
                return end + len(self._quoting)
            return -1 - (len(text) if self._ending else _partial(text, pos, self._quoting))
        found = _IN_QUOTES[self._quoting].match(text, pos)
        assert found is not None
        end = found.end()
        if end < len(text) and text[end] == self._quoting:
            return end + 1
        return -1 - (len(text) if self._ending else end)

    def _as_json(self, text: str) -> str:
        """Return the arguments in JSON, or unchanged if they cannot be read."""
        if self._payload == "python":
            found = keywords_as_json(text)
        else:
            found = members_as_json(text, self._format.quote)
        return text if found is None else found


def _partial(text: str, pos: int, tag: str) -> int:
    """Return the position at which an incomplete tag may begin."""
    for at in range(max(pos, len(text) - len(tag) + 1), len(text)):
        if tag.startswith(text[at:]):
            return at
    return len(text)
