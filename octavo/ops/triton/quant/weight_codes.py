"""Codes of quantised weights to numbers, inside kernels. How codes lie in memory is packed_weight.py's.

A word of 16 bits holds four 4-bit or two 8-bit codes; each function takes a tensor of words and returns its codes part by part,
as bfloat16 or float16 for the tensor cores, or as float32. Converting integers is slow on a GPU (I2F takes a unit that does 16
a cycle, where memory delivers 17 8-bit weights), so bits are put into a float's mantissa instead: 0x4300 | code is 128 + code
in bfloat16, exactly. Two neighbouring words share a register and are converted at once, by instructions written out here (`ASM`,
on a Hopper GPU); the plain expressions beside them say the same and run everywhere, interpreted too.
"""

from __future__ import annotations

import triton
import triton.language as tl

INT4 = tl.constexpr(0)
INT8 = tl.constexpr(1)
FP8 = tl.constexpr(2)


def _nibbles(name: str, magic: int) -> tl.constexpr:
    """Two words -> four times two numbers: code - 8. What `magic` makes of a code is 128 or 1024 more."""
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


# with 128 + code, 1024 + code
NIBBLES = _nibbles("bf16x2", 0x43004300)
NIBBLES_F16 = _nibbles("f16x2", 0x64006400)

# Two words of signed bytes, of which bfloat16 holds seven bits: (128 + those) - (128, or 256 where the sign is set).
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

# Two words of e4m3: sign, exponent and mantissa to their places in a bfloat16, which is then 2^120 times too small.
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
def halves(words, DTYPE: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """words [...] int16 -> the codes' numbers as DTYPE, in order of their inputs: for INT4 codes less 8, four tensors [...], else
    two."""
    if KIND == INT4:
        if ASM:
            if DTYPE.is_bf16():
                return tl.inline_asm_elementwise(
                    NIBBLES, "=r,=r,=r,=r,r", [words], (tl.bfloat16,) * 4, is_pure=True, pack=2
                )
            else:
                return tl.inline_asm_elementwise(
                    NIBBLES_F16, "=r,=r,=r,=r,r", [words], (tl.float16,) * 4, is_pure=True, pack=2
                )
        else:
            w = words.to(tl.int32)
            return (
                ((w & 15) - 8).to(DTYPE),
                (((w >> 4) & 15) - 8).to(DTYPE),
                (((w >> 8) & 15) - 8).to(DTYPE),
                (((w >> 12) & 15) - 8).to(DTYPE),
            )
    else:
        if ASM:
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
            w = words.to(tl.int32)
            if KIND == INT8:
                return ((w << 24) >> 24).to(DTYPE), (w >> 8).to(DTYPE)
            else:
                return _e4m3(w & 255).to(DTYPE), _e4m3((w >> 8) & 255).to(DTYPE)


def _nibbles_dot() -> tl.constexpr:
    """Four times two words of 4-bit codes and, for each, four pairs of float16 -> the sum of code * x over all 32. A code that is
    cut out of a word is a float16 as it stands, of exponent zero: code * 2^-24, or 16 times that, from the second four bits.
    Sixteen products are added in float16, as two times eight."""
    lines = []
    for i in range(4):
        word = f"${1 + i}"
        x = [f"${5 + 4 * j + i}" for j in range(4)]
        total = "pq"[i // 2]
        lines.append(f"shr.u32 s, {word}, 8;")
        for j, source in enumerate((word, word, "s", "s")):
            lines.append(f"and.b32 c, {source}, {0x00F000F0 if j % 2 else 0x000F000F:#x};")
            first = i % 2 == j == 0
            lines.append(
                f"mul.rn.f16x2 {total}, c, {x[j]};"
                if first
                else f"fma.rn.f16x2 {total}, c, {x[j]}, {total};"
            )
    lines.append(
        "add.rn.f16x2 p, p, q; mov.b32 {low, high}, p; cvt.f32.f16 f, low; cvt.f32.f16 g, high; add.f32 $0, f, g;"
    )
    return tl.constexpr(
        "\n".join(["{ .reg .b32 c, s, p, q; .reg .b16 low, high; .reg .f32 f, g;", *lines, "}"])
    )


NIBBLES_DOT = _nibbles_dot()
NIBBLES_DOT_REGISTERS = tl.constexpr("=f" + 20 * ",r")


@triton.jit
def _four(x):
    """[N, V, 4] -> its four parts [N, V], all in the same thread"""
    even, odd = tl.split(x.reshape(x.shape[0], x.shape[1], 2, 2))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def dot_of_halves(pairs, x0, x1, x2, x3):
    """pairs [N, V, 4] int32, each two words of 4-bit codes; x0 to x3 [1, V, 4] int32, each two float16: the inputs that meet the
    words' first, second, third and fourth parts; of x1 and x3 a sixteenth -> 2^-24 times the sums of code * x [N, V] float32."""
    w = _four(pairs)
    a = _four(x0)
    b = _four(x1)
    c = _four(x2)
    d = _four(x3)
    args = [
        w[0],
        w[1],
        w[2],
        w[3],
        a[0],
        a[1],
        a[2],
        a[3],
        b[0],
        b[1],
        b[2],
        b[3],
        c[0],
        c[1],
        c[2],
        c[3],
        d[0],
        d[1],
        d[2],
        d[3],
    ]
    return tl.inline_asm_elementwise(
        NIBBLES_DOT, NIBBLES_DOT_REGISTERS, args, tl.float32, is_pure=True, pack=1
    )


@triton.jit
def two_halves(a, b):
    """float32 a and b -> one int32 of two float16, a in the lower half"""
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], tl.int32, is_pure=True, pack=1
    )


