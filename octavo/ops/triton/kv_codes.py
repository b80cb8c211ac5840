"""Converts the codes of compressed KV to float16, in which every int8 and float8 (e4m3) is exact.

Only the attention kernels use these functions. With float32 queries, which only tests have, codes
become float32. The number of instructions matters: at memory speed a multiprocessor receives some
twenty codes a cycle, which leaves few instructions for each. An H200 converts two float8 with one
instruction. An int8 is converted through its bits: 0x6400 | n is the float16 number 1024 + n.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# One register of four int8 -> two registers of two float16. n ^ 0x80 is n + 128; 0x6480 is 1152.
INT8 = tl.constexpr("""{
.reg .b32 n, a, b, c;
mov.b32 c, 0x64806480;
xor.b32 n, $2, 0x80808080;
prmt.b32 a, n, 0x64646464, 0x4140;
prmt.b32 b, n, 0x64646464, 0x4342;
sub.f16x2 $0, a, c;
sub.f16x2 $1, b, c;
}""")

# Two words of four codes -> four registers of two float16: the first bytes of both words, then the
# second, third and fourth bytes.
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
def scale_queries(query, scale):
    """Scale query [rows, HEAD_DIM] to at most 1, so that float16 can hold it.

    Returns the scaled query and the scale of each row's scores, [rows].
    """
    scaled = query.to(tl.float32)
    largest = tl.max(tl.abs(scaled), 1)
    largest = tl.where(largest > 0, largest, 1.0)
    scaled = scaled / largest[:, None]
    if query.dtype != tl.float32:
        scaled = scaled.to(tl.float16)
    return scaled, largest * scale


@triton.jit
def load_scaled_queries(words_ptr, mask, scale):
    """Do what scale_queries() does for the dimensions 4i, 4i + 1, 4i + 2 and 4i + 3.

    They are loaded from words_ptr [rows, HEAD_DIM / 4].
    """
    query0 = tl.load(words_ptr, mask=mask, other=0.0)
    query1 = tl.load(words_ptr + 1, mask=mask, other=0.0)
    query2 = tl.load(words_ptr + 2, mask=mask, other=0.0)
    query3 = tl.load(words_ptr + 3, mask=mask, other=0.0)
    largest = tl.maximum(
        tl.maximum(tl.abs(query0), tl.abs(query1)), tl.maximum(tl.abs(query2), tl.abs(query3))
    )
    largest = tl.max(largest.to(tl.float32), 1)
    largest = tl.where(largest > 0, largest, 1.0)
    inverse = (1.0 / largest)[:, None]
    query0 = query0.to(tl.float32) * inverse
    query1 = query1.to(tl.float32) * inverse
    query2 = query2.to(tl.float32) * inverse
    query3 = query3.to(tl.float32) * inverse
    if words_ptr.dtype.element_ty != tl.float32:
        query0 = query0.to(tl.float16)
        query1 = query1.to(tl.float16)
        query2 = query2.to(tl.float16)
        query3 = query3.to(tl.float16)
    return query0, query1, query2, query3, largest * scale


@triton.jit
def convert(codes, target_dtype: tl.constexpr):
    """Convert codes to float16 or float32."""
    if codes.dtype == tl.int8 and target_dtype == tl.float16 and not INTERPRETED:
        return tl.inline_asm_elementwise(
            INT8, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
        )
    return codes.to(target_dtype)


@triton.jit
def _quarter(words, INDEX: tl.constexpr, target_dtype: tl.constexpr, LARGEST_CODE: tl.constexpr):
    code = (words >> (8 * INDEX)).to(tl.int8)
    if LARGEST_CODE != 127.0:
        code = code.to(tl.float8e4nv, bitcast=True)
    return code.to(target_dtype)


@triton.jit
def quarters(words, target_dtype: tl.constexpr, LARGEST_CODE: tl.constexpr):
    """Words of four codes -> four tensors: the first codes, the second, the third, the fourth."""
    if target_dtype == tl.float16 and not INTERPRETED:
        ASM: tl.constexpr = QUARTERS_INT8 if LARGEST_CODE == 127.0 else QUARTERS_FP8
        FOUR_FLOATS: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r,r", [words], dtype=FOUR_FLOATS, is_pure=True, pack=2
        )
    return (
        _quarter(words, 0, target_dtype, LARGEST_CODE),
        _quarter(words, 1, target_dtype, LARGEST_CODE),
        _quarter(words, 2, target_dtype, LARGEST_CODE),
        _quarter(words, 3, target_dtype, LARGEST_CODE),
    )
