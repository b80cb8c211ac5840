"""Finds the calls of tools in what a model writes, piece by piece, in time linear in the text.

    hermes       <tool_call>{"name": "f", "arguments": {...}}</tool_call>, of a list of such objects too
    llama_json   {"name": "f", "parameters": {...}}, as the whole reply or after <|python_tag|>; more of them after "; "

What a call is, exactly:
- The members name and arguments (or parameters), in any order, and perhaps type and id, which the API has places of its own for.
- It begins once its name is known. Until then its text is held back, and if it turns out to be none, it is content as it stands.
- Its arguments are the text that the model wrote there, passed on as it comes and never corrected: where that is no JSON, the
  client gets what there is. A closing tag within a JSON string does not end a call; one outside does.
- What stands in a call besides is content.
- Without a tag the name must be one of the tools', for nothing else tells a call from any JSON.
- White space around calls is not content, except between two words of it.
- Where only one call is wanted, the reply is over with the first.

Knows text alone: no tokens, no requests, no transport.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple


@dataclass(frozen=True)
class Format:
    """How a family of models writes calls."""

    name: str
    open: str  # the tag before a call
    close: str  # the one after it; "": none
    bare: bool  # a reply may begin with a call that has no tag
    arguments: str  # what the model calls them
    between: str  # how it separates two calls


HERMES = Format("hermes", "<tool_call>", "</tool_call>", False, "arguments", "\n")
LLAMA_JSON = Format("llama_json", "<|python_tag|>", "", True, "parameters", "; ")
FORMATS = {format.name: format for format in (HERMES, LLAMA_JSON)}


def choose_format(setting: str, template: str, knows_tools: bool) -> Format | None:
    """By name; or, for "auto", the one that the model's chat template shows. A template that knows no tools is told of them in
    words (octavo.text.tool_prompt), and those ask for hermes. None: no calls are read."""
    if setting != "auto":
        return FORMATS.get(setting)
    if HERMES.open in template or not knows_tools:
        return HERMES
    if LLAMA_JSON.open in template or '"parameters": ' in template:
        return LLAMA_JSON
    return None


class CallDelta(NamedTuple):
    """What is new of one call: its name, once, then its arguments."""

    call: int  # which of the reply's
    name: str | None
    arguments: str


_BLANK = re.compile(r"[ \t\r\n]*+")
_BEFORE_CALL = re.compile(r"[ \t\r\n\[]*+")
_BETWEEN_MEMBERS = re.compile(r"[ \t\r\n,]*+")
_BETWEEN_CALLS = re.compile(r"[ \t\r\n,;\]]*+")
_IN_STRING = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_NOT_STRUCTURE = re.compile(r'[^"{}\[\],<]*+')
_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)
_MEMBERS = {
    "name": "name",
    "arguments": "arguments",
    "parameters": "arguments",
    "type": "type",
    "id": "id",
}


class ToolParser:
    """One reply. Whatever pieces its text comes in, what `push` and `finish` return joins to the same.

    A state is a method that gets the text and a place in it and returns how far it came. One that neither moves nor changes the
    state waits for what comes next, which is never for more than a tag's length: the text from there on is read again with it.
    """

    def __init__(self, format: Format, names: Collection[str], parallel: bool = True):
        """`names`: of the tools there are. Without `parallel` the first call ends the reply, and what follows is left out."""
        self._format = format
        self._names = names
        self._parallel = parallel
        self.calls = 0
        self.over = False  # nothing that comes matters any more
        self._tags = [tag for tag in (format.open, format.close) if tag]
        self._tag = re.compile("|".join(map(re.escape, self._tags)))
        self._state: Callable[[str, int], int] = self._between if format.bare else self._content
        self._rest = ""  # of the text, to be read again
        self._ending = False  # nothing more comes
        self._out: list[str | CallDelta] = []
        self._said = False  # there was content
        self._space: list[str] = []  # white space that is content if a word follows it
        self._unclosed = False  # a closing tag is still to come, and is not content
        self._quiet = False  # nothing was said since the call
        self._tagged = False
        self._begin()

    def push(self, text: str) -> list[str | CallDelta]:
        """What the text makes certain, in order: content, and news of calls."""
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
        """The reply is over: half a tag is content after all, and so is what had no name yet. A call that is cut keeps the
        arguments that it has."""
        self._ending = True
        out = self.push("")
        if self._state != self._content and not self._begun:
            self._give_up()
        if not self.calls:
            self._out += self._space
        out += self._out
        return _joined(out)

    # ---- content ----------------------------------------------------------------------------------

    def _content(self, text: str, pos: int) -> int:
        found = self._tag.search(text, pos)
        if found is None:
            end = len(text)
            if (
                self._ending
                and self._unclosed
                and self._quiet
                and self._format.close.startswith(text[pos:])
            ):
                return end  # all there is of the tag that closes a call
            if not self._ending:
                last = text.rfind("<", pos)  # tags have one, their first character
                if last >= 0 and self._may_become_tag(text, last):
                    end = last
            self._say(text[pos:end])
            return end
        self._say(text[pos : found.start()])
        if found[0] == self._format.open:
            self._begin(found[0])
            self._tagged = True
            self._unclosed = False
            self._state = self._before
        elif self._unclosed:
            self._unclosed = False
        else:
            self._say(found[0])
        return found.end()

    def _may_become_tag(self, text: str, pos: int) -> bool:
        longest = len(max(self._tags, key=len))
        return len(text) - pos < longest and any(tag.startswith(text[pos:]) for tag in self._tags)

    def _say(self, text: str) -> None:
        words = text.rstrip()
        if words:
            whole = "".join(self._space) + words
            self._out.append(whole.lstrip() if self.calls and not self._said else whole)
            self._space = []
            self._said = True
            self._quiet = False
        if len(words) < len(text):
            self._space.append(text[len(words) :])

    # ---- a call -----------------------------------------------------------------------------------

    def _begin(self, held: str = "") -> None:
        self._held = [held]  # what is content if this is no call
        self._begun = False  # its name is known
        self._seen: set[str] = set()  # members
        self._early: list[str] = []  # arguments that came before the name
        self._argued = False

    def _give_up(self) -> None:
        """This is no call, or no longer one."""
        self._say("".join(self._held))
        self._unclosed = self._quiet = self._begun and bool(self._format.close)
        self._state = self._content

    def _hold(self, run: re.Pattern[str], text: str, pos: int) -> int:
        found = run.match(text, pos)
        assert found is not None
        self._held.append(found[0])
        return found.end()

    def _expect(self, run: re.Pattern[str], char: str, text: str, pos: int) -> tuple[int, bool]:
        """After a run, one character. True: it is there. If another one is there, it is no call."""
        pos = self._hold(run, text, pos)
        if pos == len(text):
            return pos, False
        if text[pos] != char:
            self._give_up()
            return pos, False
        self._held.append(char)
        return pos + 1, True

    def _before(self, text: str, pos: int) -> int:
        pos, found = self._expect(_BEFORE_CALL, "{", text, pos)
        if found:
            self._state = self._member
        return pos

    def _between(self, text: str, pos: int) -> int:
        """After a call, and where a reply begins that needs no tag."""
        pos = self._hold(_BETWEEN_CALLS if self.calls else _BLANK, text, pos)
        if pos == len(text):
            return pos
        close = self._format.close
        if close and text.startswith(close, pos):
            self._state = self._content
            return pos + len(close)
        if close and not self._ending and text[pos] == "<" and close.startswith(text[pos:]):
            return pos
        if text[pos] == "{":
            held = "".join(self._held)
            self._begin(held)
            self._tagged = bool(close)
            self._state = self._before
        else:
            self._give_up()
        return pos

    def _member(self, text: str, pos: int) -> int:
        pos = self._hold(_BETWEEN_MEMBERS, text, pos)
        if pos < len(text) and text[pos] == "}" and self._begun:
            if not self._argued:
                self._argue("{}")
            self._end()
            return pos + 1
        pos, found = self._expect(_BLANK, '"', text, pos)
        if found:
            self._string: list[str] = []
            self._state = self._key
        return pos

    def _quoted(self, text: str, pos: int) -> tuple[int, str | None]:
        """The rest of a string, and all of it once it is there, as it was written."""
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
        if key is not None:
            self._name = _MEMBERS.get(key, "")
            if not self._name or self._name in self._seen:
                self._give_up()
            else:
                self._seen.add(self._name)
                self._state = self._colon
        return pos

    def _colon(self, text: str, pos: int) -> int:
        pos, found = self._expect(_BLANK, ":", text, pos)
        if found:
            self._state = self._value
        return pos

    def _value(self, text: str, pos: int) -> int:
        if self._name == "arguments":
            pos = self._hold(_BLANK, text, pos)
            if pos < len(text):
                self._held = [] if self._begun else self._held
                self._depth = 0
                self._in_string = False
                self._state = self._arguments
            return pos
        pos, found = self._expect(_BLANK, '"', text, pos)
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
            if not _NAME.fullmatch(word) or not (self._tagged or word in self._names):
                self._give_up()
                return pos
            self._open(word)
        if self._begun:
            self._held = []
        return pos

    def _open(self, name: str) -> None:
        self._begun = True
        if not self._said:
            self._space = []
        self.calls += 1
        self._out.append(CallDelta(self.calls - 1, name, ""))
        self._argue("".join(self._early))

    def _end(self) -> None:
        self._held = []
        self._state = self._between
        self.over = not self._parallel

    def _arguments(self, text: str, pos: int) -> int:
        """A value of any kind: up to the bracket that closes it, a quote that does, or what cannot belong to a plain word."""
        start = pos
        over = False
        cut = False
        close = self._format.close
        while pos < len(text) and not over:
            found = (_IN_STRING if self._in_string else _NOT_STRUCTURE).match(text, pos)
            assert found is not None
            pos = found.end()
            if pos == len(text):
                break
            char = text[pos]
            if self._in_string:
                if char == "\\" and not self._ending:
                    break  # what it escapes is still to come
                self._in_string = char == "\\"
                over = self._depth == 0 and not self._in_string
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char == "<":
                if close and text.startswith(close, pos):
                    cut = True
                    break
                if close and not self._ending and close.startswith(text[pos:]):
                    break
            elif self._depth == 0:
                self._state = self._member
                break
            elif char != ",":
                self._depth -= 1
                over = self._depth == 0
            pos += 1
        self._argue(text[start:pos])
        if over:
            self._state = self._member
        elif cut and self._begun:
            self._end()
        elif cut:
            self._give_up()
        return pos

    def _argue(self, text: str) -> None:
        if not self._begun:
            self._held.append(text)
            self._early.append(text)
        elif text:
            self._argued = True
            self._out.append(CallDelta(self.calls - 1, None, text))


def _joined(out: list[str | CallDelta]) -> list[str | CallDelta]:
    """As few as say the same; a name comes alone."""
    joined: list[str | CallDelta] = []
    for (call, name), group in groupby(
        out, lambda piece: (None, None) if isinstance(piece, str) else piece[:2]
    ):
        text = "".join(piece if isinstance(piece, str) else piece.arguments for piece in group)
        joined.append(text if call is None else CallDelta(call, name, text))
    return joined
