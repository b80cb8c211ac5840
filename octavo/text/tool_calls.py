"""Finds tool calls in the text that a model writes, as it comes, in time linear in the text.

octavo.text.tool_formats describes how models write calls. These are the rules of all formats:
- A call begins once its name is known and its arguments begin. Until then its text is held back. If
  it turns out not to be a call, the text is content.
- Arguments in JSON are passed on as the model writes them and are never corrected. If they are not
  valid JSON, the client gets them unchanged. A closing tag ends a call, except in a JSON string.
- Arguments in another notation become JSON once they are complete. If they cannot be read, the
  client gets them unchanged.
- Other text in a call is content.
- Without an opening tag, a call must have the name of a tool. Nothing else distinguishes it from
  other text.
- White space around calls is not content, except between two words.
- If only one call is wanted, the first call ends the reply.

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
# Names that models give to the members of a call in JSON -> what the member is.
_MEMBERS = {
    "name": "name",
    "tool_name": "name",
    "arguments": "arguments",
    "parameters": "arguments",
    "type": "type",
    "id": "id",
    "tool_call_id": "id",
}


class ToolParser:
    """Reads one reply. The joined results of `push` and `finish` do not depend on how the text is
    split.

    A state is a method that gets the text and a position in it, and returns the position up to
    which it has read. A state that neither moves nor changes waits for more text. It then reads the
    text from that position again, which is never longer than a short header. Subclasses read the
    calls.
    """

    def __init__(self, format: ToolFormat, tools: Mapping[str, Any], parallel: bool = True):
        """`tools` has the JSON schema of each tool's parameters by the tool's name. Without
        `parallel`, the first call ends the reply, and the parser drops the text after it."""
        self._format = format
        self._tools = tools
        self._parallel = parallel
        self.calls = 0
        self.is_done = False  # the rest of the reply is dropped
        tags = {*format.opening, *format.closing, *format.silent}
        self._tags = sorted(tags, key=len, reverse=True)
        self._tag = re.compile("|".join(map(re.escape, self._tags)) or "(?!)")
        self._state: Callable[[str, int], int] = self._untagged if format.start else self._content
        self._unread = ""  # the end of the text, which is read again with the next piece
        self._ending = False  # the text is complete
        self._deltas: list[str | CallDelta] = []
        self._has_content = False
        self._pending_space: list[str] = []  # white space that is content if a word follows it
        self._unclosed = False  # a closing tag may follow, which is not content
        self._no_content_since = False  # no content followed the last call
        self._begin()

    def push(self, text: str) -> list[str | CallDelta]:
        """Return the content and the parts of calls that the text completes, in order."""
        text = self._unread + text
        pos = 0
        while pos < len(text) and not self.is_done:
            before = self._state, pos
            pos = self._state(text, pos)
            if (self._state, pos) == before:
                break
        self._unread = "" if self.is_done else text[pos:]
        deltas = self._deltas
        self._deltas = []
        return _joined(deltas) if len(deltas) > 1 else deltas

    def finish(self) -> list[str | CallDelta]:
        """Return the rest once the text is complete. Half a tag is content, and so is the text of a
        call that has not begun. A call that is cut off keeps the arguments that it has."""
        self._ending = True
        deltas = self.push("")
        if self._state != self._content and not self._begun:
            self._held.append(self._unread)
            self._give_up()
        elif self._begun:
            self._cut()
        if not self.calls:
            self._deltas += self._pending_space
        deltas += self._deltas
        return _joined(deltas)

    # ---- for subclasses ----

    def _untagged(self, text: str, pos: int) -> int:
        """Read the start of a reply that may begin with a call without a tag (a state)."""
        raise NotImplementedError

    def _opened(self, tag: str) -> None:
        """Set the state that reads the text after an opening tag."""
        raise NotImplementedError

    def _between(self, text: str, pos: int) -> int:
        """Read the text after a call (a state)."""
        raise NotImplementedError

    def _value_over(self, cut: bool) -> None:
        """Set the state that follows a value in JSON, which may be cut off by a closing tag."""
        raise NotImplementedError

    def _cut(self) -> None:
        """Handle a reply that ends in a call or after one."""

    # ---- content ----

    def _content(self, text: str, pos: int) -> int:
        found = self._tag.search(text, pos)
        if found is None:
            end = len(text)
            rest = text[pos:]
            if (
                self._ending
                and self._unclosed
                and self._no_content_since
                and self._starts_closing(rest)
            ):
                return end
            if not self._ending:
                end = self._undecided(text, pos)
            self._add_content(text[pos:end])
            return end
        tag = found[0]
        self._add_content(text[pos : found.start()])
        if tag in self._format.opening:
            self._begin(tag)
            self._unclosed = False
            self._opened(tag)
        elif tag in self._format.closing and self._unclosed:
            self._unclosed = False
        elif tag not in self._format.silent:
            self._add_content(tag)
        return found.end()

    def _starts_closing(self, text: str) -> bool:
        return any(tag.startswith(text) for tag in self._format.closing)

    def _undecided(self, text: str, pos: int) -> int:
        """Return the position at which an incomplete tag may begin."""
        longest = len(self._tags[0]) if self._tags else 1
        for at in range(max(pos, len(text) - longest + 1), len(text)):
            if any(tag.startswith(text[at:]) for tag in self._tags):
                return at
        return len(text)

    def _add_content(self, text: str) -> None:
        words = text.rstrip()
        if words:
            whole = "".join(self._pending_space) + words
            self._deltas.append(whole.lstrip() if self.calls and not self._has_content else whole)
            self._pending_space = []
            self._has_content = True
            self._no_content_since = False
        if len(words) < len(text):
            self._pending_space.append(text[len(words) :])

    # ---- a call ----

    def _begin(self, held: str = "") -> None:
        self._held = [held]  # the text that is content if this is not a call
        self._begun = False  # the name is known
        self._tagged = bool(held)  # after an opening tag, any name makes a call
        self._has_arguments = False

    def _give_up(self) -> None:
        """Go back to content, because this is not a call or the call is over."""
        self._add_content("".join(self._held))
        self._held = []
        self._unclosed = self._begun and bool(self._format.closing)
        self._no_content_since = self._unclosed
        self._state = self._content

    def _hold(self, run: re.Pattern[str], text: str, pos: int) -> int:
        found = run.match(text, pos)
        assert found is not None
        self._held.append(found[0])
        return found.end()

    def _after_call(self, text: str, pos: int) -> tuple[int, bool]:
        """Read white space, separators and a closing tag after a call. The second value says
        whether another call or content follows."""
        pos = self._hold(BETWEEN_CALLS, text, pos)
        if pos == len(text):
            return pos, False
        for tag in self._format.closing:
            if text.startswith(tag, pos):
                self._state = self._content
                return pos + len(tag), False
            if not self._ending and tag.startswith(text[pos:]):
                return pos, False
        if "]" in self._format.after:  # the bracket that closes the list of calls
            self._held = ["".join(self._held).rpartition("]")[2]]
        return pos, True

    def _start_call(self, name: str) -> None:
        self._begun = True
        if not self._has_content:
            self._pending_space = []
        self.calls += 1
        self._deltas.append(CallDelta(self.calls - 1, name, ""))

    def _end_call(self) -> None:
        self._held = []
        self._state = self._between
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
        self._state = self._value_text

    def _value_text(self, text: str, pos: int) -> int:
        """Read a value up to its closing bracket or quotation mark, or to the end of a word."""
        start = pos
        over = False
        cut = False
        while pos < len(text) and not (over or cut):
            found = (_IN_STRING if self._in_string else _NOT_STRUCTURE).match(text, pos)
            assert found is not None
            pos = found.end()
            if pos == len(text):
                break
            char = text[pos]
            if self._in_string:
                if char == "\\" and not self._ending:
                    break  # the escaped character has not arrived
                self._in_string = char == "\\"
                over = self._depth == 0 and not self._in_string
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char == "<":
                cut = any(text.startswith(tag, pos) for tag in self._cutters)
                if cut or (not self._ending and self._starts_cutter(text[pos:])):
                    break
            elif self._depth == 0:
                over = True
                break
            elif char != ",":
                self._depth -= 1
                over = self._depth == 0
            pos += 1
        self._add_arguments(text[start:pos])
        if over or cut:
            self._value_over(cut)
        return pos

    @property
    def _cutters(self) -> tuple[str, ...]:
        """Return the tags that end a value in JSON at any depth."""
        return self._format.closing

    def _starts_cutter(self, text: str) -> bool:
        return any(tag.startswith(text) for tag in self._cutters)


class JsonParser(ToolParser):
    """Reads calls that are JSON objects, alone or in a list. Their members may be in any order."""

    def _begin(self, held: str = "") -> None:
        super()._begin(held)
        self._seen: set[str] = set()  # the members so far
        self._early_arguments: list[str] = []  # arguments that came before the name

    def _opened(self, tag: str) -> None:
        self._state = self._before_object

    def _before_object(self, text: str, pos: int) -> int:
        pos, found = self._expect(_BEFORE_CALL, "{", text, pos)
        if found:
            self._state = self._member
        return pos

    def _untagged(self, text: str, pos: int) -> int:
        run = _BEFORE_CALL if self._format.start.startswith("[") else BLANK
        return self._call_without_tag(run, text, pos)

    def _between(self, text: str, pos: int) -> int:
        pos, goes_on = self._after_call(text, pos)
        return self._call_without_tag(BLANK, text, pos) if goes_on else pos

    def _call_without_tag(self, run: re.Pattern[str], text: str, pos: int) -> int:
        """Read text that may be a call, after a call or at the start of a reply."""
        pos = self._hold(run, text, pos)
        if pos == len(text):
            return pos
        if text[pos] == "{":
            tagged = self._begun and not self._format.start
            held = "".join(self._held)
            self._begin(held)
            self._tagged = tagged
            self._state = self._before_object
        else:
            self._give_up()
        return pos

    def _expect(self, run: re.Pattern[str], char: str, text: str, pos: int) -> tuple[int, bool]:
        """Read a run and one character, and return whether the character was there. If another
        character is there, this is not a call."""
        pos = self._hold(run, text, pos)
        if pos == len(text):
            return pos, False
        if text[pos] != char:
            self._give_up()
            return pos, False
        self._held.append(char)
        return pos + 1, True

    def _member(self, text: str, pos: int) -> int:
        pos = self._hold(_BETWEEN_MEMBERS, text, pos)
        if pos < len(text) and text[pos] == "}" and self._begun:
            if not self._has_arguments:
                self._add_arguments("{}")
            self._end_call()
            return pos + 1
        pos, found = self._expect(BLANK, '"', text, pos)
        if found:
            self._string: list[str] = []
            self._state = self._key
        return pos

    def _quoted(self, text: str, pos: int) -> tuple[int, str | None]:
        """Read the rest of a string. Return the whole string, unparsed, once it is complete."""
        found = _IN_STRING.match(text, pos)
        assert found is not None
        end = found.end()
        if end < len(text) and text[end] == "\\" and self._ending:
            end += 1
        self._held.append(text[pos:end])
        self._string.append(text[pos:end])
        if end == len(text) or text[end] == "\\":
            return end, None
        self._held.append('"')
        return end + 1, "".join(self._string)

    def _key(self, text: str, pos: int) -> int:
        pos, key = self._quoted(text, pos)
        if key is None:
            return pos
        if self._format.keyed and not self._begun:
            self._name = "arguments"
            self._state = self._colon
            self._named(key)
            return pos
        self._name = _MEMBERS.get(key, "")
        if not self._name or self._name in self._seen:
            self._give_up()
        else:
            self._seen.add(self._name)
            self._state = self._colon
        return pos

    def _colon(self, text: str, pos: int) -> int:
        pos, found = self._expect(BLANK, ":", text, pos)
        if found:
            self._state = self._value
        return pos

    def _value(self, text: str, pos: int) -> int:
        if self._name == "arguments":
            pos = self._hold(BLANK, text, pos)
            if pos < len(text):
                self._held = [] if self._begun else self._held
                self._begin_value()
            return pos
        pos, found = self._expect(BLANK, '"', text, pos)
        if found:
            self._string = []
            self._state = self._word
        return pos

    def _word(self, text: str, pos: int) -> int:
        """Read the value of name, type or id."""
        pos, word = self._quoted(text, pos)
        if word is None:
            return pos
        self._state = self._member
        if self._name == "name":
            self._named(word)
        if self._begun:
            self._held = []
        return pos

    def _named(self, name: str) -> None:
        if not NAME.fullmatch(name) or not (self._tagged or name in self._tools):
            self._give_up()
            return
        self._start_call(name)
        self._add_arguments("".join(self._early_arguments))

    def _value_over(self, cut: bool) -> None:
        if not cut:
            self._state = self._member
        elif self._begun:
            self._end_call()
        else:
            self._give_up()

    def _add_arguments(self, text: str) -> None:
        if self._begun:
            super()._add_arguments(text)
        else:
            self._held.append(text)
            self._early_arguments.append(text)


def _call_and_name(delta: str | CallDelta) -> tuple[int | None, str | None]:
    return (None, None) if isinstance(delta, str) else delta[:2]


def _joined(deltas: list[str | CallDelta]) -> list[str | CallDelta]:
    """Join neighbouring deltas that continue each other. A name stays alone."""
    joined: list[str | CallDelta] = []
    for (call, name), group in groupby(deltas, _call_and_name):
        text = "".join(piece if isinstance(piece, str) else piece.arguments for piece in group)
        joined.append(text if call is None else CallDelta(call, name, text))
    return joined
