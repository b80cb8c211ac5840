"""Grammars in EBNF, as llama.cpp and xgrammar take them."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

pytest.importorskip("llguidance")

from octavo.errors import InvalidRequest
from octavo.params import StructuredOutputs
from octavo.text import Tokenizer
from octavo.text.ebnf import ebnf_to_lark, is_ebnf
from octavo.text.guide import Guides
from octavo.text.spec_errors import SpecError
from tests.text.guided import accepts, make, walk

SQL = """
    root ::= select_statement
    select_statement ::= "SELECT " column " from " table " where " condition
    column ::= "col_1 " | "col_2 "
    table ::= "table_1 " | "table_2 "
    condition ::= column "= " number
    number ::= "1 " | "2 "
"""
JSON = r"""
# as llama.cpp has it
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

ws ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = 'root ::= root [-+*/] term | term\nterm ::= [0-9]+ | "(" root ")"'


@pytest.fixture(scope="module")
def guides(embedded: Tokenizer) -> Guides:
    return make(embedded)


CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "rules and alternatives": (SQL, ["SELECT col_1  from table_2  where col_2 = 1 "], ["SELECT col_1 ", "select"]),
    "a literal": (r'root ::= "a\"\\\n\t\x41\u00e9\U0001F44D/"', ['a"\\\n\tAé👍/'], ["a"]),
    "an empty alternative": ('root ::= "a" ("b" | )', ["a", "ab"], ["", "b"]),
    "a set": (r"root ::= [a-c\-\]x^] [^a-z\n] [+-]", ["a1+", "-A-", "]]-", "^é+"], ["d1+", "aa+", "a\n+", "a1*"]),
    "any character": ('root ::= . "x"', ["ax", "\nx", "éx"], ["x", "abx"]),
    "repetition": ('root ::= "a"? "b"* "c"+ "d"{2} "e"{1,} "f"{0,2} "g"{,1} "h"{0}',
                   ["cdde", "abbccddeeffg"], ["dde", "cde", "cddd", "cddefff", "cddeh", "cddegg"]),
    "groups": ('root ::= ("a" ("b" | "c" "d"))+ | "x"', ["ab", "acdab", "x"], ["a", "ac", "abx"]),
    "comments and lines": ('root ::= # here\n  "a" |\n  # and here\n "#b"\n', ["a", "#b"], ["# here"]),
    "rules in any order, without spaces": ('x-1::="q"\nroot::=x-1 y_2\ny_2::=[0-9]', ["q7"], ["q"]),
    "left recursion": (ARITHMETIC, ["1", "12+3*(4-5)", "((7))"], ["", "+1", "(1", "1+"]),
    "right recursion": ('root ::= "a" root "b" | "c"', ["c", "acb", "aacbb"], ["ac", "acbb"]),
    "JSON": (JSON, ['{"a": [1, -2.5e3, "x\\n\\u00e9", {}], "b": null}', "{}"], ["[]", '{"a"}', "{,}"]),
}  # fmt: skip


@pytest.mark.parametrize(("grammar", "yes", "no"), CASES.values(), ids=CASES.keys())
def test_a_grammar_means_what_it_means_elsewhere(
    guides: Guides, embedded: Tokenizer, grammar: str, yes: list[str], no: list[str]
) -> None:
    assert is_ebnf(grammar)
    for text in yes:
        assert accepts(guides, embedded, text, grammar=grammar), text
    for text in no:
        assert not accepts(guides, embedded, text, grammar=grammar), text


def test_what_may_be_written_is_what_the_grammar_says(guides: Guides, embedded: Tokenizer) -> None:
    chance = random.Random(1)
    guide = guides.compile(StructuredOutputs(grammar=SQL))
    pattern = r"SELECT col_[12]  from table_[12]  where col_[12] = [12] "
    assert all(re.fullmatch(pattern, walk(guide, embedded, chance) or "") for _ in range(5))
    guide = guides.compile(StructuredOutputs(grammar=JSON))
    texts = [walk(guide, embedded, chance, most=60) for _ in range(20)]
    ended = [text for text in texts if text is not None]
    assert len(ended) > 3 and all(isinstance(json.loads(text), dict) for text in ended)


BAD: dict[str, tuple[str, str]] = {
    "no root": ('start ::= "a"', "no rule named root"),
    "undefined": ('root ::= "a" other', "root uses other, which is not defined"),
    "twice": ('root ::= "a"\nroot ::= "b"', "root is defined twice, at 'root ::= \"b\"', line 2 column 1"),
    "no end of a group": ('root ::= ("a"', "expected \\), at the end"),
    "too many ends": ('root ::= "a")', "expected a rule"),
    "no end of a literal": ('root ::= "a', "invalid syntax, at '\"a', line 1 column 10"),
    "an empty set": ("root ::= []", "is empty"),
    "a range the wrong way": ("root ::= [z-a]", "ends before it begins"),
    "a repetition the wrong way": ('root ::= "a"{3,2}', "ends before it begins"),
    "a repetition without numbers": ('root ::= "a"{,}', "{m}, {m,} or {m,n}"),
    "an escape": (r'root ::= "\q"', r"unknown escape \\q"),
    "no character": (r'root ::= "\uD800"', "U\\+D800 is not a character"),
    "deep": ("root ::= " + "(" * 30 + '"a"' + ")" * 30, "nested more than 24 levels"),
    "a lookahead": ('root ::= "a" (= "b")', "invalid syntax, at '= \"b\"\\)'"),
}  # fmt: skip


@pytest.mark.parametrize(("grammar", "says"), BAD.values(), ids=BAD.keys())
def test_what_is_wrong_is_said_with_the_place(grammar: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        ebnf_to_lark(grammar)


def test_left_recursion_without_a_way_out_is_refused(guides: Guides) -> None:
    with pytest.raises(InvalidRequest, match="nothing can match") as caught:
        guides.compile(StructuredOutputs(grammar='root ::= root "a"'))
    assert caught.value.code == "invalid_structured_output"


@pytest.mark.parametrize(
    "grammar", ['start: "root ::= x"', "start: A\nA: /::=/", '// a ::= b\nstart: "x"']
)
def test_lark_is_not_taken_for_ebnf(guides: Guides, grammar: Any) -> None:
    assert not is_ebnf(grammar)
    guides.compile(StructuredOutputs(grammar=grammar))


def test_long_grammars_are_translated_quickly_and_without_recursion() -> None:
    rules = [f'r{i} ::= "a" r{i + 1} | "b"' for i in range(8000)]
    lark = ebnf_to_lark("\n".join(["root ::= r0", *rules, 'r8000 ::= "z"']))
    assert lark.count("\n") == 8002
