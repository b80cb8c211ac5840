"""Regular expressions for structured output."""

from __future__ import annotations

from tests.fuzz.specs import MAX_BYTES, check

__all__ = ["MAX_BYTES", "SEEDS", "WORDS", "one_input"]

SEEDS = [
    b"a+", b"[a-z0-9_]{1,20}", b"(a|b|cd)*e?", rb"\d{3}-\d{4}", rb"^\w+\s*=\s*[^;]+;$", rb"(?:ab){2,}|(?i:xyz)", rb"\p{L}+\x41\u0042",
    rb"(?P<name>a)(?<other>b)", rb"[\[\]\\^-]", b"((((a))))", b".*a.{30}", rb"(?s:.)\n", b"a{1000}", b"(a{30}){30}", rb"[[:alpha:]&&[^aeiou]]",
]  # fmt: skip
WORDS = [
    b"a", b".", b"*", b"+", b"?", b"|", b"(", b")", b"(?:", b"(?i)", b"(?=", b"(?!", b"(?<=", b"(?P<n>", b"(?P=n)", b"\\1", b"[", b"]", b"[^", b"-", b"&&",
    b"{2}", b"{2,}", b"{2,5}", b"{1000}", b"{99999}", b"{,}", b"\\d", b"\\w", b"\\s", b"\\D", b"\\b", b"\\A", b"\\z", b"\\p{L}", b"\\x{10ffff}", b"\\u{110000}", b"^",
    b"$", b"\\", b"\\/", b"/", b"\\Q", b"[[:alpha:]]", b"(?x)", b"#", b"\xc3\xa9", b"~", b"&",
]  # fmt: skip


def one_input(data: bytes) -> object:
    return check(regex=data.decode(errors="replace"))
