"""Converts codes of quantised weights to numbers, inside kernels.

packed_weight.py defines the layout of codes in memory. A word of 16 bits holds four 4-bit or two
8-bit codes. Each function takes a tensor of words and returns its codes part by part, as bfloat16
or float16 for the tensor cores, or as float32. Converting integers is slow on a GPU: a
multiprocessor converts 16 a cycle (I2F), while memory delivers 17 8-bit weights. So codes are put
into the mantissa of a float instead: 0x4300 | code is exactly 128 + code in bfloat16. Two
neighbouring words share a register and are converted together by inline PTX (`USE_ASM`, on a Hopper
GPU). The plain expressions next to it compute the same and run everywhere, also interpreted.
"""

from __future__ import annotations

import triton
import triton.language as tl

INT4 = tl.constexpr(0)
INT8 = tl.constexpr(1)
FP8 = tl.constexpr(2)


def _nibbles(name: str, magic: int) -> tl.constexpr:
    """Return PTX: two words -> four times two numbers, code - 8.

    `magic` | code is the number 128 + code or 1024 + code.
    """
    return tl.constexpr(f"""{{
    .reg .b32 a, b, c, least;
    mov.b32 least, {magic + 0x80008:#x};
    shr.u32 a, $4, 4;
    shr.u32 b, $4, 8;
    shr.u32 c, $4, 12;
    lop3.b32 $0, $4, 0x000f000f, {magic:#x}, 0xea;
    lop3.b32 $1, a, 0x000f000f, {magic:#x}, 0xea;
    lop3.b32 $2, b, 0x000f000f, {magic:#x}, 0xea;
    lop3.b32 $3, c, 0x000f000f, {magic:#x}, 0xea;
    sub.rn.{name} $0, $0, least;
    sub.rn.{name} $1, $1, least;
    sub.rn.{name} $2, $2, least;
    sub.rn.{name} $3, $3, least;
    }}""")  # lop3 0xea: (a & b) | c


# These go through 128 + code and 1024 + code.
NIBBLES = _nibbles("bf16x2", 0x43004300)
NIBBLES_F16 = _nibbles("f16x2", 0x64006400)

# Two words of signed bytes. bfloat16 holds only seven bits of them, so the result is
# (128 + these bits) - (128, or 256 if the sign is set).
BYTES = tl.constexpr("""{
    .reg .b32 a, b, c;
    shr.u32 c, $2, 8;
    lop3.b32 a, $2, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 b, $2, 0x00800080, 0x43004300, 0xea;
    sub.rn.bf16x2 $0, a, b;
    lop3.b32 a, c, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 b, c, 0x00800080, 0x43004300, 0xea;
    sub.rn.bf16x2 $1, a, b;
    }""")
BYTES_F16 = tl.constexpr("""{
    .reg .b32 a, b, least;
    mov.b32 least, 0x64806480;
    xor.b32 a, $2, 0x80808080;
    shr.u32 b, a, 8;
    lop3.b32 a, a, 0x00ff00ff, 0x64006400, 0xea;
    lop3.b32 b, b, 0x00ff00ff, 0x64006400, 0xea;
    sub.rn.f16x2 $0, a, least;
    sub.rn.f16x2 $1, b, least;
    }""")

# Two words of e4m3. Sign, exponent and mantissa move to their places in a bfloat16, which is then
# 2^120 times too small.
E4M3 = tl.constexpr("""{
    .reg .b32 a, b, c, large;
    mov.b32 large, 0x7b807b80;
    shl.b32 a, $2, 4;
    shl.b32 b, $2, 8;
    shr.u32 c, $2, 4;
    and.b32 a, a, 0x07f007f0;
    lop3.b32 a, b, 0x80008000, a, 0xea;
    and.b32 c, c, 0x07f007f0;
    lop3.b32 c, $2, 0x80008000, c, 0xea;
    mul.rn.bf16x2 $0, a, large;
    mul.rn.bf16x2 $1, c, large;
    }""")