# Two words of 4-bit codes -> eight float32: 1 + code / 16, a shift and one logical operation each.
SHIFTS = [19 - 4 * part - 16 * word for part in range(4) for word in range(2)]
NIBBLES_FLOATS = tl.constexpr(
    "{ .reg .b32 a;\n"
    + "".join(
        f"{'shl' if shift > 0 else 'shr'}.b32 a, $8, {abs(shift)}; lop3.b32 ${i}, a, 0x00780000, 0x3f800000, 0xea;\n"
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
def floats(pairs, KIND: tl.constexpr, ASM: tl.constexpr):
    """pairs [...] int32, of two words each -> float32: the first part of the first word, of the second word, the second part of
    the first word and so on, eight tensors for INT4, else four. For INT4 they are 1 + code / 16, which costs least."""
    if KIND == INT4:
        if ASM:
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
        if ASM:
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
    """e4m3 as float32: its bits in their places make a number 2^120 times too small."""
    return (((byte & 127) << 20) | ((byte & 128) << 24)).to(
        tl.float32, bitcast=True
    ) * 1.329227995784916e36


# ---- scales of groups ------------------------------------------------------------------------------------


@triton.jit
def _half(word):
    """The low half of a 32-bit word is a float16."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def info_of(info, n, group, width, inside, LEAST: tl.constexpr):
    """Scale and least value of a group for each output of n, as far as they are inside; without least values the scale twice."""
    if info.dtype.element_ty == tl.float32:
        return _wide(info + n, group, width, inside, LEAST)
    elif LEAST:
        word = tl.load(info + group * width + n, mask=inside)
        return _half(word), _half(word >> 16)
    else:
        scale = _half(
            tl.load(info + group * width + (n // 16) * 8 + n % 8, mask=inside) >> (n // 8 % 2 * 16)
        )
        return scale, scale


@triton.jit
def info_of_tile(at, group, width, N: tl.constexpr, LEAST: tl.constexpr):
    """The same [N, 1] for N neighbouring outputs, at [N, 1] or [N / 2, 1] pointing to group 0's words: a word that holds the
    scales of outputs n and n + 8 is read by the thread that computes both, so nothing moves."""
    if at.dtype.element_ty == tl.float32:
        return _wide(at, group, width, None, LEAST)
    else:
        word = tl.load(at + group * width)
        low = _half(word)
        high = _half(word >> 16)
        if LEAST:
            return low, high
        else:
            scale = tl.join(low, high).reshape(N // 16, 8, 1, 2).permute(0, 3, 1, 2).reshape(N, 1)
            return scale, scale


@triton.jit
def _wide(at, group, width, inside, LEAST: tl.constexpr):
    """Of float32: a line of scales for each group, or two lines, the second of least values."""
    if LEAST:
        at += 2 * group * width
        return tl.load(at, mask=inside), tl.load(at + width, mask=inside)
    else:
        scale = tl.load(at + group * width, mask=inside)
        return scale, scale
