"""Writes float32 values as bytes of another number format, in a given byte order."""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FP8_MANTISSA_BITS = {"fp8_e4m3": 3, "fp8_e5m2": 2}
FP8_BIAS = {"fp8_e4m3": 7, "fp8_e5m2": 15}
FP8_FINITE = {"fp8_e4m3": 127, "fp8_e5m2": 124}  # The codes of finite values without a sign.


def binary_values(
    values: NDArray[np.float32], dtype: str, order: Literal["little", "big"]
) -> bytes:
    """Return the bytes of values."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    codes: NDArray[Any]
    if dtype == "float32":
        codes = values.view(np.uint32)
    elif dtype == "float16":
        codes = values.astype(np.float16).view(np.uint16)
    elif dtype == "bfloat16":
        codes = bfloat16_codes(values)
    else:
        codes = fp8_codes(values, dtype)
    return codes.astype(codes.dtype.newbyteorder(order)).tobytes()


def bfloat16_codes(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the upper 16 bits of a float32, to even if two values are equally near."""
    bits = values.view(np.uint32)
    is_odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = bits + np.uint32(0x7FFF) + is_odd
    return (rounded >> np.uint32(16)).astype(np.uint16)


def fp8_codes(values: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    """Round to the nearest finite value, to even if two values are equally near."""
    finite = fp8_values(dtype)
    middles = (finite[1:] + finite[:-1]) / 2
    sizes = np.abs(values)
    codes = np.searchsorted(middles, sizes)  # A value in the middle gets the smaller code.
    nearest_middle = middles[np.minimum(codes, len(middles) - 1)]
    codes += (sizes == nearest_middle) & (codes % 2 == 1)
    signs = np.signbit(values).astype(np.uint8) << 7
    return np.asarray(codes.astype(np.uint8) | signs, dtype=np.uint8)


@functools.cache
def fp8_values(dtype: str) -> NDArray[np.float32]:
    """Return the finite values of a format that are at least 0, by their codes."""
    bits = FP8_MANTISSA_BITS[dtype]
    codes = np.arange(FP8_FINITE[dtype])
    exponents = codes >> bits
    fractions = (codes & ((1 << bits) - 1)) / (1 << bits)
    is_normal = exponents > 0
    powers = np.where(is_normal, exponents, 1) - FP8_BIAS[dtype]
    return np.asarray(np.ldexp(is_normal + fractions, powers), dtype=np.float32)
