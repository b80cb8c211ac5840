"""Bounds the numbers of a JSON text: a grammar lets a number have any number of digits, and a model may write them for ever.

Follows a text byte by byte, as far as it takes to know whether it is within a number. Where the grammar lets the number end, tokens
that would give it too many digits are removed from the mask; a number that must go on, because its schema says so, goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_DIGITS = 20  # before the point, and behind it: an unsigned integer of 64 bits has up to 20
MAX_EXPONENT_DIGITS = 3
QUOTE = ord('"')
BACKSLASH = ord("\\")
POINT = ord(".")
SIGNS = b"+-"
EXPONENTS = b"eE"
BEFORE_VALUES = b":,["  # a number may follow these
SPACES = b" \t\r\n"
DIGITS = b"0123456789"


class DigitTokens:
    """The tokens of a vocabulary that begin with digits."""

    def __init__(self, tokens: Sequence[bytes], letter: int | None):
        """`letter`: a token that no number goes on with."""
        counts = [(id, len(token) - len(token.lstrip(DIGITS))) for id, token in enumerate(tokens)]
        self.letter = letter
        self._counts = [(id, count) for id, count in counts if count]
        self.longest = max((count for _, count in self._counts), default=0)
        self._longer: dict[int, int] = {}  # masks, made when they are asked for

    def longer_than(self, count: int) -> int:
        """The mask of the tokens that begin with more digits than `count`."""
        if count not in self._longer:
            self._longer[count] = sum(1 << id for id, digits in self._counts if digits > count)
        return self._longer[count]


class DigitLimit:
    """Follows one text. `state` is where it stands: in a string, where a value may begin, in a number, or elsewhere."""

    __slots__ = ("_digits", "_escaped", "_exponent", "_state", "_tokens")

    def __init__(self, tokens: DigitTokens, state: str = "value"):
        self._tokens = tokens
        self._state = state
        self._escaped = False
        self._exponent = False
        self._digits = 0  # in a row, of a number

    def copy(self) -> DigitLimit:
        other = DigitLimit(self._tokens, self._state)
        other._escaped = self._escaped
        other._exponent = self._exponent
        other._digits = self._digits
        return other

    def push(self, data: bytes) -> None:
        for byte in data:
            if self._state == "string":
                self._in_string(byte)
            elif byte in DIGITS and self._state != "other":
                self._state = "number"
                self._digits += 1
            elif self._state == "number" and (byte == POINT or byte in EXPONENTS):
                self._exponent = byte != POINT
                self._digits = 0
            elif byte in SIGNS and self._state != "other":
                self._state = "number"
            elif byte not in SPACES or self._state == "number":
                self._begin(byte)

    def _in_string(self, byte: int) -> None:
        if self._escaped:
            self._escaped = False
        elif byte == BACKSLASH:
            self._escaped = True
        elif byte == QUOTE:
            self._state = "other"

    def _begin(self, byte: int) -> None:
        self._digits = 0
        self._exponent = False
        self._state = "string" if byte == QUOTE else "value" if byte in BEFORE_VALUES else "other"

    def restrict(self, mask: bytes) -> bytes:
        """The mask without the tokens that would make the number too long, if the text can go on without them."""
        if self._state != "number":
            return mask
        left = (MAX_EXPONENT_DIGITS if self._exponent else MAX_DIGITS) - self._digits
        if left >= self._tokens.longest or self._allows_letter(mask):
            return mask
        allowed = int.from_bytes(mask, "little") & ~self._tokens.longer_than(max(left, 0))
        return allowed.to_bytes(len(mask), "little") if allowed else mask

    def _allows_letter(self, mask: bytes) -> bool:
        """A text that may go on with a letter is not within a number, whatever it looks like."""
        letter = self._tokens.letter
        return letter is not None and bool(mask[letter >> 3] >> (letter & 7) & 1)
