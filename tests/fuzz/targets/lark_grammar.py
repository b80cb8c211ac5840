"""Grammars in llguidance's dialect of Lark."""

from __future__ import annotations

from tests.fuzz.specs import MAX_BYTES, check

__all__ = ["MAX_BYTES", "SEEDS", "WORDS", "one_input"]

SEEDS = [
    b'start: "a" | "b"',
    b'start: item ("," item)*\nitem: /[a-z]+/ | "(" start ")"',
    b'start: NAME "=" NUMBER ";"?\nNAME: /[a-z_][a-z0-9_]*/\nNUMBER: /[0-9]+/\n%ignore / /',
    b"start: expr\nexpr: expr \"+\" term | term\nterm: /[0-9]{1,3}/ | \"(\" expr \")\" // a comment",
    b'start: "x"{2,5} (A | B)+ ["y"]\nA: "a".."f"\nB: /\\d/',
    b'start: "{" %json {"type": "object", "properties": {"a": {"type": "integer"}}} "}"',
    b'start: foo[stop="x", max_tokens=5]\nfoo: /.*/',
    b'start: "A"i REST\nREST: ("b" | "c")~2..3',
    b"start: a0\na0: a1 a1\na1: a2 a2\na2: a3 a3\na3: \"x\"",
    b'?start: _x\n_x: "\\u00e9" | "\\n" | "\\x41"',
]  # fmt: skip
WORDS = [
    b"start", b": ", b" | ", b"\n", b"(", b")", b"*", b"+", b"?", b"[", b"]", b"{1,3}", b"{1000}", b"~3", b"~1..9", b"\"a\"", b"'a'", b"\"\"", b"/a/",
    b"/[a-z]+/", b"/(a|b)*/", b"/.*/s", b"/\\d+/i", b"\"a\"..\"z\"", b"%ignore ", b"%import common.NUMBER", b"%declare X", b"%json {}", b"%json {\"type\": \"string\"}",
    b"%regex {}", b"%llguidance {}", b"NAME", b"name", b"_x", b"?x", b"!x", b"[stop=\"x\"]", b"[max_tokens=3]", b"[lazy]", b"[capture]", b"[suffix=\"y\"]",
    b"<|eos|>", b"<[1-5]>", b"@x", b"//", b"#", b"->", b".1", b"%extend", b"%override", b"&", b"~", b"-",
]  # fmt: skip


def one_input(data: bytes) -> object:
    return check(grammar=data.decode(errors="replace"))
