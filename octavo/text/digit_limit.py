"""Limits the length of numbers in JSON output.

A grammar allows any number of digits, and a model may write digits without end. This module follows
a text byte by byte to know whether it is inside a number. If the grammar allows the number to end,
tokens that would give it too many digits are removed from the mask. A number that must continue
because of its schema continues.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_DIGITS = 20  # on each side of the point; an unsigned 64-bit integer has up to 20 digits
MAX_EXPONENT_DIGITS = 3
QUOTATION_MARK = ord('"')
BACKSLASH = ord("\\")
DECIMAL_POINT = ord(".")
SIGNS = b"+-"
EXPONENTS = b"eE"
BEFORE_VALUES = b":,["  # a number may follow these
SPACES = b" \t\r\n"
DIGITS = b"0123456789"


class DigitTokens:
    """The tokens of a vocabulary that begin with digits."""

    def __init__(self, tokens: Sequence[bytes], letter_id: int | None):
        """`letter_id` is the id of a token that cannot continue a number."""
        digit_counts = [
            (token_id, len(token) - len(token.lstrip(DIGITS)))
            for token_id, token in enumerate(tokens)
        ]
        self.letter_id = letter_id
        self._digit_counts = [
            (token_id, digit_count) for token_id, digit_count in digit_counts if digit_count
        ]
        self.longest_run = max((digit_count for _, digit_count in self._digit_counts), default=0)
        self._longer_masks: dict[int, int] = {}  # masks by number of digits

    def longer_than(self, digit_count: int) -> int:
        """Return the mask of the tokens that begin with more digits than `digit_count`."""
        if digit_count not in self._longer_masks:
            self._longer_masks[digit_count] = sum(
                1 << token_id
                for token_id, leading_digits in self._digit_counts
                if leading_digits > digit_count
            )
        return self._longer_masks[digit_count]


class DigitLimit:
    """Follows one text. Its state is "string", "value" (a value may begin), "number" or "other"."""

    __slots__ = ("_digit_count", "_escaped", "_in_exponent", "_state", "_tokens")

    def __init__(self, tokens: DigitTokens, state: str = "value"):
        self._tokens = tokens
        self._state = state
        self._escaped = False
        self._in_exponent = False
        self._digit_count = 0  # consecutive digits of the current number

    def copy(self) -> DigitLimit:
        duplicate = DigitLimit(self._tokens, self._state)
        duplicate._escaped = self._escaped
        duplicate._in_exponent = self._in_exponent
        duplicate._digit_count = self._digit_count
        return duplicate

    def push(self, data: bytes) -> None:
        for byte in data:
            if self._state == "string":
                self._in_string(byte)
            elif byte in DIGITS and self._state != "other":
                self._state = "number"
                self._digit_count += 1
            elif self._state == "number" and (byte == DECIMAL_POINT or byte in EXPONENTS):
                self._in_exponent = byte != DECIMAL_POINT
                self._digit_count = 0
            elif byte in SIGNS and self._state != "other":
                self._state = "number"
            elif byte not in SPACES or self._state == "number":
                self._begin_value(byte)

    def _in_string(self, byte: int) -> None:
        if self._escaped:
            self._escaped = False
        elif byte == BACKSLASH:
            self._escaped = True
        elif byte == QUOTATION_MARK:
            self._state = "other"

    def _begin_value(self, byte: int) -> None:
        self._digit_count = 0
        self._in_exponent = False
        if byte == QUOTATION_MARK:
            self._state = "string"
        elif byte in BEFORE_VALUES:
            self._state = "value"
        else:
            self._state = "other"

    def restrict(self, mask: bytes) -> bytes:
        """Return the mask without the tokens that would make the number too long.

        If no other token is allowed, the mask is returned unchanged.
        """
        if self._state != "number":
            return mask
        max_digits = MAX_EXPONENT_DIGITS if self._in_exponent else MAX_DIGITS
        remaining_digits = max_digits - self._digit_count
        if remaining_digits >= self._tokens.longest_run or self._allows_letter(mask):
            return mask
        too_long = self._tokens.longer_than(max(remaining_digits, 0))
        allowed = int.from_bytes(mask, "little") & ~too_long
        return allowed.to_bytes(len(mask), "little") if allowed else mask

    def _allows_letter(self, mask: bytes) -> bool:
        """Return whether a letter may follow. Then the text is not inside a number."""
        letter_id = self._tokens.letter_id
        return letter_id is not None and bool(mask[letter_id >> 3] >> (letter_id & 7) & 1)