E4M3_F16 = tl.constexpr("""{
    .reg .b16 v, w;
    .reg .b32 x, y;
    mov.b32 {v, w}, $2;
    cvt.rn.f16x2.e4m3x2 x, v;
    cvt.rn.f16x2.e4m3x2 y, w;
    prmt.b32 $0, x, y, 0x5410;
    prmt.b32 $1, x, y, 0x7632;
    }""")


@triton.jit
def halves(words, DTYPE: tl.constexpr, KIND: tl.constexpr, USE_ASM: tl.constexpr):
    """words [...] int16 -> the numbers of the codes as DTYPE, in the order of their inputs.

    INT4 gives four tensors [...] of code - 8; other kinds give two tensors.
    """
    if KIND == INT4:
        if USE_ASM:
            if DTYPE.is_bf16():
                return tl.inline_asm_elementwise(
                    NIBBLES, "=r,=r,=r,=r,r", [words], (tl.bfloat16,) * 4, is_pure=True, pack=2
                )
            else:
                return tl.inline_asm_elementwise(
                    NIBBLES_F16, "=r,=r,=r,=r,r", [words], (tl.float16,) * 4, is_pure=True, pack=2
                )
        else:
            integers = words.to(tl.int32)
            return (
                ((integers & 15) - 8).to(DTYPE),
                (((integers >> 4) & 15) - 8).to(DTYPE),
                (((integers >> 8) & 15) - 8).to(DTYPE),
                (((integers >> 12) & 15) - 8).to(DTYPE),
            )
    else:
        if USE_ASM:
            if DTYPE.is_bf16():
                return tl.inline_asm_elementwise(
                    BYTES if KIND == INT8 else E4M3,
                    "=r,=r,r",
                    [words],
                    (tl.bfloat16,) * 2,
                    is_pure=True,
                    pack=2,
                )
            else:
                return tl.inline_asm_elementwise(
                    BYTES_F16 if KIND == INT8 else E4M3_F16,
                    "=r,=r,r",
                    [words],
                    (tl.float16,) * 2,
                    is_pure=True,
                    pack=2,
                )
        else:
            integers = words.to(tl.int32)
            if KIND == INT8:
                return ((integers << 24) >> 24).to(DTYPE), (integers >> 8).to(DTYPE)
            else:
                return _e4m3(integers & 255).to(DTYPE), _e4m3((integers >> 8) & 255).to(DTYPE)


def _nibbles_dot() -> tl.constexpr:
    """Return PTX for the dot product of 32 4-bit codes with 32 float16 inputs.

    The operands are four times two words of codes and, for each, four pairs of float16. A code that
    is masked out of a word is a denormal float16: code * 2^-24, or 16 times that for the second
    four bits. Sixteen products are added in float16, as two times eight.
    """
    lines = []
    for word_index in range(4):
        word = f"${1 + word_index}"
        registers = [f"${5 + 4 * part + word_index}" for part in range(4)]
        total = "pq"[word_index // 2]
        lines.append(f"shr.u32 s, {word}, 8;")
        for part, source in enumerate((word, word, "s", "s")):
            lines.append(f"and.b32 c, {source}, {0x00F000F0 if part % 2 else 0x000F000F:#x};")
            first = word_index % 2 == part == 0
            lines.append(
                f"mul.rn.f16x2 {total}, c, {registers[part]};"
                if first
                else f"fma.rn.f16x2 {total}, c, {registers[part]}, {total};"
            )
    lines.append(
        "add.rn.f16x2 p, p, q; mov.b32 {low, high}, p; cvt.f32.f16 f, low; cvt.f32.f16 g, high; "
        "add.f32 $0, f, g;"
    )
    return tl.constexpr(
        "\n".join(["{ .reg .b32 c, s, p, q; .reg .b16 low, high; .reg .f32 f, g;", *lines, "}"])
    )


NIBBLES_DOT = _nibbles_dot()
NIBBLES_DOT_REGISTERS = tl.constexpr("=f" + 20 * ",r")


@triton.jit
def _split_in_four(values):
    """values [N, V, 4] -> four parts [N, V], all in the same thread"""
    even, odd = tl.split(values.reshape(values.shape[0], values.shape[1], 2, 2))
    part0, part2 = tl.split(even)
    part1, part3 = tl.split(odd)
    return part0, part1, part2, part3


@triton.jit
def dot_of_halves(pairs, inputs0, inputs1, inputs2, inputs3):
    """Return 2^-24 times the sums of code * input, [N, V] float32.

    pairs [N, V, 4] int32 are two words of 4-bit codes each. inputs0 to inputs3 [1, V, 4] int32 are
    two float16 each: the inputs of the first, second, third and fourth parts of the words. inputs1
    and inputs3 must be divided by 16.
    """
    words = _split_in_four(pairs)
    first = _split_in_four(inputs0)
    second = _split_in_four(inputs1)
    third = _split_in_four(inputs2)
    fourth = _split_in_four(inputs3)
    operands = [
        words[0],
        words[1],
        words[2],
        words[3],
        first[0],
        first[1],
        first[2],
        first[3],
        second[0],
        second[1],
        second[2],
        second[3],
        third[0],
        third[1],
        third[2],
        third[3],
        fourth[0],
        fourth[1],
        fourth[2],
        fourth[3],
    ]
    return tl.inline_asm_elementwise(
        NIBBLES_DOT, NIBBLES_DOT_REGISTERS, operands, tl.float32, is_pure=True, pack=1
    )


@triton.jit
def pack_halves(low, high):
    """float32 low and high -> one int32 of two float16"""
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.int32, is_pure=True, pack=1
    )


