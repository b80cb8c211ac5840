"""Reads a config.json field by field, with errors that name the field. It knows no architecture and no torch."""

from __future__ import annotations

from typing import Any

from octavo.config import DTYPE_BYTES
from octavo.errors import ModelError

LARGEST = 2**31 - 1  # of whole numbers
# Bounds of real numbers. Every product and quotient of two of them is a finite float32 or float64.
SMALLEST_REAL = 1e-18
LARGEST_REAL = 1e18
MAX_LAYERS = 1_000  # a model is built layer by layer before its tensors are looked for


class Fields:
    """A config.json; null counts as absent. A field without a default is required."""

    def __init__(self, hf: dict[str, Any], defaults: dict[str, Any] | None = None):
        self.nulls = {name for name, value in hf.items() if value is None}
        self.values = {
            **(defaults or {}),
            **{name: value for name, value in hf.items() if value is not None},
        }

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def whole(self, name: str, default: int | None = None, most: int = LARGEST) -> int:
        value: int = self._number(name, default, int, "a positive integer")
        if value > most:
            raise ModelError(f"config.json: {name} must be at most {most}, got {shortened(value)}")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if type(value) is not int or value < 0:
            raise ModelError(
                f"config.json: {name} must be a whole number from 0 on, got {shortened(value)}"
            )
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self._number(name, default, (int, float), "a positive number")
        if not SMALLEST_REAL <= value <= LARGEST_REAL:
            raise ModelError(
                f"config.json: {name} must be a number from {SMALLEST_REAL:g} to {LARGEST_REAL:g}, "
                f"got {shortened(value)}"
            )
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {name} must be true or false, got {shortened(value)}")
        return value

    def choice(self, name: str, allowed: dict[str, str], default: str) -> str:
        """What `allowed` gives for the field's value."""
        value = self.values.get(name, default)
        if not isinstance(value, str) or value not in allowed:
            raise ModelError(
                f"config.json: {name} is {value!r}, but only {', '.join(sorted(allowed))} are supported"
            )
        return allowed[value]

    def refuse(self, name: str, why: str, neutral: tuple[Any, ...] = ()) -> None:
        """Raise a ModelError if the field has a value that is not neutral: one that would change the result in a way that
        is not implemented."""
        if name in self.values and self.values[name] not in neutral:
            raise ModelError(f"config.json: {name} = {self.values[name]!r} is not supported: {why}")

    def table(self, name: str) -> dict[str, Any]:
        """A JSON object; empty where the field is absent."""
        value = self.values.get(name, {})
        if not isinstance(value, dict):
            raise ModelError(f"config.json: {name} must be a JSON object, got {shortened(value)}")
        return value

    def dtype(self) -> str:
        value = self.values.get("dtype", self.values.get("torch_dtype", "float32"))
        if not isinstance(value, str) or value not in DTYPE_BYTES:
            raise ModelError(
                f"config.json: dtype is {value!r}, but only {', '.join(DTYPE_BYTES)} are supported"
            )
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, a list of ids, or none."""
        value = self.values.get(name, [])
        ids = value if isinstance(value, list) else [value]
        if any(type(i) is not int or not 0 <= i <= LARGEST for i in ids):
            raise ModelError(
                f"config.json: {name} must be a token id or a list of them, got {shortened(value)}"
            )
        return tuple(ids)

    def _number(self, name: str, default: float | None, kind: Any, what: str) -> Any:
        value = self.values.get(name, default)
        if value is None:
            raise ModelError(f"config.json lacks {name}: it must be {what}")
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise ModelError(f"config.json: {name} must be {what}, got {shortened(value)}")
        return value


def shortened(value: Any) -> str:
    """A value of a config.json for an error message. A number may have thousands of digits."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
