"""Grammars in llguidance's dialect of Lark, made ready for it: their depth is checked, and the schemas in them are prepared.

Grammars in EBNF are translated first (ebnf.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from octavo.text.chains import Definition, chain_depths
from octavo.text.ebnf import ebnf_to_lark, is_ebnf
from octavo.text.schema import MAX_DEPTH
from octavo.text.spec_errors import SpecError

# What hides names from a reader: strings, regexes and comments; and where a schema begins.
_TOKEN = re.compile(
    r"""(?P<schema>%json\s*(?=\{))
    | (?P<hidden>"(?:[^"\\\n]|\\.)*" | //[^\n]* | \#[^\n]* | /(?:[^/\\\n]|\\.)+/[a-z]*)""",
    re.VERBOSE,
)
_RULE = re.compile(r"^[ \t]*[!?]?([A-Za-z_][\w-]*)[^\n:|]*:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_BRACKET = re.compile(r"[()\[\]]")


def prepare_grammar(grammar: str, prepare_schema: Callable[[str], str]) -> str:
    """The grammar as it is compiled. Raises SpecError."""
    if is_ebnf(grammar):
        grammar = ebnf_to_lark(grammar)
    parts: list[str] = []  # of the grammar
    bare: list[str] = []  # the same without what hides names
    at = 0
    while (found := _TOKEN.search(grammar, at)) is not None:
        parts.append(grammar[at : found.end()])
        bare.append(grammar[at : found.start()])
        at = found.end()
        if found["schema"] is not None:
            at = _schema_end(grammar, at)
            parts.append(prepare_schema(grammar[found.end() : at]))
    parts.append(grammar[at:])
    bare.append(grammar[at:])
    check_rules(" ".join(bare))
    return "".join(parts)


def _schema_end(grammar: str, start: int) -> int:
    try:
        return json.JSONDecoder().raw_decode(grammar, start)[1]
    except RecursionError:
        raise SpecError("a schema in it is nested too deeply") from None
    except ValueError as error:
        raise SpecError(f"a schema in it is not JSON: {error}") from None


def check_rules(grammar: str) -> None:
    """Raise SpecError where rules name each other in too long a chain."""
    starts = list(_RULE.finditer(grammar))
    ends = [found.start() for found in starts[1:]] + [len(grammar)]
    graph: dict[str, Definition] = {}
    for found, end in zip(starts, ends, strict=True):
        body = grammar[found.end() : end]
        graph[found[1]] = Definition(1 + group_depth(body), set(_NAME.findall(body)))
    depth = max(chain_depths(graph).values(), default=0)
    if depth > MAX_DEPTH:
        raise SpecError(
            f"its rules name each other in a chain that is up to {depth} levels deep, at most {MAX_DEPTH} are allowed: "
            "use fewer rules"
        )


def group_depth(body: str) -> int:
    """How many groups stand within each other."""
    depth = deepest = 0
    for bracket in _BRACKET.findall(body):
        depth += 1 if bracket in "([" else -1
        deepest = max(deepest, depth)
    return deepest