# Two words of 4-bit codes -> eight float32, 1 + code / 16. Each takes a shift and a logical op.
SHIFTS = [19 - 4 * part - 16 * word for part in range(4) for word in range(2)]
NIBBLES_FLOATS = tl.constexpr(
    "{ .reg .b32 a;\n"
    + "".join(
        f"{'shl' if shift > 0 else 'shr'}.b32 a, $8, {abs(shift)}; lop3.b32 ${i}, a, 0x00780000, "
        "0x3f800000, 0xea;\n"
        for i, shift in enumerate(SHIFTS)
    )
    + "}"
)

# Two words of signed bytes -> four float32, through 2^23 + code + 128.
BYTES_FLOATS = tl.constexpr("""{
    .reg .b32 w, a, b, c, d;
    xor.b32 w, $4, 0x80808080;
    prmt.b32 a, w, 0x4b000000, 0x7440;
    prmt.b32 b, w, 0x4b000000, 0x7442;
    prmt.b32 c, w, 0x4b000000, 0x7441;
    prmt.b32 d, w, 0x4b000000, 0x7443;
    add.f32 $0, a, 0fcb000080;
    add.f32 $1, b, 0fcb000080;
    add.f32 $2, c, 0fcb000080;
    add.f32 $3, d, 0fcb000080;
    }""")

E4M3_FLOATS = tl.constexpr("""{
    .reg .b16 v, w, a, b;
    .reg .b32 x, y;
    mov.b32 {v, w}, $4;
    cvt.rn.f16x2.e4m3x2 x, v;
    cvt.rn.f16x2.e4m3x2 y, w;
    mov.b32 {a, b}, x;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $2, b;
    mov.b32 {a, b}, y;
    cvt.f32.f16 $1, a;
    cvt.f32.f16 $3, b;
    }""")


