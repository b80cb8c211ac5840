"""Quantised weights in the order in which the GPU kernels read them.

octavo.ops.weight defines the meaning of codes. The codes of a row are in words of 16 bits, with 2
or 4 codes in a word, and in blocks of 32 words. The parts j of the words of a block are its
j-th 32 inputs. So a kernel unpacks a word by shifting and multiplies each part with 32
neighbouring inputs:

    8 bits   word i of block b:   inputs 64 b + i (low byte), 64 b + 32 + i
    4 bits   word i of block b:   inputs 128 b + i (lowest four bits), 128 b + 32 + i, + 64, + 96

The scales of groups are in words of 32 bits, the smallest unit that can be prefetched, in
info [groups, width]:

    symmetric     word 8 a + i:   the scales of outputs 16 a + i (low half) and 16 a + 8 + i, which
                                  one thread computes
    asymmetric    word n:         the scale of output n (low half) and its minimum

Scales that need float32 are in info [groups, out], or [2 groups, out] with the minima in every
other line. The scale of a whole row is a float32 in info [out]. Inputs are padded to whole blocks
with zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.ops.triton.quant.weight_codes import FP8, INT4, INT8
from octavo.ops.weight import QuantWeight

WORDS = 32  # the number of words in a block
LOCKS = 2048  # the largest number of tiles of a product that is split over the inputs


class TritonWeight(nn.Module):
    """A quantised weight in the layout of the kernels in this package."""

    words: Tensor  # [out, blocks * 32] int16
    info: Tensor  # [out] or [lines, out] float32, or [groups, width] int32 of two float16 each
    locks: Tensor  # [LOCKS] int32, all zero between products
    input_scale: Tensor | None  # [1] float32, the static scale of activations

    def __init__(self, weight: QuantWeight):
        super().__init__()
        self.format = weight.format
        self.shape = weight.shape
        self.register_buffer("words", _words(weight))
        self.register_buffer("info", _info(weight, self.blocks * WORDS * self.parts))
        input_scale = None if weight.input_scale is None else weight.input_scale.amax().view(1)
        self.register_buffer("input_scale", input_scale)
        self.register_buffer(
            "locks",
            torch.zeros(LOCKS, dtype=torch.int32, device=weight.codes.device),
            persistent=False,
        )

    @property
    def kind(self) -> int:
        """Return INT4, INT8 or FP8, for the kernels."""
        return (INT4 if self.format.bits == 4 else FP8 if self.format.is_float else INT8).value

    @property
    def parts(self) -> int:
        """Return the number of codes in a word."""
        return 16 // self.format.bits

    @property
    def blocks(self) -> int:
        return self.words.shape[1] // WORDS


def _words(weight: QuantWeight) -> Tensor:
    num_outputs, num_inputs = weight.shape
    parts = 16 // weight.format.bits
    num_blocks = -(-num_inputs // (WORDS * parts))
    words = torch.empty(
        num_outputs, num_blocks * WORDS, dtype=torch.int16, device=weight.codes.device
    )
    chunk_rows = max(1, (1 << 24) // num_inputs)  # unpacked codes of this many rows exist at a time
    for first_row in range(0, num_outputs, chunk_rows):
        rows = slice(first_row, first_row + chunk_rows)
        codes = weight[rows].unpacked()
        codes = F.pad(
            codes, (0, num_blocks * WORDS * parts - num_inputs), value=weight.format.zero_point
        )
        if weight.format.bits == 8:
            # Codes around 128 become signed. Floats stay unchanged, because their zero point is 0.
            signed = codes ^ weight.format.zero_point
            words[rows] = (
                signed.view(-1, num_blocks, 2, WORDS)
                .transpose(2, 3)
                .contiguous()
                .view(torch.int16)
                .flatten(1)
            )
        else:
            part0, part1, part2, part3 = codes.view(-1, num_blocks, 4, WORDS).unbind(2)
            words[rows] = (
                torch.stack((part0 | part1 << 4, part2 | part3 << 4), 3)
                .view(torch.int16)
                .flatten(1)
            )
    return words


def _info(weight: QuantWeight, padded_inputs: int) -> Tensor:
    """Return the scales. `padded_inputs` includes the padding; a padded group has the scale 0."""
    if not weight.format.group_size:
        return weight.scale[:, 0].float()
    num_groups = -(-padded_inputs // weight.format.group_size)
    scale = F.pad(weight.scale, (0, num_groups - weight.scale.shape[1])).t()  # [groups, out]
    least = (
        None
        if weight.least is None
        else F.pad(weight.least, (0, num_groups - weight.least.shape[1])).t()
    )
    if weight.format.is_float:
        return scale.float().contiguous()
    if weight.format.float32_scales:
        return scale.contiguous() if least is None else torch.stack((scale, least), 1).flatten(0, 1)
    if least is not None:
        pairs = torch.stack((scale, least), 2)
    else:
        pairs = (
            F.pad(scale, (0, -len(weight.scale) % 16))
            .reshape(num_groups, -1, 2, 8)
            .transpose(2, 3)
            .contiguous()
        )
    return pairs.view(torch.int32).flatten(1)
