"""GGUF's block formats, unpacked to float32 or taken over as codes. Bytes in, values out: knows no files, names or models.

A quantised tensor is a row of blocks; a block holds 32 or 256 values as small integers with their scales. Below, each
format's function takes blocks [n, bytes] (uint8) and returns codes as octavo.ops.weight has them, [n, values] (uint8), with the
scale and perhaps the least value of each group, [n, groups]. Every product and sum is rounded by itself, in the order ggml has
them, so values equal ggml's own bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.ops.weight import Format, QuantWeight

# Values unpacked at a time. Temporaries stay in the cache and never amount to a second tensor; and torch does not spread
# an operation this small over threads, whose barriers made a load four times as slow on a machine with other work to do.
CHUNK = 1 << 15


Coded = tuple[Tensor, Tensor, Tensor | None]


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, [n, 1]."""
    return blocks[:, at : at + 2].view(torch.float16)


def _planes(packed: Tensor, bits: int) -> Tensor:
    """packed [n, g, w] -> [n, g * (8 / bits), w]: group by group, all lowest fields of its bytes, then all next ones."""
    n, groups, width = packed.shape
    mask = (1 << bits) - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], 2).view(
        n, groups * (8 // bits), width
    )


def _q4_0(blocks: Tensor) -> Coded:
    return _planes(blocks[:, None, 2:], 4).flatten(1), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Coded:
    return _planes(blocks[:, None, 4:], 4).flatten(1), _half(blocks, 0), _half(blocks, 2)


def _five_bits(low: Tensor, high: Tensor) -> Tensor:
    """low [n, 16]: four bits of values i and i + 16; high [n, 4]: the fifth bits, value 0 first -> [n, 32]"""
    shifts = torch.arange(8, dtype=torch.uint8)
    fifth = (high[:, :, None] >> shifts & 1).flatten(1)
    return _planes(low[:, None], 4).flatten(1) | fifth << 4


def _q5_0(blocks: Tensor) -> Coded:
    return _five_bits(blocks[:, 6:], blocks[:, 2:6]) + (128 - 16), _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Coded:
    return _five_bits(blocks[:, 8:], blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Coded:
    return blocks[:, 2:] ^ 0x80, _half(blocks, 0), None  # signed -> around 128


def _q2_k(blocks: Tensor) -> Coded:
    """16 groups of 16: a 4-bit scale and a 4-bit minimum each [16 bytes], 2-bit values [64], d, dmin."""
    packed = blocks[:, :16]
    scale = (packed & 15).float() * _half(blocks, 80).float()
    least = (packed >> 4).float() * _half(blocks, 82).float()
    return _planes(blocks[:, 16:80].unflatten(1, (2, 32)), 2).flatten(1), scale, -least


def _q3_k(blocks: Tensor) -> Coded:
    """16 groups of 16: third bits [32 bytes; a clear bit means minus 4], 2-bit values [64], 6-bit scales [12], d."""
    low = _planes(blocks[:, None, 96:104], 4).flatten(1)
    high = _planes(blocks[:, None, 104:108], 2).flatten(1)
    scale = ((low | high << 4).float() - 32) * _half(blocks, 108).float()
    third = _planes(blocks[:, None, :32], 1)
    q = _planes(blocks[:, 32:96].unflatten(1, (2, 32)), 2) | third << 2
    return q.flatten(1) + (128 - 4), scale, None


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of the 8 groups of a Q4_K or Q5_K block: d, dmin, then 6-bit pairs in 12 bytes. The first four
    pairs lie whole in bytes 0-3 and 4-7; of the others the top two bits ride there and the rest is in bytes 8-11."""
    a = blocks[:, 4:8]
    b = blocks[:, 8:12]
    c = blocks[:, 12:16]
    scale = torch.cat([a & 63, c & 15 | a >> 6 << 4], 1).float()
    least = torch.cat([b & 63, c >> 4 | b >> 6 << 4], 1).float()
    return scale * _half(blocks, 0).float(), -(least * _half(blocks, 2).float())


def _q4_k(blocks: Tensor) -> Coded:
    """8 groups of 32: d, dmin, scales [16 bytes together], 4-bit values [128]."""
    return _planes(blocks[:, 16:].unflatten(1, (4, 32)), 4).flatten(1), *_k_scales(blocks)


def _q5_k(blocks: Tensor) -> Coded:
    """8 groups of 32: d, dmin, scales [16 bytes together], fifth bits [32], 4-bit values [128]."""
    q = _planes(blocks[:, 48:].unflatten(1, (4, 32)), 4) | _planes(blocks[:, None, 16:48], 1) << 4
    return q.flatten(1), *_k_scales(blocks)


def _q6_k(blocks: Tensor) -> Coded:
    """16 groups of 16: 4 low bits [128 bytes], 2 high bits [64], signed scales [16], d."""
    scale = blocks[:, 192:208].view(torch.int8).float() * _half(blocks, 208).float()
    low = _planes(blocks[:, :128].unflatten(1, (2, 64)), 4).view(-1, 8, 32)
    high = _planes(blocks[:, 128:192].unflatten(1, (2, 32)), 2)
    return (low | high << 4).flatten(1) + (128 - 32), scale, None


class BlockFormat(NamedTuple):
    name: str
    values: int  # in a block
    nbytes: int  # of a block
    plain: torch.dtype | None = None  # blocks of one value: the bytes are the tensor
    codes: Callable[[Tensor], Coded] | None = None  # neither: only the gguf library knows how


FORMATS: dict[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4, torch.float32),
    1: BlockFormat("F16", 1, 2, torch.float16),
    2: BlockFormat("Q4_0", 32, 18, codes=_q4_0),
    3: BlockFormat("Q4_1", 32, 20, codes=_q4_1),
    6: BlockFormat("Q5_0", 32, 22, codes=_q5_0),
    7: BlockFormat("Q5_1", 32, 24, codes=_q5_1),
    8: BlockFormat("Q8_0", 32, 34, codes=_q8_0),
    10: BlockFormat("Q2_K", 256, 84, codes=_q2_k),
    11: BlockFormat("Q3_K", 256, 110, codes=_q3_k),
    12: BlockFormat("Q4_K", 256, 144, codes=_q4_k),
    13: BlockFormat("Q5_K", 256, 176, codes=_q5_k),
    14: BlockFormat("Q6_K", 256, 210, codes=_q6_k),
    16: BlockFormat("IQ2_XXS", 256, 66),
    17: BlockFormat("IQ2_XS", 256, 74),
    18: BlockFormat("IQ3_XXS", 256, 98),
    19: BlockFormat("IQ1_S", 256, 50),
    20: BlockFormat("IQ4_NL", 32, 18),
    21: BlockFormat("IQ3_S", 256, 110),
    22: BlockFormat("IQ2_S", 256, 82),
    23: BlockFormat("IQ4_XS", 256, 136),
    24: BlockFormat("I8", 1, 1, torch.int8),
    25: BlockFormat("I16", 1, 2, torch.int16),
    26: BlockFormat("I32", 1, 4, torch.int32),
    27: BlockFormat("I64", 1, 8, torch.int64),
    28: BlockFormat("F64", 1, 8, torch.float64),
    29: BlockFormat("IQ1_M", 256, 56),
    30: BlockFormat("BF16", 1, 2, torch.bfloat16),
    34: BlockFormat("TQ1_0", 256, 54),
    35: BlockFormat("TQ2_0", 256, 66),
    39: BlockFormat("MXFP4", 32, 17),
    40: BlockFormat("NVFP4", 64, 36),
}


# What codes of these blocks are: groups of ours, nothing rounded. The scales of K blocks are products of two numbers, of 17 bits,
# which float32 holds and float16 does not.
CODED: dict[int, Format] = {
    2: Format(4, 32),
    3: Format(4, 32, least=True),
    6: Format(8, 32),
    7: Format(8, 32, least=True),
    8: Format(8, 32),
    10: Format(8, 16, least=True, wide=True),
    11: Format(8, 16, wide=True),
    12: Format(4, 32, least=True, wide=True),
    13: Format(8, 32, least=True, wide=True),
    14: Format(8, 16, wide=True),
}


def dequantize(data: Tensor, kind: int) -> Tensor:
    """data [bytes] (uint8), whole blocks of format `kind` -> values [n]: float32, or the stored dtype of a plain format."""
    form = FORMATS[kind]
    if form.plain is not None:
        return data.view(form.plain)
    unpack = _through_library(kind) if form.codes is None else lambda blocks: _values(blocks, kind)
    blocks = data.view(-1, form.nbytes)
    step = CHUNK // form.values
    if len(blocks) <= step:
        return unpack(blocks).flatten()
    out = torch.empty(len(blocks), form.values)
    for first in range(0, len(blocks), step):
        out[first : first + step] = unpack(blocks[first : first + step])
    return out.flatten()


def _values(blocks: Tensor, kind: int) -> Tensor:
    """[n, bytes] -> [n, values]"""
    read = FORMATS[kind].codes
    assert read is not None
    codes, scale, least = read(blocks)
    values = (
        codes.view(*scale.shape, -1).float().sub_(CODED[kind].zero).mul_(scale.float()[:, :, None])
    )
    return (values if least is None else values.add_(least.float()[:, :, None])).flatten(1)


def as_codes(data: Tensor, kind: int, inputs: int) -> QuantWeight:
    """data [bytes] of a format in CODED, rows of `inputs` values -> the same weight, nothing rounded."""
    form = CODED[kind]
    block = FORMATS[kind]
    blocks = data.view(-1, block.nbytes)
    step = CHUNK // block.values
    groups = block.values // form.group
    weight = QuantWeight.empty(form, len(blocks) * block.values // inputs, inputs)
    codes = weight.codes.view(len(blocks), -1)
    scale = weight.scale.view(len(blocks), groups)
    least = None if weight.least is None else weight.least.view(len(blocks), groups)
    assert block.codes is not None
    for first in range(0, len(blocks), step):
        rows = slice(first, first + step)
        found, scale[rows], low = block.codes(blocks[rows])
        codes[rows] = found if form.bits == 8 else found[:, 0::2] | found[:, 1::2] << 4
        if least is not None and low is not None:
            least[rows] = low
    return weight


def _through_library(kind: int) -> Callable[[Tensor], Tensor]:
    """The rarer formats: the gguf library's numpy code, slower and just as exact."""
    name = FORMATS[kind].name
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as by_library

        library_kind = GGMLQuantizationType(kind)
    except ImportError:
        raise CheckpointError(
            f"tensors of GGUF format {name} need the gguf library: pip install gguf"
        ) from None
    except ValueError:
        raise CheckpointError(
            f"this gguf library does not know format {name}: pip install --upgrade gguf"
        ) from None
    return lambda blocks: torch.from_numpy(by_library(blocks.numpy(), library_kind))