@triton.jit
def floats(pairs, KIND: tl.constexpr, USE_ASM: tl.constexpr):
    """pairs [...] int32, of two words each -> eight float32 tensors for INT4, else four.

    The order is: the first part of the first word, the first part of the second word, the second
    part of the first word, and so on. For INT4 the numbers are 1 + code / 16, which is the cheapest
    conversion.
    """
    if KIND == INT4:
        if USE_ASM:
            return tl.inline_asm_elementwise(
                NIBBLES_FLOATS,
                "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=f,r",
                [pairs],
                (tl.float32,) * 8,
                is_pure=True,
                pack=1,
            )
        return (
            1 + (pairs & 15).to(tl.float32) * 0.0625,
            1 + ((pairs >> 16) & 15).to(tl.float32) * 0.0625,
            1 + ((pairs >> 4) & 15).to(tl.float32) * 0.0625,
            1 + ((pairs >> 20) & 15).to(tl.float32) * 0.0625,
            1 + ((pairs >> 8) & 15).to(tl.float32) * 0.0625,
            1 + ((pairs >> 24) & 15).to(tl.float32) * 0.0625,
            1 + ((pairs >> 12) & 15).to(tl.float32) * 0.0625,
            1 + ((pairs >> 28) & 15).to(tl.float32) * 0.0625,
        )
    else:
        if USE_ASM:
            if KIND == INT8:
                return tl.inline_asm_elementwise(
                    BYTES_FLOATS, "=f,=f,=f,=f,r", [pairs], (tl.float32,) * 4, is_pure=True, pack=1
                )
            return tl.inline_asm_elementwise(
                E4M3_FLOATS, "=f,=f,=f,=f,r", [pairs], (tl.float32,) * 4, is_pure=True, pack=1
            )
        if KIND == INT8:
            return (
                ((pairs << 24) >> 24).to(tl.float32),
                ((pairs << 8) >> 24).to(tl.float32),
                ((pairs << 16) >> 24).to(tl.float32),
                (pairs >> 24).to(tl.float32),
            )
        return (
            _e4m3(pairs & 255),
            _e4m3((pairs >> 16) & 255),
            _e4m3((pairs >> 8) & 255),
            _e4m3((pairs >> 24) & 255),
        )


@triton.jit
def _e4m3(byte):
    """Convert e4m3 to float32. Its bits in their places make a number 2^120 times too small."""
    return (((byte & 127) << 20) | ((byte & 128) << 24)).to(
        tl.float32, bitcast=True
    ) * 1.329227995784916e36


# ---- scales of groups ----------------------------------------------------------------------------


@triton.jit
def _half(word):
    """Return the float16 in the low half of a 32-bit word."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def info_of(info_ptr, output_offsets, group, info_width, in_range, ASYMMETRIC: tl.constexpr):
    """Return scale and minimum of a group for each output.

    A symmetric format returns the scale twice.
    """
    if info_ptr.dtype.element_ty == tl.float32:
        return _load_float32_info(
            info_ptr + output_offsets, group, info_width, in_range, ASYMMETRIC
        )
    elif ASYMMETRIC:
        word = tl.load(info_ptr + group * info_width + output_offsets, mask=in_range)
        return _half(word), _half(word >> 16)
    else:
        scale = _half(
            tl.load(
                info_ptr + group * info_width + (output_offsets // 16) * 8 + output_offsets % 8,
                mask=in_range,
            )
            >> (output_offsets // 8 % 2 * 16)
        )
        return scale, scale


@triton.jit
def info_of_tile(address, group, info_width, TILE_OUTPUTS: tl.constexpr, ASYMMETRIC: tl.constexpr):
    """Return scale and minimum [N, 1] of a group for N neighbouring outputs.

    `address` [N, 1] or [N / 2, 1] points to the words of group 0. The word with the scales of
    outputs n and n + 8 is loaded by the thread that computes both, so no value moves.
    """
    if address.dtype.element_ty == tl.float32:
        return _load_float32_info(address, group, info_width, None, ASYMMETRIC)
    else:
        word = tl.load(address + group * info_width)
        low = _half(word)
        high = _half(word >> 16)
        if ASYMMETRIC:
            return low, high
        else:
            scale = (
                tl.join(low, high)
                .reshape(TILE_OUTPUTS // 16, 8, 1, 2)
                .permute(0, 3, 1, 2)
                .reshape(TILE_OUTPUTS, 1)
            )
            return scale, scale


@triton.jit
def _load_float32_info(address, group, info_width, in_range, ASYMMETRIC: tl.constexpr):
    """Load float32 scales. Each group has a line of scales, and a line of minima if asymmetric."""
    if ASYMMETRIC:
        address += 2 * group * info_width
        return tl.load(address, mask=in_range), tl.load(address + info_width, mask=in_range)
    else:
        scale = tl.load(address + group * info_width, mask=in_range)
        return scale, scale
