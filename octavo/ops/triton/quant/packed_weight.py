"""Quantised weights in the order in which the GPU kernels read them. What codes mean is octavo.ops.weight's.

A row's codes lie in words of 16 bits, in blocks of 32 words: P = 2 or 4 codes a word. Part j of all words of a block are the
block's j-th 32 inputs, so that a kernel takes a word apart by shifting and multiplies each part with 32 neighbouring inputs:

    8 bits   word i of block b:   inputs 64 b + i (low byte), 64 b + 32 + i
    4 bits   word i of block b:   inputs 128 b + i (lowest four bits), 128 b + 32 + i, + 64, + 96

A group's scale lies in a word of 32 bits, because less cannot be copied ahead of its use: info [groups, width]

    symmetric     word 8 a + i:   the scales of outputs 16 a + i (low half) and 16 a + 8 + i, which one thread computes
    asymmetric    word n:         the scale of output n (low half) and its least value

Scales that float16 does not hold are float32 each, info [groups, out] or, with least values in every other line, [2 groups, out].
A scale for a whole row is a float32, info [out]. Inputs are padded to whole blocks, with zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.ops.triton.quant.weight_codes import FP8, INT4, INT8
from octavo.ops.weight import QuantWeight

WORDS = 32  # in a block
LOCKS = 2048  # tiles of one product that may be computed by several programs


class PackedWeight(nn.Module):
    """Opaque but to the kernels beside it."""

    words: Tensor  # [out, blocks * 32] int16, of any bits
    info: Tensor  # [out] or [lines, out] float32, or [groups, width] int32, of two float16 each
    locks: Tensor  # [LOCKS] int32, all zero between products

    def __init__(self, weight: QuantWeight):
        super().__init__()
        self.format = weight.format
        self.shape = weight.shape
        self.register_buffer("words", _words(weight))
        self.register_buffer("info", _info(weight, self.blocks * WORDS * self.parts))
        self.register_buffer(
            "locks",
            torch.zeros(LOCKS, dtype=torch.int32, device=weight.codes.device),
            persistent=False,
        )

    @property
    def kind(self) -> int:
        """What a code is, for the kernels."""
        return (INT4 if self.format.bits == 4 else FP8 if self.format.is_float else INT8).value

    @property
    def parts(self) -> int:
        """Codes in a word."""
        return 16 // self.format.bits

    @property
    def blocks(self) -> int:
        return self.words.shape[1] // WORDS


def _words(weight: QuantWeight) -> Tensor:
    outputs, inputs = weight.shape
    parts = 16 // weight.format.bits
    blocks = -(-inputs // (WORDS * parts))
    out = torch.empty(outputs, blocks * WORDS, dtype=torch.int16, device=weight.codes.device)
    step = max(1, (1 << 24) // inputs)  # rows at a time: the codes are unpacked for a moment
    for first in range(0, outputs, step):
        rows = slice(first, first + step)
        codes = weight[rows].unpacked()
        codes = F.pad(codes, (0, blocks * WORDS * parts - inputs), value=weight.format.zero_point)
        if weight.format.bits == 8:
            # around 128 -> signed; what is a float stays as it is
            signed = codes ^ weight.format.zero_point
            out[rows] = (
                signed.view(-1, blocks, 2, WORDS)
                .transpose(2, 3)
                .contiguous()
                .view(torch.int16)
                .flatten(1)
            )
        else:
            a, b, c, d = codes.view(-1, blocks, 4, WORDS).unbind(2)
            out[rows] = torch.stack((a | b << 4, c | d << 4), 3).view(torch.int16).flatten(1)
    return out


def _info(weight: QuantWeight, inputs: int) -> Tensor:
    """inputs: with what is padded; a padded group's scale is zero."""
    if not weight.format.group_size:
        return weight.scale[:, 0].float()
    groups = -(-inputs // weight.format.group_size)
    scale = F.pad(weight.scale, (0, groups - weight.scale.shape[1])).t()  # [groups, out]
    least = (
        None
        if weight.least is None
        else F.pad(weight.least, (0, groups - weight.least.shape[1])).t()
    )
    if weight.format.float32_scales:
        return scale.contiguous() if least is None else torch.stack((scale, least), 1).flatten(0, 1)
    if least is not None:
        pairs = torch.stack((scale, least), 2)
    else:
        pairs = (
            F.pad(scale, (0, -len(weight.scale) % 16))
            .reshape(groups, -1, 2, 8)
            .transpose(2, 3)
            .contiguous()
        )
    return pairs.view(torch.int32).flatten(1)
