"""A quantised weight in the order in which the kernels read it: outputs in blocks of LANES, four inputs of each at a time.

    a block   scale [groups, lanes] float16, then least alike where there is one, then from a cache line's begin on
              codes [strips of 32 inputs, 8 quads, lanes, 4]      8 bits: a vector holds one quad of every lane's row
                    [strips of 32 inputs, 4 pairs, lanes, 4]      4 bits: the first quad of a pair in the low halves

Blocks follow one another, and so do the weights of a model, in the order in which a step reads them: one stream, of which the
kernels ask for what comes next. Outputs are padded to whole blocks and inputs to whole groups, with zeros: a padded input's
activation is zero too.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.ops.pages import Arena
from octavo.ops.weight import QuantWeight

STRIP = 32
ARENA = Arena()


class PackedWeight(nn.Module):
    """Opaque but to the CPU kernels, which know it by `record`: addresses and sizes, in the order of jit/product.py."""

    data: Tensor  # [blocks, bytes] uint8

    def __init__(self, weight: QuantWeight, lanes: int):
        super().__init__()
        self.form, self.shape = weight.form, weight.shape
        outputs, inputs = weight.shape
        self.group = weight.form.group or -(-inputs // STRIP) * STRIP
        blocks, groups, bits = -(-outputs // lanes), weight.scale.shape[1], weight.form.bits
        info = groups * lanes * 2
        before = (info if weight.least is None else 2 * info) + 63 & ~63
        size = before + groups * self.group * lanes * bits // 8
        data = ARENA.take(blocks * size).view(blocks, size)
        data[:, :info] = _blocked_info(weight.scale, lanes)
        if weight.least is not None:
            data[:, info : 2 * info] = _blocked_info(weight.least, lanes)
        _write_codes(weight, lanes, groups * self.group, data[:, before:])
        self.register_buffer("data", data)
        at = data.data_ptr()
        least = 0 if weight.least is None else at + info
        self.record = np.array([at + before, at, least, 0, inputs, outputs, self.group, bits, size], dtype=np.int64)


def _write_codes(weight: QuantWeight, lanes: int, padded: int, out: Tensor) -> None:
    """The codes, with so many inputs a row -> out [blocks, bytes]."""
    bits, inputs = weight.form.bits, weight.shape[1]
    step = max(1, (1 << 22) // padded // lanes)  # blocks at a time: the codes are unpacked for a moment
    for first in range(0, len(out), step):
        part = weight[first * lanes : (first + step) * lanes].unpacked()
        count = -(-len(part) // lanes)
        part = F.pad(part, (0, padded - inputs, 0, count * lanes - len(part)), value=weight.form.zero)
        part = part.view(count, lanes, padded // STRIP, 8, 4).permute(0, 2, 3, 1, 4)
        out[first : first + count] = (part if bits == 8 else part[:, :, 0::2] | part[:, :, 1::2] << 4).flatten(1)


def _blocked_info(info: Tensor, lanes: int) -> Tensor:
    """[out, groups] float16 -> [blocks, groups * lanes * 2] uint8"""
    padded = F.pad(info, (0, 0, 0, -len(info) % lanes))
    return padded.view(-1, lanes, info.shape[1]).transpose(1, 2).contiguous().flatten(1).view(torch.uint8)
