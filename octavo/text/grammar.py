"""Prepares grammars for llguidance: checks their depth and prepares the schemas in them.

The grammars are in llguidance's dialect of Lark. A grammar in EBNF is translated first (ebnf.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from octavo.text.definition_depth import Definition, chain_depths
from octavo.text.ebnf import ebnf_to_lark, is_ebnf
from octavo.text.schema import MAX_DEPTH
from octavo.text.spec_errors import SpecError

# Strings, regexes and comments, which may contain text that looks like a name, and schemas.
_TOKEN = re.compile(
    r"""(?P<schema>%json\s*(?=\{))
    | (?P<hidden>"(?:[^"\\\n]|\\.)*" | //[^\n]* | \#[^\n]* | /(?:[^/\\\n]|\\.)+/[a-z]*)""",
    re.VERBOSE,
)
_RULE = re.compile(r"^[ \t]*[!?]?([A-Za-z_][\w-]*)[^\n:|]*:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_BRACKET = re.compile(r"[()\[\]]")


def prepare_grammar(grammar: str, prepare_schema: Callable[[str], str]) -> str:
    """Return the grammar in the form that llguidance compiles. Raises SpecError."""
    if is_ebnf(grammar):
        grammar = ebnf_to_lark(grammar)
    prepared_parts: list[str] = []
    visible_parts: list[str] = []  # the grammar without strings, regexes, comments and schemas
    position = 0
    while (token_match := _TOKEN.search(grammar, position)) is not None:
        prepared_parts.append(grammar[position : token_match.end()])
        visible_parts.append(grammar[position : token_match.start()])
        position = token_match.end()
        if token_match["schema"] is not None:
            position = _schema_end(grammar, position)
            prepared_parts.append(prepare_schema(grammar[token_match.end() : position]))
    prepared_parts.append(grammar[position:])
    visible_parts.append(grammar[position:])
    check_rules(" ".join(visible_parts))
    return "".join(prepared_parts)


def _schema_end(grammar: str, start: int) -> int:
    try:
        return json.JSONDecoder().raw_decode(grammar, start)[1]
    except RecursionError:
        raise SpecError("a schema in it is nested too deeply") from None
    except ValueError as error:
        raise SpecError(f"a schema in it is not JSON: {error}") from None


def check_rules(grammar: str) -> None:
    """Raise SpecError if there is no rule, or if rules name each other in too long a chain."""
    rule_matches = list(_RULE.finditer(grammar))
    if not rule_matches:
        raise SpecError("it has no rule: it must begin with a rule such as start: /[a-z]+/")
    rule_ends = [rule_match.start() for rule_match in rule_matches[1:]] + [len(grammar)]
    definitions: dict[str, Definition] = {}
    for rule_match, rule_end in zip(rule_matches, rule_ends, strict=True):
        rule_body = grammar[rule_match.end() : rule_end]
        definitions[rule_match[1]] = Definition(
            1 + group_depth(rule_body), set(_NAME.findall(rule_body))
        )
    depth = max(chain_depths(definitions).values(), default=0)
    if depth > MAX_DEPTH:
        raise SpecError(
            f"its rules name each other in a chain that is up to {depth} levels deep, at most "
            f"{MAX_DEPTH} are allowed: use fewer rules"
        )


def group_depth(rule_body: str) -> int:
    """Return the nesting depth of the groups in a rule."""
    depth = deepest_group = 0
    for bracket in _BRACKET.findall(rule_body):
        depth += 1 if bracket in "([" else -1
        deepest_group = max(deepest_group, depth)
    return deepest_group
