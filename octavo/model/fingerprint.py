"""What a model's numbers are, in 16 bytes: equal for the same weights in the same format, different for any other.

Every byte counts, so that a fine-tune of one row is another model. That is one pass over the weights, at the speed of a GPU's
memory or 4 GB/s on a CPU core.
"""

from __future__ import annotations

import hashlib
import zlib

import torch
from torch import Tensor, nn

ROW = 4096  # bytes


def fingerprint(model: nn.Module, *more: object) -> bytes:
    """Of the model's parameters and buffers as they are now, and of whatever else decides what is computed with them."""
    digest = hashlib.blake2b(repr(more).encode(), digest_size=16)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        plain = tensor.to_dense() if tensor.is_mkldnn else tensor.detach()
        digest.update(_checksum(plain.contiguous().view(-1).view(torch.uint8)))
    return digest.digest()


def _checksum(data: Tensor) -> bytes:
    """data [n] uint8"""
    return (
        zlib.crc32(data.numpy().data).to_bytes(4, "little")
        if data.device.type == "cpu"
        else _sums(data)
    )


def _sums(data: Tensor) -> bytes:
    """Of rows and of columns: what a GPU is quick at. data [n] uint8"""
    whole = len(data) - len(data) % ROW
    words = data[:whole].view(torch.int32).view(-1, ROW // 4)
    sums = torch.cat(
        [words.sum(0, dtype=torch.int64), words.sum(1, dtype=torch.int64), data[whole:].long()]
    )
    return sums.cpu().numpy().tobytes()
