"""A quantised weight in the order in which the CPU kernels read it.

Outputs are in blocks of LANES, with four inputs (a quad) of each output at a time:

    codes, 8 bits   [blocks, strips of 32 inputs, 8 quads, lanes, 4]
    codes, 4 bits   [blocks, strips of 32 inputs, 4 pairs of quads, lanes, 4]; the first quad of a
                    pair is in the low halves
    scale, least    [blocks, groups, lanes] float16

Outputs are padded to whole blocks and inputs to whole groups, with zeros; the activation of a
padded input is zero too. All memory is in huge pages. Codes and scales are separate streams:
storing the scales at the start of each block made products with one row 6% slower, because the
hardware prefetcher had to find that short stream again in every block.
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
    """A quantised weight for the CPU kernels.

    They read `record`, which holds addresses and sizes in the order of jit/matmul_jit.py.
    """

    codes: Tensor
    scale: Tensor
    least: Tensor | None

    def __init__(self, weight: QuantWeight, lanes: int):
        super().__init__()
        self.format = weight.format
        self.shape = weight.shape
        num_outputs, num_inputs = weight.shape
        self.group_size = weight.format.group_size or -(-num_inputs // STRIP) * STRIP
        self.register_buffer("codes", _blocked_codes(weight, lanes, self.group_size))
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
            num_inputs,
            num_outputs,
            self.group_size,
            weight.format.bits,
        ]
        self.record = np.array(fields, dtype=np.int64)


def _blocked_codes(weight: QuantWeight, lanes: int, group_size: int) -> Tensor:
    num_outputs, num_inputs = weight.shape
    bits = weight.format.bits
    num_blocks = -(-num_outputs // lanes)
    padded_inputs = -(-num_inputs // group_size) * group_size
    blocked = ARENA.allocate(num_blocks * lanes * padded_inputs * bits // 8).view(
        num_blocks, padded_inputs // STRIP, bits, lanes, 4
    )
    # Only the codes of this many blocks are unpacked at a time.
    chunk_blocks = max(1, (1 << 22) // padded_inputs // lanes)
    for first_block in range(0, num_blocks, chunk_blocks):
        chunk = weight[first_block * lanes : (first_block + chunk_blocks) * lanes].unpacked()
        chunk_size = -(-len(chunk) // lanes)
        chunk = F.pad(
            chunk,
            (0, padded_inputs - num_inputs, 0, chunk_size * lanes - len(chunk)),
            value=weight.format.zero_point,
        )
        chunk = chunk.view(chunk_size, lanes, padded_inputs // STRIP, 8, 4).permute(0, 2, 3, 1, 4)
        blocked[first_block : first_block + chunk_size] = (
            chunk if bits == 8 else chunk[:, :, 0::2] | chunk[:, :, 1::2] << 4
        )
    return blocked


def _blocked_info(info: Tensor, lanes: int) -> Tensor:
    """info [out, groups] -> [blocks, groups, lanes]"""
    padded = (
        F.pad(info, (0, 0, 0, -len(info) % lanes)).view(-1, lanes, info.shape[1]).transpose(1, 2)
    )
    return ARENA.allocate(padded.nbytes).view(info.dtype).view(padded.shape).copy_(padded)
