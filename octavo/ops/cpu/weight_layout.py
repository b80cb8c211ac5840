"""A quantised weight in the order in which the kernels read it: outputs in blocks of LANES, four inputs of each at a time.

    codes   [blocks, strips of 32 inputs, 8 quads, lanes, 4]      8 bits: a vector holds one quad of every lane's row
            [blocks, strips of 32 inputs, 4 pairs, lanes, 4]      4 bits: the first quad of a pair in the low halves
    scale, least   [blocks, groups, lanes] float16

Outputs are padded to whole blocks and inputs to whole groups, with zeros: a padded input's activation is zero too. All lies in
huge pages. Codes and scales are streams of their own: a block that began with its scales made one row 6% slower, since the
machine's own prefetch had to find that short stream anew in every block.
"""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.ops.huge_pages import Arena
from octavo.ops.weight import QuantWeight

STRIP = 32
ARENA = Arena()


class CpuWeight(nn.Module):
    """Opaque but to the CPU kernels, which know it by `record`: addresses and sizes, in the order of jit/matmul_jit.py."""

    codes: Tensor
    scale: Tensor
    least: Tensor | None

    def __init__(self, weight: QuantWeight, lanes: int):
        super().__init__()
        self.format = weight.format
        self.shape = weight.shape
        outputs, inputs = weight.shape
        self.group = weight.format.group_size or -(-inputs // STRIP) * STRIP
        self.register_buffer("codes", _blocked_codes(weight, lanes, self.group))
        self.register_buffer("scale", _blocked_info(weight.scale, lanes))
        self.register_buffer(
            "least", None if weight.least is None else _blocked_info(weight.least, lanes)
        )
        least = 0 if self.least is None else self.least.data_ptr()
        fields = [
            self.codes.data_ptr(),
            self.scale.data_ptr(),
            least,
            0,
            inputs,
            outputs,
            self.group,
            weight.format.bits,
        ]
        self.record = np.array(fields, dtype=np.int64)


def _blocked_codes(weight: QuantWeight, lanes: int, group: int) -> Tensor:
    outputs, inputs = weight.shape
    bits = weight.format.bits
    blocks = -(-outputs // lanes)
    padded = -(-inputs // group) * group
    out = ARENA.take(blocks * lanes * padded * bits // 8).view(
        blocks, padded // STRIP, bits, lanes, 4
    )
    # blocks at a time: the codes are unpacked for a moment
    step = max(1, (1 << 22) // padded // lanes)
    for first in range(0, blocks, step):
        part = weight[first * lanes : (first + step) * lanes].unpacked()
        count = -(-len(part) // lanes)
        part = F.pad(
            part, (0, padded - inputs, 0, count * lanes - len(part)), value=weight.format.zero_point
        )
        part = part.view(count, lanes, padded // STRIP, 8, 4).permute(0, 2, 3, 1, 4)
        out[first : first + count] = part if bits == 8 else part[:, :, 0::2] | part[:, :, 1::2] << 4
    return out


def _blocked_info(info: Tensor, lanes: int) -> Tensor:
    """[out, groups] -> [blocks, groups, lanes]"""
    padded = (
        F.pad(info, (0, 0, 0, -len(info) % lanes)).view(-1, lanes, info.shape[1]).transpose(1, 2)
    )
    return ARENA.take(padded.nbytes).view(info.dtype).view(padded.shape).copy_(padded)
