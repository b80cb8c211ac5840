"""Grammars in EBNF, as llama.cpp and xgrammar write them."""

from __future__ import annotations

from tests.fuzz.specs import MAX_BYTES, check

__all__ = ["MAX_BYTES", "SEEDS", "WORDS", "one_input"]

SEEDS = [
    b'root ::= "a" | "b"',
    b'root ::= "[" item ("," item)* "]" # a comment\nitem ::= [a-z]+ | root',
    b"root ::= [^\"\\\\]* . [\\x00-\\x1f] \"\\u00e9\" \"\\n\"",
    b'root ::= digit{2,5} digit{3} digit{1,}\ndigit ::= [0-9]',
    b'root ::= (("a")? ("b")* ("c")+)? root2\nroot2 ::= ""',
    b'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"',
    b'root ::= x-y.z\nx-y.z ::= "\\"" [\\]a-]',
]  # fmt: skip
WORDS = [
    b"root", b" ::= ", b" | ", b"\n", b"(", b")", b"*", b"+", b"?", b"[a-z]", b"[^a]", b"[]", b"{1,3}", b"{1000}", b"{,}", b"{2,}", b"\"a\"", b"\"\"",
    b".", b"\\x41", b"\\u0041", b"\\U0001f600", b"\\u{1f600}", b"\\ud800", b"\\n", b"\\\"", b"\\]", b"#", b"-", b"item", b"term", b"expr", b"x ::= ", b"[\\]]",
]  # fmt: skip


def one_input(data: bytes) -> object:
    grammar = data.decode(errors="replace")
    return check(grammar=grammar) if "::=" in grammar else None
