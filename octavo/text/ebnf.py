"""EBNF grammars as llama.cpp (GBNF) and xgrammar write them, translated into llguidance's dialect of Lark.

    root ::= "[" item ("," item)* "]"       # a comment
    item ::= [a-z]+ | root

Literals, character sets, groups, alternatives and the repetitions ? * + {m} {m,} {m,n} mean what they mean there.

llguidance tells rules from terminals: a rule is followed by its parser, a terminal by an automaton, which is far cheaper and takes
the longest match. So everything that does not lead to recursion becomes a terminal, as large as possible: within one, the match
is exact. Between a terminal and what follows it in a recursive rule the longest match decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.text.spec_errors import SpecError

MAX_GROUPS = 24  # groups within each other: llguidance takes a few more
_RULE = re.compile(r"^[ \t]*[A-Za-z_][\w.-]*\s*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
    | (?P<define>::=)
    | (?P<name>[A-Za-z0-9_][\w.-]*)
    | "(?P<text>(?:[^"\\]|\\.)*)"
    | \[(?P<set>(?:[^\]\\]|\\.)*)\]
    | \{(?P<repeat>\s*\d*\s*(?:,\s*\d*\s*)?)\}
    | (?P<mark>[()|?*+.])""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|u\{(?P<v>[0-9a-fA-F]{1,6})\}"
    r"|(?P<named>.))|(?P<plain>.)",
    re.DOTALL,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_PUNCTUATION = "\\\"'[]-^/.{}()|?*+"  # stand for themselves behind a backslash


def is_ebnf(grammar: str) -> bool:
    return _RULE.search(grammar) is not None


def ebnf_to_lark(grammar: str) -> str:
    """Raises SpecError."""
    rules = _Reader(grammar).rules()
    for name, expression in rules.items():
        for used in names(expression):
            if used not in rules:
                raise SpecError(f"the rule {name} uses {used}, which is not defined")
    if "root" not in rules:
        raise SpecError("the grammar has no rule root, where a text begins")
    return _Writer(rules).lark()


# ---- what a grammar is made of --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Characters:
    pattern: str  # a regex for one character


@dataclass(frozen=True)
class Name:
    name: str


@dataclass(frozen=True)
class Sequence:
    parts: tuple[Expression, ...]


@dataclass(frozen=True)
class Choice:
    options: tuple[Expression, ...]


@dataclass(frozen=True)
class Repeat:
    part: Expression
    least: int
    most: int | None  # None: any number


Expression = Text | Characters | Name | Sequence | Choice | Repeat


def names(expression: Expression) -> Iterator[str]:
    """The rules that an expression uses."""
    waiting = [expression]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Name):
            yield part.name
        elif isinstance(part, Sequence):
            waiting += part.parts
        elif isinstance(part, Choice):
            waiting += part.options
        elif isinstance(part, Repeat):
            waiting.append(part.part)


# ---- reading --------------------------------------------------------------------------------------------------


class _Reader:
    """A parser by recursive descent. The current token is (kind, text, position)."""

    def __init__(self, grammar: str):
        self.grammar = grammar
        self.tokens = list(self._tokens())
        self.at = 0

    def _tokens(self) -> Iterator[tuple[str, str, int]]:
        position = 0
        while position < len(self.grammar):
            found = _TOKEN.match(self.grammar, position)
            if found is None or found.lastgroup is None:
                raise self.error("this cannot be read", position)
            if found.lastgroup != "space":
                yield found.lastgroup, found[found.lastgroup], position
            position = found.end()
        yield "end", "", position

    def error(self, message: str, position: int) -> SpecError:
        line = self.grammar.count("\n", 0, position) + 1
        column = position - self.grammar.rfind("\n", 0, position)
        near = self.grammar[position : position + 20].split("\n")[0]
        where = f"at {near!r}, line {line} column {column}" if near else "at the end"
        return SpecError(f"{message}, {where}")

    def rules(self) -> dict[str, Expression]:
        found: dict[str, Expression] = {}
        while self.tokens[self.at][0] != "end":
            kind, name, position = self.tokens[self.at]
            if kind != "name" or not self._begins_rule():
                raise self.error("expected a rule, name ::= ...", position)
            if name in found:
                raise self.error(f"the rule {name} is defined twice", position)
            self.at += 2
            found[name] = self._choice(0)
        return found

    def _begins_rule(self) -> bool:
        return self.tokens[self.at][0] == "name" and self.tokens[self.at + 1][0] == "define"

    def _is(self, mark: str) -> bool:
        return self.tokens[self.at][:2] == ("mark", mark)

    def _choice(self, depth: int) -> Expression:
        options = [self._sequence(depth)]
        while self._is("|"):
            self.at += 1
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, depth: int) -> Expression:
        parts: list[Expression] = []
        while not self._begins_rule() and self._starts_part():
            parts.append(self._repeated(depth))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _starts_part(self) -> bool:
        kind, text, _ = self.tokens[self.at]
        return kind in ("name", "text", "set") or (kind == "mark" and text in "(.")

    def _repeated(self, depth: int) -> Expression:
        part = self._part(depth)
        while True:
            kind, text, position = self.tokens[self.at]
            if kind == "repeat":
                part = Repeat(part, *self._bounds(text, position))
            elif kind == "mark" and text in "?*+":
                part = Repeat(part, int(text == "+"), 1 if text == "?" else None)
            else:
                return part
            self.at += 1

    def _bounds(self, text: str, position: int) -> tuple[int, int | None]:
        first, comma, second = text.replace(" ", "").partition(",")
        if not first and not second:
            raise self.error("a repetition is {m}, {m,} or {m,n}", position)
        least = int(first or 0)
        most = int(second) if second else None if comma else least
        if most is not None and most < least:
            raise self.error("a repetition ends before it begins", position)
        return least, most

    def _part(self, depth: int) -> Expression:
        kind, text, position = self.tokens[self.at]
        self.at += 1
        if kind == "name":
            return Name(text)
        if kind == "text":
            return Text("".join(chr(point) for point, _ in self._characters(text, position)))
        if kind == "set":
            return Characters(self._set(text, position))
        if text == ".":
            return Characters("(?s:.)")
        if depth == MAX_GROUPS:
            raise self.error(f"groups are nested more than {MAX_GROUPS} levels deep", position)
        part = self._choice(depth + 1)
        if not self._is(")"):
            raise self.error("expected )", self.tokens[self.at][2])
        self.at += 1
        return part

    def _characters(self, text: str, position: int) -> Iterator[tuple[int, bool]]:
        """Code points, and whether each was written without a backslash."""
        for found in _CHARACTER.finditer(text):
            digits = found["x"] or found["u"] or found["U"] or found["v"]
            if digits is not None:
                point = int(digits, 16)
                if point > 0x10FFFF or 0xD800 <= point <= 0xDFFF:
                    raise self.error(f"U+{digits} is not a character", position)
                yield point, False
            elif found["named"] is None:
                yield ord(found["plain"]), True
            elif found["named"] in _ESCAPES:
                yield ord(_ESCAPES[found["named"]]), False
            elif found["named"] in _PUNCTUATION:
                yield ord(found["named"]), False
            else:
                raise self.error(f"the escape \\{found['named']} is not known", position)

    def _set(self, text: str, position: int) -> str:
        points = list(self._characters(text, position))
        negated = bool(points) and points[0] == (ord("^"), True)
        del points[: int(negated)]
        if not points:
            if negated:
                return "(?s:.)"
            raise self.error("a set of characters is empty", position)
        ranges: list[str] = []
        at = 0
        while at < len(points):
            first = last = points[at][0]
            if at + 2 < len(points) and points[at + 1] == (ord("-"), True):
                last = points[at + 2][0]
                at += 2
            if last < first:
                raise self.error("a range of characters ends before it begins", position)
            ranges.append(rf"\u{{{first:x}}}-\u{{{last:x}}}")
            at += 1
        return f"[{'^' if negated else ''}{''.join(ranges)}]"


# ---- writing --------------------------------------------------------------------------------------------------


def literal(text: str) -> str:
    """A string in Lark. Its lexer takes no control characters, DEL included, unless they are escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class _Writer:
    def __init__(self, rules: dict[str, Expression]):
        self.rules = rules
        self.regular = regular_rules(rules)
        self.numbers = {name: index for index, name in enumerate(rules)}
        self.lines: list[str] = []

    def lark(self) -> str:
        self.lines.append(f"start: {self.name('root')}")
        for name, expression in self.rules.items():
            write = self.terminal if name in self.regular else self.rule
            self.lines.append(f"{self.name(name)}: {write(expression)}")
        return "\n".join(self.lines)

    def name(self, rule: str) -> str:
        return f"{'T' if rule in self.regular else 'r'}{self.numbers[rule]}"

    def is_regular(self, expression: Expression) -> bool:
        return all(name in self.regular for name in names(expression))

    def terminal(self, expression: Expression) -> str:
        """An expression without recursion, as the body of a terminal."""
        if isinstance(expression, Text):
            return literal(expression.text)
        if isinstance(expression, Characters):
            return f"/{expression.pattern}/"
        if isinstance(expression, Name):
            return self.name(expression.name)
        if isinstance(expression, Repeat):
            return repeated(self.terminal(expression.part), expression)
        if isinstance(expression, Sequence):
            return " ".join(map(self.terminal, expression.parts)) or '""'
        return f"({' | '.join(map(self.terminal, expression.options))})"

    def rule(self, expression: Expression) -> str:
        """An expression as the body of a rule. Its parts without recursion become terminals of their own."""
        if isinstance(expression, Text | Characters | Name):
            return self.terminal(expression)
        if self.is_regular(expression):
            self.lines.append(f"X{len(self.lines)}: {self.terminal(expression)}")
            return f"X{len(self.lines) - 1}"
        if isinstance(expression, Repeat):
            return repeated(self.rule(expression.part), expression)
        if isinstance(expression, Sequence):
            return " ".join(map(self.rule, self.joined(expression.parts)))
        return f"({' | '.join(map(self.rule, expression.options))})"

    def joined(self, parts: tuple[Expression, ...]) -> list[Expression]:
        """The parts of a sequence, neighbours without recursion as one."""
        found: list[list[Expression]] = []
        for part in parts:
            if found and self.is_regular(part) and self.is_regular(found[-1][-1]):
                found[-1].append(part)
            else:
                found.append([part])
        return [group[0] if len(group) == 1 else Sequence(tuple(group)) for group in found]


def repeated(part: str, how: Repeat) -> str:
    if how.most == 0:
        return '""'
    if (how.least, how.most) == (0, None):
        return f"({part})*"
    most = "" if how.most is None else how.most
    return f"({part}){{{how.least},{most}}}"


def regular_rules(rules: dict[str, Expression]) -> set[str]:
    """The rules that do not lead to recursion."""
    needs = {name: set(names(expression)) for name, expression in rules.items()}
    users: dict[str, list[str]] = {}
    for name, used in needs.items():
        for one in used:
            users.setdefault(one, []).append(name)
    found = {name for name, used in needs.items() if not used}
    waiting = list(found)
    while waiting:
        done = waiting.pop()
        for user in users.get(done, ()):
            needs[user].discard(done)
            if not needs[user]:
                found.add(user)
                waiting.append(user)
    return found
