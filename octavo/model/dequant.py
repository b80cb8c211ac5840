"""Unpacks the block formats of GGUF to float32 or to codes. This module depends on no files, names
or models.

A quantised tensor is a row of blocks. A block holds 32 or 256 values as small integers with their
scales. Each format's function below takes blocks [n, bytes] (uint8) and returns codes as
octavo.ops.weight defines them, [n, values] (uint8), with the scale and perhaps the minimum of each
group, [n, groups]. Every product and sum is rounded separately, in ggml's order, so that values
equal ggml's bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.ops.weight import QuantWeight, WeightFormat

# Values unpacked at a time. Temporaries fit the cache, and torch runs an operation this small on
# one thread: barriers between threads made loading four times as slow on a busy machine.
CHUNK = 1 << 15

Coded = tuple[Tensor, Tensor, Tensor | None]  # codes, scales, minima


def _float16_at(blocks: Tensor, offset: int) -> Tensor:
    """Return the float16 at byte `offset` of each block, [n, 1]."""
    return blocks[:, offset : offset + 2].view(torch.float16)


def _unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """packed [n, g, w] -> [n, g * (8 / bits), w]

    For each group, the lowest bits of all its bytes come first, then the next higher ones.
    """
    num_blocks, groups, width = packed.shape
    mask = (1 << bits) - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], 2).view(
        num_blocks, groups * (8 // bits), width
    )


def _q4_0(blocks: Tensor) -> Coded:
    return _unpack_bits(blocks[:, None, 2:], 4).flatten(1), _float16_at(blocks, 0), None


def _q4_1(blocks: Tensor) -> Coded:
    return (
        _unpack_bits(blocks[:, None, 4:], 4).flatten(1),
        _float16_at(blocks, 0),
        _float16_at(blocks, 2),
    )


def _five_bits(low_bits: Tensor, high_bits: Tensor) -> Tensor:
    """Join the bits of 5-bit codes -> [n, 32].

    low_bits [n, 16] holds four bits of the values i and i + 16 in byte i. high_bits [n, 4] holds
    the fifth bits, value 0 first.
    """
    shifts = torch.arange(8, dtype=torch.uint8)
    fifth = (high_bits[:, :, None] >> shifts & 1).flatten(1)
    return _unpack_bits(low_bits[:, None], 4).flatten(1) | fifth << 4


def _q5_0(blocks: Tensor) -> Coded:
    return _five_bits(blocks[:, 6:], blocks[:, 2:6]) + (128 - 16), _float16_at(blocks, 0), None


def _q5_1(blocks: Tensor) -> Coded:
    return _five_bits(blocks[:, 8:], blocks[:, 4:8]), _float16_at(blocks, 0), _float16_at(blocks, 2)


def _q8_0(blocks: Tensor) -> Coded:
    # Flipping the top bit turns signed codes into codes around 128.
    return blocks[:, 2:] ^ 0x80, _float16_at(blocks, 0), None


def _q2_k(blocks: Tensor) -> Coded:
    """16 groups of 16: 4-bit scales and minima [16 bytes], 2-bit values [64], d, dmin."""
    packed = blocks[:, :16]
    scale = (packed & 15).float() * _float16_at(blocks, 80).float()
    least = (packed >> 4).float() * _float16_at(blocks, 82).float()
    return _unpack_bits(blocks[:, 16:80].unflatten(1, (2, 32)), 2).flatten(1), scale, -least


def _q3_k(blocks: Tensor) -> Coded:
    """16 groups of 16: third bits [32 bytes], 2-bit values [64], 6-bit scales [12], d.

    A third bit that is 0 subtracts 4.
    """
    low_bits = _unpack_bits(blocks[:, None, 96:104], 4).flatten(1)
    high_bits = _unpack_bits(blocks[:, None, 104:108], 2).flatten(1)
    scale = ((low_bits | high_bits << 4).float() - 32) * _float16_at(blocks, 108).float()
    third_bits = _unpack_bits(blocks[:, None, :32], 1)
    codes = _unpack_bits(blocks[:, 32:96].unflatten(1, (2, 32)), 2) | third_bits << 2
    return codes.flatten(1) + (128 - 4), scale, None


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and minimum of the 8 groups of a Q4_K or Q5_K block.

    The block starts with d, dmin and eight 6-bit pairs in 12 bytes. The first four pairs are in
    bytes 0-3 and 4-7. The other pairs have their top two bits in these bytes too, and their low
    bits in bytes 8-11.
    """
    scale_bytes = blocks[:, 4:8]
    least_bytes = blocks[:, 8:12]
    mixed_bytes = blocks[:, 12:16]
    scale = torch.cat([scale_bytes & 63, mixed_bytes & 15 | scale_bytes >> 6 << 4], 1).float()
    least = torch.cat([least_bytes & 63, mixed_bytes >> 4 | least_bytes >> 6 << 4], 1).float()
    return scale * _float16_at(blocks, 0).float(), -(least * _float16_at(blocks, 2).float())


def _q4_k(blocks: Tensor) -> Coded:
    """8 groups of 32: d, dmin, scales [16 bytes together], 4-bit values [128]."""
    return _unpack_bits(blocks[:, 16:].unflatten(1, (4, 32)), 4).flatten(1), *_k_scales(blocks)


