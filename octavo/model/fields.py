"""Reads a config.json field by field. Errors name the field. The fields may be those of any
architecture."""

from __future__ import annotations

from typing import Any

from octavo.config import DTYPE_BYTES
from octavo.errors import ModelError

MAX_INTEGER = 2**31 - 1
# Bounds of real numbers. Every product and quotient of two of them is a finite float32 or float64.
SMALLEST_REAL = 1e-18
LARGEST_REAL = 1e18
# The kernels that sample with top-k and top-p keep a token id in 20 bits.
MAX_VOCABULARY = 2**20
MAX_LAYERS = 1_000  # all layers are built before the tensors of the checkpoint are compared


class Fields:
    """The content of a config.json. Nulls count as absent. Fields without default are required."""

    def __init__(self, hf_config: dict[str, Any], defaults: dict[str, Any] | None = None):
        self.nulls = {name for name, value in hf_config.items() if value is None}
        self.values = {
            **(defaults or {}),
            **{name: value for name, value in hf_config.items() if value is not None},
        }

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def positive_int(
        self, name: str, default: int | None = None, maximum: int = MAX_INTEGER
    ) -> int:
        value: int = self._number(name, default, int, "a positive integer")
        if value > maximum:
            raise ModelError(
                f"config.json: {name} must be at most {maximum}, got {shortened(value)}"
            )
        return value

    def natural_int(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if type(value) is not int or value < 0:
            raise ModelError(
                f"config.json: {name} must be a whole number from 0 on, got {shortened(value)}"
            )
        return value

    def positive_float(self, name: str, default: float | None = None) -> float:
        value = self._number(name, default, (int, float), "a positive number")
        if not SMALLEST_REAL <= value <= LARGEST_REAL:
            raise ModelError(
                f"config.json: {name} must be a number from {SMALLEST_REAL:g} to {LARGEST_REAL:g}, "
                f"got {shortened(value)}"
            )
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {name} must be true or false, got {shortened(value)}")
        return value

    def choice(self, name: str, allowed: dict[str, str], default: str) -> str:
        """Return the entry of `allowed` for the field's value."""
        value = self.values.get(name, default)
        if not isinstance(value, str) or value not in allowed:
            raise ModelError(
                f"config.json: {name} is {value!r}, but only {', '.join(sorted(allowed))} "
                "are supported"
            )
        return allowed[value]

    def refuse(self, name: str, reason: str, neutral: tuple[Any, ...] = ()) -> None:
        """Raise a ModelError unless the field is absent or has a neutral value.

        Other values would change the result in a way that is not implemented.
        """
        if name in self.values and self.values[name] not in neutral:
            raise ModelError(
                f"config.json: {name} = {self.values[name]!r} is not supported: {reason}"
            )

    def json_object(self, name: str) -> dict[str, Any]:
        """Return a JSON object, which is empty if the field is absent."""
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
        """Return the ids of a field that holds one id, a list of ids, or nothing."""
        value = self.values.get(name, [])
        token_ids = value if isinstance(value, list) else [value]
        if any(
            type(token_id) is not int or not 0 <= token_id <= MAX_INTEGER for token_id in token_ids
        ):
            raise ModelError(
                f"config.json: {name} must be a token id or a list of them, got {shortened(value)}"
            )
        return tuple(token_ids)

    def _number(self, name: str, default: float | None, number_types: Any, requirement: str) -> Any:
        value = self.values.get(name, default)
        if value is None:
            raise ModelError(f"config.json lacks {name}: it must be {requirement}")
        if (
            not isinstance(value, number_types)
            or isinstance(value, bool)
            or not 0 < value < float("inf")
        ):
            raise ModelError(f"config.json: {name} must be {requirement}, got {shortened(value)}")
        return value


def shortened(value: Any) -> str:
    """Shorten a value for an error message. A number may have thousands of digits."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
