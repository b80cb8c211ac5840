"""Translates EBNF grammars of llama.cpp (GBNF) and xgrammar into llguidance's dialect of Lark.

    root ::= "[" item ("," item)* "]"       # a comment
    item ::= [a-z]+ | root

Literals, character sets, groups, alternatives and the repetitions ? * + {m} {m,} {m,n} have the
same meaning as there.

llguidance distinguishes rules from terminals. Its parser follows rules. An automaton follows
terminals, which is far cheaper and takes the longest match. So every expression that does not lead
to recursion becomes part of a terminal, and terminals are as large as possible. A match inside a
terminal is exact. At the end of a terminal in a recursive rule the longest match wins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.text.spec_errors import SpecError

MAX_GROUPS = 24  # nested groups; llguidance accepts a few more
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
_CHARACTER_PATTERN = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})"
    r"|u\{(?P<v>[0-9a-fA-F]{1,6})\}|(?P<named>.))|(?P<plain>.)",
    re.DOTALL,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_PUNCTUATION = "\\\"'[]-^/.{}()|?*+"  # characters that a backslash may escape


def is_ebnf(grammar: str) -> bool:
    return _RULE.search(grammar) is not None


def ebnf_to_lark(grammar: str) -> str:
    """Return the grammar in Lark. Raises SpecError."""
    rules = _Reader(grammar).rule_expressions()
    for rule_name, expression in rules.items():
        for used_name in referenced_rules(expression):
            if used_name not in rules:
                raise SpecError(f"the rule {rule_name} uses {used_name}, which is not defined")
    if "root" not in rules:
        raise SpecError("the grammar has no rule named root: define root, where every text begins")
    return _Writer(rules).to_lark()


# ---- expressions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class LiteralText:
    literal: str


@dataclass(frozen=True)
class CharacterSet:
    pattern: str  # a regex for one character


@dataclass(frozen=True)
class RuleReference:
    rule_name: str


@dataclass(frozen=True)
class Concatenation:
    parts: tuple[Expression, ...]


@dataclass(frozen=True)
class Alternation:
    alternatives: tuple[Expression, ...]


@dataclass(frozen=True)
class Repetition:
    repeated: Expression
    minimum: int
    maximum: int | None  # None: any number


Expression = LiteralText | CharacterSet | RuleReference | Concatenation | Alternation | Repetition


def referenced_rules(expression: Expression) -> Iterator[str]:
    """Yield the rules that an expression uses."""
    pending = [expression]
    while pending:
        part = pending.pop()
        if isinstance(part, RuleReference):
            yield part.rule_name
        elif isinstance(part, Concatenation):
            pending += part.parts
        elif isinstance(part, Alternation):
            pending += part.alternatives
        elif isinstance(part, Repetition):
            pending.append(part.repeated)


# ---- reading -------------------------------------------------------------------------------------


class _Reader:
    """A recursive descent parser. A token is (kind, text, position in the grammar)."""

    def __init__(self, grammar: str):
        self.grammar = grammar
        self.tokens = list(self._tokens())
        self.position = 0

    def _tokens(self) -> Iterator[tuple[str, str, int]]:
        position = 0
        while position < len(self.grammar):
            token_match = _TOKEN.match(self.grammar, position)
            if token_match is None or token_match.lastgroup is None:
                raise self.error("invalid syntax", position)
            if token_match.lastgroup != "space":
                yield token_match.lastgroup, token_match[token_match.lastgroup], position
            position = token_match.end()
        yield "end", "", position

    def error(self, message: str, position: int) -> SpecError:
        line = self.grammar.count("\n", 0, position) + 1
        column = position - self.grammar.rfind("\n", 0, position)
        excerpt = self.grammar[position : position + 20].split("\n")[0]
        location = f"at {excerpt!r}, line {line} column {column}" if excerpt else "at the end"
        return SpecError(f"{message}, {location}")

    def rule_expressions(self) -> dict[str, Expression]:
        expressions: dict[str, Expression] = {}
        while self.tokens[self.position][0] != "end":
            kind, rule_name, position = self.tokens[self.position]
            if kind != "name" or not self._at_rule():
                raise self.error("expected a rule, name ::= ...", position)
            if rule_name in expressions:
                raise self.error(f"the rule {rule_name} is defined twice", position)
            self.position += 2
            expressions[rule_name] = self._alternation(0)
        return expressions

    def _at_rule(self) -> bool:
        return (
            self.tokens[self.position][0] == "name"
            and self.tokens[self.position + 1][0] == "define"
        )

    def _at_mark(self, mark: str) -> bool:
        return self.tokens[self.position][:2] == ("mark", mark)

    def _alternation(self, depth: int) -> Expression:
        options = [self._concatenation(depth)]
        while self._at_mark("|"):
            self.position += 1
            options.append(self._concatenation(depth))
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def _concatenation(self, depth: int) -> Expression:
        parts: list[Expression] = []
        while not self._at_rule() and self._at_atom():
            parts.append(self._repetition(depth))
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def _at_atom(self) -> bool:
        kind, text, _ = self.tokens[self.position]
        return kind in ("name", "text", "set") or (kind == "mark" and text in "(.")

    def _repetition(self, depth: int) -> Expression:
        expression = self._atom(depth)
        while True:
            kind, text, position = self.tokens[self.position]
            if kind == "repeat":
                expression = Repetition(expression, *self._repetition_bounds(text, position))
            elif kind == "mark" and text in "?*+":
                expression = Repetition(expression, int(text == "+"), 1 if text == "?" else None)
            else:
                return expression
            self.position += 1

    def _repetition_bounds(self, text: str, position: int) -> tuple[int, int | None]:
        lower, comma, upper = text.replace(" ", "").partition(",")
        if not lower and not upper:
            raise self.error("a repetition is {m}, {m,} or {m,n}", position)
        minimum = int(lower or 0)
        maximum: int | None = minimum
        if upper:
            maximum = int(upper)
        elif comma:
            maximum = None
        if maximum is not None and maximum < minimum:
            raise self.error("a repetition ends before it begins", position)
        return minimum, maximum

    def _atom(self, depth: int) -> Expression:
        kind, text, position = self.tokens[self.position]
        self.position += 1
        if kind == "name":
            return RuleReference(text)
        if kind == "text":
            return LiteralText(
                "".join(chr(code_point) for code_point, _ in self._code_points(text, position))
            )
        if kind == "set":
            return CharacterSet(self._character_set(text, position))
        if text == ".":
            return CharacterSet("(?s:.)")
        if depth == MAX_GROUPS:
            raise self.error(f"groups are nested more than {MAX_GROUPS} levels deep", position)
        group = self._alternation(depth + 1)
        if not self._at_mark(")"):
            raise self.error("expected )", self.tokens[self.position][2])
        self.position += 1
        return group

    def _code_points(self, text: str, position: int) -> Iterator[tuple[int, bool]]:
        """Yield each code point, and whether it was written without a backslash."""
        for escape_match in _CHARACTER_PATTERN.finditer(text):
            hex_digits = (
                escape_match["x"] or escape_match["u"] or escape_match["U"] or escape_match["v"]
            )
            if hex_digits is not None:
                code_point = int(hex_digits, 16)
                if code_point > 0x10FFFF or 0xD800 <= code_point <= 0xDFFF:
                    raise self.error(f"U+{hex_digits} is not a character", position)
                yield code_point, False
            elif escape_match["named"] is None:
                yield ord(escape_match["plain"]), True
            elif escape_match["named"] in _ESCAPES:
                yield ord(_ESCAPES[escape_match["named"]]), False
            elif escape_match["named"] in _PUNCTUATION:
                yield ord(escape_match["named"]), False
            else:
                raise self.error(f"unknown escape \\{escape_match['named']}", position)

    def _character_set(self, text: str, position: int) -> str:
        code_points = list(self._code_points(text, position))
        negated = bool(code_points) and code_points[0] == (ord("^"), True)
        del code_points[: int(negated)]
        if not code_points:
            if negated:
                return "(?s:.)"
            raise self.error("a set of characters is empty", position)
        ranges: list[str] = []
        index = 0
        while index < len(code_points):
            range_start = range_end = code_points[index][0]
            if index + 2 < len(code_points) and code_points[index + 1] == (ord("-"), True):
                range_end = code_points[index + 2][0]
                index += 2
            if range_end < range_start:
                raise self.error("a range of characters ends before it begins", position)
            ranges.append(rf"\u{{{range_start:x}}}-\u{{{range_end:x}}}")
            index += 1
        return f"[{'^' if negated else ''}{''.join(ranges)}]"


# ---- writing -------------------------------------------------------------------------------------


def literal(text: str) -> str:
    """Return a string literal of Lark, whose lexer needs control characters and DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class _Writer:
    def __init__(self, rules: dict[str, Expression]):
        self.rule_expressions = rules
        self.regular_rules = regular_rules(rules)
        self.rule_numbers = {rule: index for index, rule in enumerate(rules)}
        self.lark_lines: list[str] = []

    def to_lark(self) -> str:
        self.lark_lines.append(f"start: {self.rule_name('root')}")
        for rule, expression in self.rule_expressions.items():
            write = self.as_terminal if rule in self.regular_rules else self.as_rule
            self.lark_lines.append(f"{self.rule_name(rule)}: {write(expression)}")
        return "\n".join(self.lark_lines)

    def rule_name(self, rule: str) -> str:
        return f"{'T' if rule in self.regular_rules else 'r'}{self.rule_numbers[rule]}"

    def is_regular(self, expression: Expression) -> bool:
        return all(rule in self.regular_rules for rule in referenced_rules(expression))

    def as_terminal(self, expression: Expression) -> str:
        """Return an expression without recursion as the body of a terminal."""
        if isinstance(expression, LiteralText):
            return literal(expression.literal)
        if isinstance(expression, CharacterSet):
            return f"/{expression.pattern}/"
        if isinstance(expression, RuleReference):
            return self.rule_name(expression.rule_name)
        if isinstance(expression, Repetition):
            return lark_repetition(self.as_terminal(expression.repeated), expression)
        if isinstance(expression, Concatenation):
            return " ".join(map(self.as_terminal, expression.parts)) or '""'
        return f"({' | '.join(map(self.as_terminal, expression.alternatives))})"

    def as_rule(self, expression: Expression) -> str:
        """Return an expression as the body of a rule. Its regular parts become terminals."""
        if isinstance(expression, LiteralText | CharacterSet | RuleReference):
            return self.as_terminal(expression)
        if self.is_regular(expression):
            self.lark_lines.append(f"X{len(self.lark_lines)}: {self.as_terminal(expression)}")
            return f"X{len(self.lark_lines) - 1}"
        if isinstance(expression, Repetition):
            return lark_repetition(self.as_rule(expression.repeated), expression)
        if isinstance(expression, Concatenation):
            return " ".join(map(self.as_rule, self.merge_regular_neighbours(expression.parts)))
        return f"({' | '.join(map(self.as_rule, expression.alternatives))})"

    def merge_regular_neighbours(self, parts: tuple[Expression, ...]) -> list[Expression]:
        """Return the parts of a sequence with adjacent regular parts merged."""
        groups: list[list[Expression]] = []
        for part in parts:
            if groups and self.is_regular(part) and self.is_regular(groups[-1][-1]):
                groups[-1].append(part)
            else:
                groups.append([part])
        return [group[0] if len(group) == 1 else Concatenation(tuple(group)) for group in groups]


def lark_repetition(lark_part: str, repetition: Repetition) -> str:
    if repetition.maximum == 0:
        return '""'
    if (repetition.minimum, repetition.maximum) == (0, None):
        return f"({lark_part})*"
    maximum = "" if repetition.maximum is None else repetition.maximum
    return f"({lark_part}){{{repetition.minimum},{maximum}}}"


def regular_rules(rules: dict[str, Expression]) -> set[str]:
    """Return the rules that do not lead to recursion."""
    missing_rules = {
        rule_name: set(referenced_rules(expression)) for rule_name, expression in rules.items()
    }
    using_rules: dict[str, list[str]] = {}
    for rule_name, used_rules in missing_rules.items():
        for used_rule in used_rules:
            using_rules.setdefault(used_rule, []).append(rule_name)
    regular = {rule_name for rule_name, used_rules in missing_rules.items() if not used_rules}
    pending = list(regular)
    while pending:
        regular_rule = pending.pop()
        for using_rule in using_rules.get(regular_rule, ()):
            missing_rules[using_rule].discard(regular_rule)
            if not missing_rules[using_rule]:
                regular.add(using_rule)
                pending.append(using_rule)
    return regular
