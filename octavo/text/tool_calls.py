"""Parses tool calls from the text of a model while it is generated, in time linear in the text.

octavo.text.tool_formats describes how models write calls. These are the rules of all formats:
- A call begins once its name is known and its arguments begin. Until then its text is held back. If
  the text turns out not to be a call, it becomes content.
- Arguments in JSON are passed on as the model writes them and are never corrected. If they are not
  valid JSON, the client gets them unchanged. A closing tag ends a call, except in a JSON string.
- Arguments in another notation become JSON once they are complete. If they cannot be parsed, the
  client gets them unchanged.
- Other text in a call is content.
- Without an opening tag, a call must have the name of a tool, because nothing else distinguishes
  the call from other text.
- White space around calls is not content, except between two words.
- Without parallel calls, the first call ends the reply.

This module works on text, not on tokens, requests or transport.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from octavo.text.tool_formats import ToolFormat


class CallDelta(NamedTuple):
    """A new part of one call: first the name alone, then parts of the arguments."""

    call: int  # index of the call in the reply
    name: str | None
    arguments: str


BLANK = re.compile(r"[ \t\r\n]*+")
BETWEEN_CALLS = re.compile(r"[ \t\r\n,;\]]*+")
NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)
_BEFORE_CALL = re.compile(r"[ \t\r\n\[]*+")
_BETWEEN_MEMBERS = re.compile(r"[ \t\r\n,]*+")
_IN_STRING = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_NOT_STRUCTURE = re.compile(r'[^"{}\[\],<]*+')
# The key of a member of a call in JSON -> what the member means. Models use different keys.
_MEMBER_MEANINGS = {
    "name": "name",
    "tool_name": "name",
    "arguments": "arguments",
    "parameters": "arguments",
    "type": "type",
    "id": "id",
    "tool_call_id": "id",
}


class ToolParser:
    """Parses one reply. The joined results of `push` and `finish` do not depend on how the text is
    split.

    A state is a method that gets the text and a position in it, and returns the position up to
    which it has read. A state that returns the same position and sets no other state waits for more
    text. The next `push` reads the unread text again, which is never longer than a short header.
    Subclasses parse the calls.
    """

    def __init__(self, format: ToolFormat, tools: Mapping[str, Any], parallel: bool = True):
        """`tools` has the JSON schema of each tool's parameters by the tool's name. Without
        `parallel`, the first call ends the reply, and the parser drops the text after it."""
        self._format = format
        self._tools = tools
        self._parallel = parallel
        self.calls = 0
        self.is_done = False  # the parser drops the remaining text of the reply
        tags = {*format.opening, *format.closing, *format.silent}
        self._tags = sorted(tags, key=len, reverse=True)
        self._tag_pattern = re.compile("|".join(map(re.escape, self._tags)) or "(?!)")
        self._state: Callable[[str, int], int] = self._read_content
        if format.start:
            self._state = self._read_untagged_start
        self._unread_text = ""  # the end of the text, which the next push reads again
        self._is_complete = False  # no more text follows
        self._deltas: list[str | CallDelta] = []
        self._has_content = False
        self._pending_space: list[str] = []  # white space that is content if a word follows it
        self._closing_tag_may_follow = False  # a closing tag that comes next is not content
        self._no_content_since_call = False  # no content has followed the last call
        self._begin_candidate()

    def push(self, text: str) -> list[str | CallDelta]:
        """Return the content and the parts of calls that the text completes, in order."""
        text = self._unread_text + text
        pos = 0
        while pos < len(text) and not self.is_done:
            before = self._state, pos
            pos = self._state(text, pos)
            if (self._state, pos) == before:
                break
        self._unread_text = "" if self.is_done else text[pos:]
        deltas = self._deltas
        self._deltas = []
        return _join_deltas(deltas) if len(deltas) > 1 else deltas

    def finish(self) -> list[str | CallDelta]:
        """Return the remaining deltas once the text is complete. An incomplete tag and the text of
        a call that has not begun are content. A call that is cut off keeps its incomplete
        arguments."""
        self._is_complete = True
        deltas = self.push("")
        if self._state != self._read_content and not self._call_started:
            self._held_text.append(self._unread_text)
            self._return_to_content()
        elif self._call_started:
            self._finish_cut_off_call()
        if not self.calls:
            self._deltas += self._pending_space
        deltas += self._deltas
        return _join_deltas(deltas)

    # ---- for subclasses ----

    def _read_untagged_start(self, text: str, pos: int) -> int:
        """Read the start of a reply that may begin with a call without a tag (a state)."""
        raise NotImplementedError

    def _begin_tagged_call(self, tag: str) -> None:
        """Set the state that reads the text after an opening tag."""
        raise NotImplementedError

    def _read_between_calls(self, text: str, pos: int) -> int:
        """Read the text after a call (a state)."""
        raise NotImplementedError

    def _end_value(self, is_cut_off: bool) -> None:
        """Set the state that follows a value in JSON, which may be cut off by a closing tag."""
        raise NotImplementedError

    def _finish_cut_off_call(self) -> None:
        """Handle a reply that ends in a call or after one."""

    # ---- content ----

    def _read_content(self, text: str, pos: int) -> int:
        match = self._tag_pattern.search(text, pos)
        if match is None:
            if not self._is_complete:
                end = self._possible_tag_start(text, pos)
            elif self._is_cut_closing_tag(text[pos:]):
                return len(text)
            else:
                end = len(text)
            self._add_content(text[pos:end])
            return end
        tag = match[0]
        self._add_content(text[pos : match.start()])
        if tag in self._format.opening:
            self._begin_candidate(tag)
            self._closing_tag_may_follow = False
            self._begin_tagged_call(tag)
        elif tag in self._format.closing and self._closing_tag_may_follow:
            self._closing_tag_may_follow = False
        elif tag not in self._format.silent:
            self._add_content(tag)
        return match.end()

    def _is_cut_closing_tag(self, text: str) -> bool:
        """Return whether the end of the reply may be the closing tag of the last call, cut off."""
        if not (self._closing_tag_may_follow and self._no_content_since_call):
            return False
        return any(tag.startswith(text) for tag in self._format.closing)

    def _possible_tag_start(self, text: str, pos: int) -> int:
        """Return the position at which an incomplete tag may begin."""
        longest = len(self._tags[0]) if self._tags else 1
        for start in range(max(pos, len(text) - longest + 1), len(text)):
            if any(tag.startswith(text[start:]) for tag in self._tags):
                return start
        return len(text)

    def _add_content(self, text: str) -> None:
        words = text.rstrip()
        if words:
            content = "".join(self._pending_space) + words
            if self.calls and not self._has_content:
                content = content.lstrip()
            self._deltas.append(content)
            self._pending_space = []
            self._has_content = True
            self._no_content_since_call = False
        if len(words) < len(text):
            self._pending_space.append(text[len(words) :])

    # ---- a call ----

    def _begin_candidate(self, opening_tag: str = "") -> None:
        """Begin to read text that may be a call."""
        self._held_text = [opening_tag]  # this text is content if it is not a call
        self._call_started = False  # the name of the call is known
        self._has_opening_tag = bool(opening_tag)  # after an opening tag, any name is accepted
        self._has_arguments = False

    def _return_to_content(self) -> None:
        """Continue with content, because the text is not a call or the call has ended."""
        self._add_content("".join(self._held_text))
        self._held_text = []
        self._closing_tag_may_follow = self._call_started and bool(self._format.closing)
        self._no_content_since_call = self._closing_tag_may_follow
        self._state = self._read_content

    def _hold_match(self, pattern: re.Pattern[str], text: str, pos: int) -> int:
        match = pattern.match(text, pos)
        assert match is not None
        self._held_text.append(match[0])
        return match.end()

    def _skip_call_end(self, text: str, pos: int) -> tuple[int, bool]:
        """Read white space, separators and a closing tag after a call. Return the position, and
        whether another call or content follows there."""
        pos = self._hold_match(BETWEEN_CALLS, text, pos)
        if pos == len(text):
            return pos, False
        for tag in self._format.closing:
            if text.startswith(tag, pos):
                self._state = self._read_content
                return pos + len(tag), False
            if not self._is_complete and tag.startswith(text[pos:]):
                return pos, False
        if "]" in self._format.after:  # a bracket closes the list of calls and is not content
            self._held_text = ["".join(self._held_text).rpartition("]")[2]]
        return pos, True

    def _start_call(self, name: str) -> None:
        self._call_started = True
        if not self._has_content:
            self._pending_space = []
        self.calls += 1
        self._deltas.append(CallDelta(self.calls - 1, name, ""))

    def _end_call(self) -> None:
        self._held_text = []
        self._state = self._read_between_calls
        self.is_done = not self._parallel

    def _add_arguments(self, text: str) -> None:
        """Add a part of the arguments of a call that has begun."""
        if text:
            self._has_arguments = True
            self._deltas.append(CallDelta(self.calls - 1, None, text))

    # ---- a value in JSON ----

    def _begin_value(self) -> None:
        self._depth = 0
        self._in_string = False
        self._state = self._read_value

    def _read_value(self, text: str, pos: int) -> int:
        """Read a value up to its closing bracket, its closing quotation mark or the end of a
        word."""
        start = pos
        is_over = False
        is_cut_off = False
        while pos < len(text) and not (is_over or is_cut_off):
            match = (_IN_STRING if self._in_string else _NOT_STRUCTURE).match(text, pos)
            assert match is not None
            pos = match.end()
            if pos == len(text):
                break
            char = text[pos]
            if self._in_string:
                if char == "\\" and not self._is_complete:
                    break  # the escaped character has not arrived
                self._in_string = char == "\\"
                is_over = self._depth == 0 and not self._in_string
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char == "<":
                is_cut_off = any(text.startswith(tag, pos) for tag in self._value_end_tags)
                if is_cut_off or (not self._is_complete and self._starts_value_end_tag(text[pos:])):
                    break
            elif self._depth == 0:
                is_over = True
                break
            elif char != ",":
                self._depth -= 1
                is_over = self._depth == 0
            pos += 1
        self._add_arguments(text[start:pos])
        if is_over or is_cut_off:
            self._end_value(is_cut_off)
        return pos

    @property
    def _value_end_tags(self) -> tuple[str, ...]:
        """Return the tags that end a value in JSON at any depth."""
        return self._format.closing

    def _starts_value_end_tag(self, text: str) -> bool:
        return any(tag.startswith(text) for tag in self._value_end_tags)


class JsonParser(ToolParser):
    """Parses calls that are JSON objects, alone or in a list, with members in any order."""

    def _begin_candidate(self, opening_tag: str = "") -> None:
        super()._begin_candidate(opening_tag)
        self._seen_members: set[str] = set()
        self._early_arguments: list[str] = []  # arguments that precede the name

    def _begin_tagged_call(self, tag: str) -> None:
        self._state = self._read_object_start

    def _read_object_start(self, text: str, pos: int) -> int:
        pos, is_object = self._read_expected(_BEFORE_CALL, "{", text, pos)
        if is_object:
            self._state = self._read_member
        return pos

    def _read_untagged_start(self, text: str, pos: int) -> int:
        pattern = _BEFORE_CALL if self._format.start.startswith("[") else BLANK
        return self._read_possible_call(pattern, text, pos)

    def _read_between_calls(self, text: str, pos: int) -> int:
        pos, more_follows = self._skip_call_end(text, pos)
        return self._read_possible_call(BLANK, text, pos) if more_follows else pos

    def _read_possible_call(self, pattern: re.Pattern[str], text: str, pos: int) -> int:
        """Read text after a call or at the start of a reply, which may be a call."""
        pos = self._hold_match(pattern, text, pos)
        if pos == len(text):
            return pos
        if text[pos] == "{":
            has_opening_tag = self._call_started and not self._format.start
            held_text = "".join(self._held_text)
            self._begin_candidate(held_text)
            self._has_opening_tag = has_opening_tag
            self._state = self._read_object_start
        else:
            self._return_to_content()
        return pos

    def _read_expected(
        self, pattern: re.Pattern[str], char: str, text: str, pos: int
    ) -> tuple[int, bool]:
        """Read what the pattern matches and then this character. Return the position, and whether
        the character was read. Text with another character is not a call."""
        pos = self._hold_match(pattern, text, pos)
        if pos == len(text):
            return pos, False
        if text[pos] != char:
            self._return_to_content()
            return pos, False
        self._held_text.append(char)
        return pos + 1, True

    def _read_member(self, text: str, pos: int) -> int:
        pos = self._hold_match(_BETWEEN_MEMBERS, text, pos)
        if pos < len(text) and text[pos] == "}" and self._call_started:
            if not self._has_arguments:
                self._add_arguments("{}")
            self._end_call()
            return pos + 1
        pos, has_key = self._read_expected(BLANK, '"', text, pos)
        if has_key:
            self._string_parts: list[str] = []
            self._state = self._read_key
        return pos

    def _read_string(self, text: str, pos: int) -> tuple[int, str | None]:
        """Read a string up to its closing quotation mark. Return the position, and the unparsed
        string once it is complete."""
        match = _IN_STRING.match(text, pos)
        assert match is not None
        end = match.end()
        if end < len(text) and text[end] == "\\" and self._is_complete:
            end += 1
        self._held_text.append(text[pos:end])
        self._string_parts.append(text[pos:end])
        if end == len(text) or text[end] == "\\":
            return end, None
        self._held_text.append('"')
        return end + 1, "".join(self._string_parts)

    def _read_key(self, text: str, pos: int) -> int:
        pos, key = self._read_string(text, pos)
        if key is None:
            return pos
        if self._format.keyed and not self._call_started:
            self._member_meaning = "arguments"
            self._state = self._read_colon
            self._accept_name(key)
            return pos
        self._member_meaning = _MEMBER_MEANINGS.get(key, "")
        if not self._member_meaning or self._member_meaning in self._seen_members:
            self._return_to_content()
        else:
            self._seen_members.add(self._member_meaning)
            self._state = self._read_colon
        return pos

    def _read_colon(self, text: str, pos: int) -> int:
        pos, has_colon = self._read_expected(BLANK, ":", text, pos)
        if has_colon:
            self._state = self._read_member_value
        return pos

    def _read_member_value(self, text: str, pos: int) -> int:
        if self._member_meaning == "arguments":
            pos = self._hold_match(BLANK, text, pos)
            if pos < len(text):
                self._held_text = [] if self._call_started else self._held_text
                self._begin_value()
            return pos
        pos, has_string = self._read_expected(BLANK, '"', text, pos)
        if has_string:
            self._string_parts = []
            self._state = self._read_string_member
        return pos

    def _read_string_member(self, text: str, pos: int) -> int:
        """Read the value of the name, the type or the id."""
        pos, string = self._read_string(text, pos)
        if string is None:
            return pos
        self._state = self._read_member
        if self._member_meaning == "name":
            self._accept_name(string)
        if self._call_started:
            self._held_text = []
        return pos

    def _accept_name(self, name: str) -> None:
        if not NAME.fullmatch(name) or not (self._has_opening_tag or name in self._tools):
            self._return_to_content()
            return
        self._start_call(name)
        self._add_arguments("".join(self._early_arguments))

    def _end_value(self, is_cut_off: bool) -> None:
        if not is_cut_off:
            self._state = self._read_member
        elif self._call_started:
            self._end_call()
        else:
            self._return_to_content()

    def _add_arguments(self, text: str) -> None:
        if self._call_started:
            super()._add_arguments(text)
        else:
            self._held_text.append(text)
            self._early_arguments.append(text)


def _call_and_name(delta: str | CallDelta) -> tuple[int | None, str | None]:
    return (None, None) if isinstance(delta, str) else delta[:2]


def _join_deltas(deltas: list[str | CallDelta]) -> list[str | CallDelta]:
    """Join neighbouring deltas of the same kind. A delta with a name is not joined."""
    joined: list[str | CallDelta] = []
    for (call, name), group in groupby(deltas, _call_and_name):
        text = "".join(piece if isinstance(piece, str) else piece.arguments for piece in group)
        joined.append(text if call is None else CallDelta(call, name, text))
    return joined
