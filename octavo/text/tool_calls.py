"""Finds the calls of tools in what a model writes, piece by piece, in time linear in the text.

octavo.text.tool_formats says how models write calls. What a call is, exactly:
- A call begins once its name is known and its arguments begin. Until then its text is held back, and if it turns out not to be
  a call, it is content as it stands.
- Arguments in JSON are the text that the model wrote, passed on as it comes and never corrected: where it is not JSON, the client
  gets it as it is. A closing tag within a JSON string does not end a call; one outside a string does.
- Arguments in another notation become JSON once they are complete. Those that cannot be read are passed on as they are.
- Other text within a call is content.
- Without an opening tag the name must be one of the tools', for nothing else tells a call from other text.
- White space around calls is not content, except between two words.
- Where only one call is wanted, the first call ends the reply.

Knows text alone: no tokens, no requests, no transport.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from octavo.text.tool_formats import ToolFormat


class CallDelta(NamedTuple):
    """News of one call: its name, once, then its arguments."""

    call: int  # the call's place in the reply
    name: str | None
    arguments: str


BLANK = re.compile(r"[ \t\r\n]*+")
BETWEEN_CALLS = re.compile(r"[ \t\r\n,;\]]*+")
NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)
_BEFORE_CALL = re.compile(r"[ \t\r\n\[]*+")
_BETWEEN_MEMBERS = re.compile(r"[ \t\r\n,]*+")
_IN_STRING = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_NOT_STRUCTURE = re.compile(r'[^"{}\[\],<]*+')
# The members of a call in JSON, by the names that models give them.
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
    """Reads one reply. The results of `push` and `finish` join to the same whatever pieces the text comes in.

    A state is a method that gets the text and a position in it, and returns how far it came. A state that neither moves nor
    changes waits for more text, which is never for more than a short header: the text from there on is read again with it.
    Subclasses read the calls; what is common to them is here.
    """

    def __init__(self, format: ToolFormat, tools: Mapping[str, Any], parallel: bool = True):
        """`tools` are the JSON schemas of the tools' parameters, by name. Without `parallel` the first call ends the reply,
        and what follows is left out."""
        self._format = format
        self._tools = tools
        self._parallel = parallel
        self.calls = 0
        self.over = False  # nothing that follows matters
        tags = {*format.opening, *format.closing, *format.silent}
        self._tags = sorted(tags, key=len, reverse=True)
        self._tag = re.compile("|".join(map(re.escape, self._tags)) or "(?!)")
        self._state: Callable[[str, int], int] = self._bare if format.start else self._content
        self._rest = ""  # of the text, to be read again
        self._ending = False  # no more text comes
        self._out: list[str | CallDelta] = []
        self._has_content = False  # there was content
        self._space: list[str] = []  # white space that is content if a word follows it
        self._unclosed = False  # a closing tag is still to come, and is not content
        self._quiet = False  # there was no content since the call
        self._begin()

    def push(self, text: str) -> list[str | CallDelta]:
        """What the text makes certain, in order: content, and deltas of calls."""
        text = self._rest + text
        pos = 0
        while pos < len(text) and not self.over:
            before = self._state, pos
            pos = self._state(text, pos)
            if (self._state, pos) == before:
                break
        self._rest = "" if self.over else text[pos:]
        out = self._out
        self._out = []
        return _joined(out) if len(out) > 1 else out

    def finish(self) -> list[str | CallDelta]:
        """The rest, when no more text comes. Half a tag is content after all, and so is the text of a call that had not begun.
        A call that is cut keeps the arguments that it has."""
        self._ending = True
        out = self.push("")
        if self._state != self._content and not self._begun:
            self._held.append(self._rest)
            self._give_up()
        elif self._begun:
            self._cut()
        if not self.calls:
            self._out += self._space
        out += self._out
        return _joined(out)

    # ---- for subclasses ---------------------------------------------------------------------------

    def _bare(self, text: str, pos: int) -> int:
        """The state at the start of a reply that may begin with a call without a tag."""
        raise NotImplementedError

    def _opened(self, tag: str) -> None:
        """An opening tag was found: set the state for what follows."""
        raise NotImplementedError

    def _between(self, text: str, pos: int) -> int:
        """The state after a call."""
        raise NotImplementedError

    def _value_over(self, cut: bool) -> None:
        """A value in JSON was read, or was cut by a closing tag: set the state for what follows."""
        raise NotImplementedError

    def _cut(self) -> None:
        """The reply ends within a call, or after one."""

    # ---- content ----------------------------------------------------------------------------------

    def _content(self, text: str, pos: int) -> int:
        found = self._tag.search(text, pos)
        if found is None:
            end = len(text)
            rest = text[pos:]
            if self._ending and self._unclosed and self._quiet and self._starts_closing(rest):
                return end
            if not self._ending:
                end = self._undecided(text, pos)
            self._say(text[pos:end])
            return end
        tag = found[0]
        self._say(text[pos : found.start()])
        if tag in self._format.opening:
            self._begin(tag)
            self._unclosed = False
            self._opened(tag)
        elif tag in self._format.closing and self._unclosed:
            self._unclosed = False
        elif tag not in self._format.silent:
            self._say(tag)
        return found.end()

    def _starts_closing(self, text: str) -> bool:
        return any(tag.startswith(text) for tag in self._format.closing)

    def _undecided(self, text: str, pos: int) -> int:
        """Where a tag may begin that the text does not hold whole."""
        longest = len(self._tags[0]) if self._tags else 1
        for at in range(max(pos, len(text) - longest + 1), len(text)):
            if any(tag.startswith(text[at:]) for tag in self._tags):
                return at
        return len(text)

    def _say(self, text: str) -> None:
        words = text.rstrip()
        if words:
            whole = "".join(self._space) + words
            self._out.append(whole.lstrip() if self.calls and not self._has_content else whole)
            self._space = []
            self._has_content = True
            self._quiet = False
        if len(words) < len(text):
            self._space.append(text[len(words) :])

    # ---- a call -----------------------------------------------------------------------------------

    def _begin(self, held: str = "") -> None:
        self._held = [held]  # what is content if this is not a call
        self._begun = False  # the name is known
        self._tagged = bool(held)  # an opening tag makes it a call, whatever the name
        self._argued = False  # there were arguments

    def _give_up(self) -> None:
        """This is not a call, or the call is over."""
        self._say("".join(self._held))
        self._held = []
        self._unclosed = self._quiet = self._begun and bool(self._format.closing)
        self._state = self._content

    def _hold(self, run: re.Pattern[str], text: str, pos: int) -> int:
        found = run.match(text, pos)
        assert found is not None
        self._held.append(found[0])
        return found.end()

    def _after_call(self, text: str, pos: int) -> tuple[int, bool]:
        """Read what may stand after a call, up to a closing tag. The second value tells whether
        another call or content follows."""
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

    def _open(self, name: str) -> None:
        self._begun = True
        if not self._has_content:
            self._space = []
        self.calls += 1
        self._out.append(CallDelta(self.calls - 1, name, ""))

    def _end(self) -> None:
        self._held = []
        self._state = self._between
        self.over = not self._parallel

    def _argue(self, text: str) -> None:
        """Pass on arguments of a call that has begun."""
        if text:
            self._argued = True
            self._out.append(CallDelta(self.calls - 1, None, text))

    # ---- a value in JSON --------------------------------------------------------------------------

    def _begin_value(self) -> None:
        self._depth = 0
        self._in_string = False
        self._state = self._value_text

    def _value_text(self, text: str, pos: int) -> int:
        """A value of any kind: up to the bracket or the quotation mark that closes it, or to what cannot belong to a word."""
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
                    break  # the escaped character is still to come
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
        self._argue(text[start:pos])
        if over or cut:
            self._value_over(cut)
        return pos

    @property
    def _cutters(self) -> tuple[str, ...]:
        """The tags that end a value in JSON, wherever it is."""
        return self._format.closing

    def _starts_cutter(self, text: str) -> bool:
        return any(tag.startswith(text) for tag in self._cutters)


class JsonParser(ToolParser):
    """Reads calls that are objects in JSON, alone or in a list. Their members may come in any order."""

    def _begin(self, held: str = "") -> None:
        super()._begin(held)
        self._seen: set[str] = set()  # members
        self._early: list[str] = []  # arguments that came before the name

    def _opened(self, tag: str) -> None:
        self._state = self._before

    def _before(self, text: str, pos: int) -> int:
        pos, found = self._expect(_BEFORE_CALL, "{", text, pos)
        if found:
            self._state = self._member
        return pos

    def _bare(self, text: str, pos: int) -> int:
        run = _BEFORE_CALL if self._format.start.startswith("[") else BLANK
        return self._call_without_tag(run, text, pos)

    def _between(self, text: str, pos: int) -> int:
        pos, goes_on = self._after_call(text, pos)
        return self._call_without_tag(BLANK, text, pos) if goes_on else pos

    def _call_without_tag(self, run: re.Pattern[str], text: str, pos: int) -> int:
        """What may be a call, after one or at the start of a reply."""
        pos = self._hold(run, text, pos)
        if pos == len(text):
            return pos
        if text[pos] == "{":
            tagged = self._begun and not self._format.start
            held = "".join(self._held)
            self._begin(held)
            self._tagged = tagged
            self._state = self._before
        else:
            self._give_up()
        return pos

    def _expect(self, run: re.Pattern[str], char: str, text: str, pos: int) -> tuple[int, bool]:
        """After a run, one character, and whether it is there. If another character is there, this is not a call."""
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
            if not self._argued:
                self._argue("{}")
            self._end()
            return pos + 1
        pos, found = self._expect(BLANK, '"', text, pos)
        if found:
            self._string: list[str] = []
            self._state = self._key
        return pos

    def _quoted(self, text: str, pos: int) -> tuple[int, str | None]:
        """The rest of a string, and all of the string once it is complete, as it was written."""
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
        """The value of name, type or id."""
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
        self._open(name)
        self._argue("".join(self._early))

    def _value_over(self, cut: bool) -> None:
        if not cut:
            self._state = self._member
        elif self._begun:
            self._end()
        else:
            self._give_up()

    def _argue(self, text: str) -> None:
        if self._begun:
            super()._argue(text)
        else:
            self._held.append(text)
            self._early.append(text)


def _joined(out: list[str | CallDelta]) -> list[str | CallDelta]:
    """As few pieces as say the same; a name comes alone."""
    joined: list[str | CallDelta] = []
    for (call, name), group in groupby(
        out, lambda piece: (None, None) if isinstance(piece, str) else piece[:2]
    ):
        text = "".join(piece if isinstance(piece, str) else piece.arguments for piece in group)
        joined.append(text if call is None else CallDelta(call, name, text))
    return joined
