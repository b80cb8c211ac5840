"""Random changes to an input: to its bytes, and to its structure where it is JSON. The same seed
makes the same changes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

MAX_CHANGES = 6
NUMBERS = [0, -1, 1, 0.5, -0.0, 1e308, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30]
VALUES = [
    None, True, False, "", " ", "a", "\x00", "\ud800", "é", "\U0001f600", "x" * 300, [], {}, [[]],
    [None], [""], [0], {"": None}, {"a": {"a": {}}}, "<|eos|>", "\ufdd0", *NUMBERS,
]  # fmt: skip
BYTES = [
    b"\x00",
    b"\xff",
    b"\r\n",
    b"\n\n",
    b"\x80\x80",
    b"\xed\xa0\x80",
    b"(",
    b")",
    b"[",
    b"{",
    b'"',
    b"\\",
]


class Mutator:
    """`words` are pieces of text that have a meaning to the target."""

    def __init__(self, generator: random.Random, words: Sequence[bytes], max_bytes: int):
        self.generator = generator
        self.words = [*words, *BYTES]
        self.max_bytes = max_bytes

    def mutate(self, data: bytes, other: bytes) -> bytes:
        """A changed copy of `data`; some changes take a piece of `other`."""
        generator = self.generator
        if generator.random() < 0.6:
            data = self._mutate_json(data, other)
        if generator.random() < 0.6:
            for _ in range(generator.randint(1, MAX_CHANGES)):
                change = generator.choice(self._changes)
                data = change(self, data, other)
        return data[: self.max_bytes]

    # ---- bytes -----------------------------------------------------------------------------------

    def _range(self, data: bytes) -> tuple[int, int]:
        """A random range of `data`; most are short."""
        start = self.generator.randint(0, len(data))
        length = min(int(self.generator.expovariate(1 / 12)) + 1, len(data) - start)
        return start, start + length

    def _replace_byte(self, data: bytes, other: bytes) -> bytes:
        start, _ = self._range(data)
        return data[:start] + bytes([self.generator.randrange(256)]) + data[start + 1 :]

    def _flip_bit(self, data: bytes, other: bytes) -> bytes:
        if not data:
            return data
        changed = bytearray(data)
        changed[self.generator.randrange(len(data))] ^= 1 << self.generator.randrange(8)
        return bytes(changed)

    def _delete(self, data: bytes, other: bytes) -> bytes:
        start, end = self._range(data)
        return data[:start] + data[end:]

    def _truncate(self, data: bytes, other: bytes) -> bytes:
        return data[: self.generator.randint(0, len(data))]

    def _repeat(self, data: bytes, other: bytes) -> bytes:
        """Repetition finds what grows faster than its input."""
        start, end = self._range(data)
        count = self.generator.choice([2, 3, 10, 100, 1000])
        return (data[:start] + data[start:end] * count + data[end:])[: self.max_bytes]

    def _insert_word(self, data: bytes, other: bytes) -> bytes:
        start, end = self._range(data)
        if self.generator.random() < 0.5:
            end = start
        return data[:start] + self.generator.choice(self.words) + data[end:]

    def _splice(self, data: bytes, other: bytes) -> bytes:
        start, end = self._range(data)
        first, last = self._range(other)
        return data[:start] + other[first:last] + data[end:]

    def _join_halves(self, data: bytes, other: bytes) -> bytes:
        first = self.generator.randint(0, len(data))
        second = self.generator.randint(0, len(other))
        return data[:first] + other[second:]

    _changes: tuple[Callable[[Mutator, bytes, bytes], bytes], ...] = (
        _replace_byte,
        _flip_bit,
        _delete,
        _truncate,
        _repeat,
        _insert_word,
        _insert_word,
        _splice,
        _join_halves,
    )

    # ---- JSON ------------------------------------------------------------------------------------

    def _mutate_json(self, data: bytes, other: bytes) -> bytes:
        """Change values inside a JSON text. Returns other data as it is."""
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return data
        try:
            donor = json.loads(other)
        except (ValueError, RecursionError):
            donor = None
        for _ in range(self.generator.randint(1, 3)):
            value = self._change_inside(value, donor)
        try:
            text = json.dumps(value, ensure_ascii=self.generator.random() < 0.5)
        except RecursionError:
            return data
        return text.encode(errors="surrogatepass")

    def _change_inside(self, value: Any, donor: Any) -> Any:
        """Walk down to a random place and change what is there."""
        if isinstance(value, (dict, list)) and value and self.generator.random() < 0.75:
            keys = list(value) if isinstance(value, dict) else range(len(value))
            key = self.generator.choice(keys)
            value[key] = self._change_inside(value[key], donor)
            return value
        return self._change_value(value, donor)

    def _change_value(self, value: Any, donor: Any) -> Any:
        generator = self.generator
        kind = generator.randrange(8)
        if kind == 0:
            return self._value()
        if kind == 1 and donor is not None:
            return self._pick_inside(donor)
        if kind == 2:
            for _ in range(generator.choice([1, 2, 5, 60])):
                value = [value] if generator.random() < 0.5 else {self._name(): value}
            return value
        if kind == 3 and isinstance(value, str):
            word = generator.choice(self.words).decode(errors="replace")
            where = generator.randint(0, len(value))
            return value[:where] + word * generator.choice([1, 1, 2, 50]) + value[where:]
        if isinstance(value, list):
            return self._change_list(value, donor)
        if isinstance(value, dict):
            return self._change_dict(value, donor)
        return self._value()

    def _change_list(self, value: list[Any], donor: Any) -> list[Any]:
        generator = self.generator
        if value and generator.random() < 0.3:
            return value * generator.choice([2, 10, 100])
        if value and generator.random() < 0.3:
            del value[generator.randrange(len(value))]
            return value
        return [*value, self._pick_inside(donor) if donor is not None else self._value()]

    def _change_dict(self, value: dict[str, Any], donor: Any) -> dict[str, Any]:
        generator = self.generator
        if value and generator.random() < 0.3:
            del value[generator.choice(list(value))]
            return value
        inner = self._pick_inside(donor) if donor is not None else self._value()
        return {**value, self._name(): inner}

    def _name(self) -> str:
        return self.generator.choice(self.words).decode(errors="replace").strip('":, ')

    def _pick_inside(self, value: Any) -> Any:
        while isinstance(value, (dict, list)) and value and self.generator.random() < 0.7:
            value = self.generator.choice(
                list(value.values()) if isinstance(value, dict) else value
            )
        return copy.deepcopy(value)

    def _value(self) -> Any:
        return copy.deepcopy(self.generator.choice(VALUES))
