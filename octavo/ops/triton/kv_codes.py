"""Compressed KV as what the matrix units multiply: codes become float16, in which every int8 and float8 (e4m3) is exact.

Only attention uses these. Beside float32 queries, which tests have, they become float32. The rest is about instructions: at the
speed of memory a multiprocessor takes in some twenty codes a cycle, and has about as many instructions for each as are here.
An H200 converts float8 itself, two at once. An int8 goes through its bits: 0x6400 | n is the float16 1024 + n.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# Four int8 in a register -> two registers of two float16. n ^ 0x80 is n + 128, and 0x6480 is 1152.
INT8 = tl.constexpr("""{
.reg .b32 n, a, b, c;
mov.b32 c, 0x64806480;
xor.b32 n, $2, 0x80808080;
prmt.b32 a, n, 0x64646464, 0x4140;
prmt.b32 b, n, 0x64646464, 0x4342;
sub.f16x2 $0, a, c;
sub.f16x2 $1, b, c;
}""")

# Two words of four codes -> the first bytes of both as two float16 in a register, then the second, third and fourth.
QUARTERS_INT8 = tl.constexpr("""{
.reg .b32 m, n, a, b, c, d, e, f, g;
mov.b32 c, 0x64806480;
xor.b32 m, $4, 0x80808080;
xor.b32 n, $5, 0x80808080;
prmt.b32 a, m, n, 0x5140;
prmt.b32 b, m, n, 0x7362;
prmt.b32 d, a, 0x64646464, 0x4140;
prmt.b32 e, a, 0x64646464, 0x4342;
prmt.b32 f, b, 0x64646464, 0x4140;
prmt.b32 g, b, 0x64646464, 0x4342;
sub.f16x2 $0, d, c;
sub.f16x2 $1, e, c;
sub.f16x2 $2, f, c;
sub.f16x2 $3, g, c;
}""")
QUARTERS_FP8 = tl.constexpr("""{
.reg .b32 a, b;
.reg .b16 c, d, e, f;
prmt.b32 a, $4, $5, 0x5140;
prmt.b32 b, $4, $5, 0x7362;
mov.b32 {c, d}, a;
mov.b32 {e, f}, b;
cvt.rn.f16x2.e4m3x2 $0, c;
cvt.rn.f16x2.e4m3x2 $1, d;
cvt.rn.f16x2.e4m3x2 $2, e;
cvt.rn.f16x2.e4m3x2 $3, f;
}""")


@triton.jit
def queries(q, scale):
    """q [rows, D] for products with codes, of size 1 at most so that float16 holds it, and the scale that each row's scores
    then have: [rows]."""
    x = q.to(tl.float32)
    size = tl.max(tl.abs(x), 1)
    size = tl.where(size > 0, size, 1.0)
    x = x / size[:, None]
    if q.dtype != tl.float32:
        x = x.to(tl.float16)
    return x, size * scale


@triton.jit
def four_queries(at, mask, scale):
    """queries() of dimensions 4i, 4i + 1, 4i + 2 and 4i + 3, which are read from `at` [rows, D / 4]."""
    a = tl.load(at, mask=mask, other=0.0)
    b = tl.load(at + 1, mask=mask, other=0.0)
    c = tl.load(at + 2, mask=mask, other=0.0)
    d = tl.load(at + 3, mask=mask, other=0.0)
    size = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    size = tl.max(size.to(tl.float32), 1)
    size = tl.where(size > 0, size, 1.0)
    less = (1.0 / size)[:, None]
    a = a.to(tl.float32) * less
    b = b.to(tl.float32) * less
    c = c.to(tl.float32) * less
    d = d.to(tl.float32) * less
    if at.dtype.element_ty != tl.float32:
        a = a.to(tl.float16)
        b = b.to(tl.float16)
        c = c.to(tl.float16)
        d = d.to(tl.float16)
    return a, b, c, d, size * scale


@triton.jit
def numbers(codes, dtype: tl.constexpr):
    """Codes as float16 or float32."""
    if codes.dtype == tl.int8 and dtype == tl.float16 and not INTERPRETED:
        return tl.inline_asm_elementwise(
            INT8, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
        )
    return codes.to(dtype)


@triton.jit
def _quarter(words, which: tl.constexpr, dtype: tl.constexpr, LARGEST: tl.constexpr):
    code = (words >> (8 * which)).to(tl.int8)
    if LARGEST != 127.0:
        code = code.to(tl.float8e4nv, bitcast=True)
    return code.to(dtype)


@triton.jit
def quarters(words, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """Words of four codes -> the first code of each, the second, the third, the fourth."""
    if dtype == tl.float16 and not INTERPRETED:
        ASM: tl.constexpr = QUARTERS_INT8 if LARGEST == 127.0 else QUARTERS_FP8
        four: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r,r", [words], dtype=four, is_pure=True, pack=2
        )
    return (
        _quarter(words, 0, dtype, LARGEST), _quarter(words, 1, dtype, LARGEST),
        _quarter(words, 2, dtype, LARGEST), _quarter(words, 3, dtype, LARGEST),
    )  # fmt: skip