def _q5_k(blocks: Tensor) -> Coded:
    """8 groups of 32: d, dmin, scales [16 bytes together], fifth bits [32], 4-bit values [128]."""
    codes = (
        _unpack_bits(blocks[:, 48:].unflatten(1, (4, 32)), 4)
        | _unpack_bits(blocks[:, None, 16:48], 1) << 4
    )
    return codes.flatten(1), *_k_scales(blocks)


def _q6_k(blocks: Tensor) -> Coded:
    """16 groups of 16: 4 low bits [128 bytes], 2 high bits [64], signed scales [16], d."""
    scale = blocks[:, 192:208].view(torch.int8).float() * _float16_at(blocks, 208).float()
    low_bits = _unpack_bits(blocks[:, :128].unflatten(1, (2, 64)), 4).view(-1, 8, 32)
    high_bits = _unpack_bits(blocks[:, 128:192].unflatten(1, (2, 32)), 2)
    return (low_bits | high_bits << 4).flatten(1) + (128 - 32), scale, None


class BlockFormat(NamedTuple):
    """A block format of GGUF."""

    name: str
    values: int  # the number of values in a block
    nbytes: int  # the size of a block
    plain: torch.dtype | None = None  # set if a block is one plain number
    # Unpacks a block. If this and `plain` are None, only the gguf library can unpack it.
    codes: Callable[[Tensor], Coded] | None = None


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


# The formats whose codes are kept without rounding. A scale of a K block is the product of two
# numbers and has up to 17 significant bits, which need float32.
CODED: dict[int, WeightFormat] = {
    2: WeightFormat(4, 32),
    3: WeightFormat(4, 32, asymmetric=True),
    6: WeightFormat(8, 32),
    7: WeightFormat(8, 32, asymmetric=True),
    8: WeightFormat(8, 32),
    10: WeightFormat(8, 16, asymmetric=True, float32_scales=True),
    11: WeightFormat(8, 16, float32_scales=True),
    12: WeightFormat(4, 32, asymmetric=True, float32_scales=True),
    13: WeightFormat(8, 32, asymmetric=True, float32_scales=True),
    14: WeightFormat(8, 16, float32_scales=True),
}


def dequantize(data: Tensor, format_id: int) -> Tensor:
    """data [bytes] (uint8), whole blocks -> values [n], float32 or the plain format's dtype"""
    block_format = FORMATS[format_id]
    if block_format.plain is not None:
        return data.view(block_format.plain)
    unpack = (
        _through_library(format_id)
        if block_format.codes is None
        else lambda blocks: _values(blocks, format_id)
    )
    blocks = data.view(-1, block_format.nbytes)
    chunk_blocks = CHUNK // block_format.values
    if len(blocks) <= chunk_blocks:
        return unpack(blocks).flatten()
    values = torch.empty(len(blocks), block_format.values)
    for first_block in range(0, len(blocks), chunk_blocks):
        values[first_block : first_block + chunk_blocks] = unpack(
            blocks[first_block : first_block + chunk_blocks]
        )
    return values.flatten()


def _values(blocks: Tensor, format_id: int) -> Tensor:
    """blocks [n, bytes] -> [n, values]"""
    read_codes = FORMATS[format_id].codes
    assert read_codes is not None
    codes, scale, least = read_codes(blocks)
    values = (
        codes.view(*scale.shape, -1)
        .float()
        .sub_(CODED[format_id].zero_point)
        .mul_(scale.float()[:, :, None])
    )
    return (values if least is None else values.add_(least.float()[:, :, None])).flatten(1)


def as_codes(data: Tensor, format_id: int, inputs: int) -> QuantWeight:
    """data [bytes] of a format in CODED, with rows of `inputs` values -> the weight, unrounded"""
    weight_format = CODED[format_id]
    block_format = FORMATS[format_id]
    blocks = data.view(-1, block_format.nbytes)
    chunk_blocks = CHUNK // block_format.values
    groups = block_format.values // weight_format.group_size
    weight = QuantWeight.empty(weight_format, len(blocks) * block_format.values // inputs, inputs)
    codes = weight.codes.view(len(blocks), -1)
    scale = weight.scale.view(len(blocks), groups)
    least = None if weight.least is None else weight.least.view(len(blocks), groups)
    assert block_format.codes is not None
    for first_block in range(0, len(blocks), chunk_blocks):
        chunk = slice(first_block, first_block + chunk_blocks)
        block_codes, scale[chunk], block_least = block_format.codes(blocks[chunk])
        codes[chunk] = (
            block_codes
            if weight_format.bits == 8
            else block_codes[:, 0::2] | block_codes[:, 1::2] << 4
        )
        if least is not None and block_least is not None:
            least[chunk] = block_least
    return weight


def _through_library(format_id: int) -> Callable[[Tensor], Tensor]:
    """Return a function that unpacks a rarer format with the numpy code of the gguf library."""
    name = FORMATS[format_id].name
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as by_library

        library_kind = GGMLQuantizationType(format_id)
    except ImportError:
        raise CheckpointError(
            f"tensors of GGUF format {name} need the gguf library: pip install gguf"
        ) from None
    except ValueError:
        raise CheckpointError(
            f"this gguf library does not support format {name}: pip install --upgrade gguf"
        ) from None
    return lambda blocks: torch.from_numpy(by_library(blocks.numpy(), library_kind))
