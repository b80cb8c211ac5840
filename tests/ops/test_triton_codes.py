"""The PTX that converts the codes of weights, run by a small interpreter of PTX for every code."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from octavo.ops.triton.quant import weight_codes

SHAPES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def as_bits(value: Tensor) -> int:
    """Return the bits of a few numbers as one integer, with the first number in the lowest bits."""
    return int.from_bytes(bytes(value.contiguous().view(torch.uint8).tolist()), "little")


def as_numbers(bits: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(list((bits & 0xFFFFFFFF).to_bytes(4, "little")), dtype=torch.uint8).view(
        dtype
    )


def permute(a: int, b: int, selector: int) -> int:
    source = (a & 0xFFFFFFFF).to_bytes(4, "little") + (b & 0xFFFFFFFF).to_bytes(4, "little")
    return int.from_bytes(bytes(source[selector >> 4 * i & 15] for i in range(4)), "little")


def arithmetic(name: str, dtype: torch.dtype) -> Callable[..., int]:
    function = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}[name]
    return lambda a, b: as_bits(function(as_numbers(a, dtype), as_numbers(b, dtype)))


def e4m3(bits: int) -> int:
    """Convert two e4m3 numbers to two float16."""
    return as_bits(as_numbers(bits & 0xFFFF, torch.float8_e4m3fn)[:2].half())


OPERATIONS: dict[str, Callable[..., int]] = {
    "shl.b32": lambda a, n: a << n & 0xFFFFFFFF,
    "shr.b32": lambda a, n: a >> n,
    "shr.u32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "mov.b32": lambda a: a,
    "prmt.b32": permute,
    "cvt.rn.f16x2.e4m3x2": e4m3,
    "cvt.f32.f16": lambda a: as_bits(as_numbers(a, torch.float16)[:1].float()),
    "add.f32": arithmetic("add", torch.float32),
    **{
        f"{op}.rn.{name}": arithmetic(op, dtype)
        for op in ("sub", "mul")
        for name, dtype in SHAPES.items()
    },
}


def lop3(a: int, b: int, c: int, table: int) -> int:
    assert table == 0xEA
    return a & b | c


def run(text: str, outputs: int, value: int) -> list[int]:
    """Return the bits of the outputs. Registers $0, $1 ... are outputs, and the next one is the input."""
    registers: dict[str, int] = {f"${outputs}": value}

    def read(operand: str) -> int:
        if operand.startswith("0f"):
            return int(operand[2:], 16)
        return int(operand, 0) if operand[0].isdigit() else registers[operand]

    for line in re.split(r";", text.strip("{} \n\t")):
        words = line.replace("\n", " ").split(None, 1)
        if not words or words[0] == ".reg":
            continue
        operands = re.findall(r"\{[^}]*\}|[\w$]+", words[1])
        target, *sources = operands
        if target.startswith("{"):  # A register is divided into its halves.
            low, high = re.findall(r"\w+", target)
            registers[low], registers[high] = read(sources[0]) & 0xFFFF, read(sources[0]) >> 16
            continue
        operation = lop3 if words[0] == "lop3.b32" else OPERATIONS[words[0]]
        registers[target] = operation(*map(read, sources))
    return [registers[f"${i}"] for i in range(outputs)]


def is_written_early(text: str, outputs: int) -> bool:
    """Whether an output is written before the input is read for the last time."""
    lines = [line.strip() for line in re.split(r"[;\n]", text) if "$" in line]
    last = max(i for i, line in enumerate(lines) if f"${outputs}" in line.split(",", 1)[1])
    return any(re.match(r"\S+ \$\d", line) for line in lines[:last])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def of_e4m3(byte: int) -> float:
    return float(torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize(
    ("text", "dtype"),
    [(weight_codes.NIBBLES, torch.bfloat16), (weight_codes.NIBBLES_F16, torch.float16)],
)
def test_nibbles(text: weight_codes.tl.constexpr, dtype: torch.dtype) -> None:
    for code in range(16):
        words = code * 0x1111 | (15 - code) * 0x11110000
        for out in run(text.value, 4, words):
            assert as_numbers(out, dtype).tolist() == [code - 8, 7 - code]
    parts = run(text.value, 4, 0x87654321)
    assert [as_numbers(p, dtype).tolist() for p in parts] == [[i - 8, i - 4] for i in range(1, 5)]


@pytest.mark.parametrize(
    ("text", "dtype", "value_of"),
    [
        (weight_codes.BYTES, torch.bfloat16, signed),
        (weight_codes.BYTES_F16, torch.float16, signed),
        (weight_codes.E4M3, torch.bfloat16, of_e4m3),
        (weight_codes.E4M3_F16, torch.float16, of_e4m3),
    ],
)
def test_bytes(
    text: weight_codes.tl.constexpr, dtype: torch.dtype, value_of: Callable[[int], float]
) -> None:
    for byte in range(256):
        if byte & 127 == 127 and value_of is of_e4m3:  # NaN
            continue
        first, second = run(text.value, 2, byte | 1 << 8 | 2 << 16 | byte << 24)
        assert as_numbers(first, dtype).tolist() == [value_of(byte), value_of(2)]
        assert as_numbers(second, dtype).tolist() == [value_of(1), value_of(byte)]


def test_nibbles_as_float32() -> None:
    parts = run(weight_codes.NIBBLES_FLOATS.value, 8, 0xFEDC3210)
    assert [float(as_numbers(p, torch.float32)) for p in parts] == [
        1 + q / 16 for q in (0, 12, 1, 13, 2, 14, 3, 15)
    ]


@pytest.mark.parametrize(
    ("text", "value_of"), [(weight_codes.BYTES_FLOATS, signed), (weight_codes.E4M3_FLOATS, of_e4m3)]
)
def test_bytes_as_float32(
    text: weight_codes.tl.constexpr, value_of: Callable[[int], float]
) -> None:
    for byte in range(256):
        if byte & 127 == 127 and value_of is of_e4m3:
            continue
        parts = run(text.value, 4, byte | 1 << 8 | 2 << 16 | byte << 24)
        assert [float(as_numbers(p, torch.float32)) for p in parts] == [
            value_of(b) for b in (byte, 2, 1, byte)
        ]


def test_no_output_is_written_while_the_input_is_needed() -> None:
    """An output may share the input's register, unless its constraint says "early"."""
    for text, outputs in (
        (weight_codes.NIBBLES, 4), (weight_codes.NIBBLES_F16, 4), (weight_codes.BYTES_F16, 2), (weight_codes.E4M3, 2), (weight_codes.E4M3_F16, 2),
        (weight_codes.BYTES_FLOATS, 4), (weight_codes.E4M3_FLOATS, 4), (weight_codes.BYTES, 2),
    ):  # fmt: skip
        assert not is_written_early(text.value, outputs)
    assert is_written_early(weight_codes.NIBBLES_FLOATS.value, 8)
