"""The KV tensor on the device.

Its first dimension is the block. A block is one contiguous record of all layers, so copying it on
the device, to the host or to disk is a single copy of `tensor[block]`.

Block 0 is padding. Models receive `view`:

    plain        tensor [block, layer, 2, kv_head, offset, dim], which is also the view
    compressed   tensor [block, bytes]: codes [layer, 2, kv_head, offset, dim], then scales
                 [layer, 2, kv_head, offset]. The view is a QuantKV over both. Codes come first, so
                 that they are laid out as in a plain tensor

A layer's part of the view is strided: `view[:, layer]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.config import KV_SCALE_BYTES, CacheConfig, ModelConfig
from octavo.errors import NotEnoughMemory
from octavo.ops.huge_pages import advise_huge
from octavo.ops.kv import KV, LARGEST, QuantKV


class KVStore:
    def __init__(
        self, model: ModelConfig, cache: CacheConfig, dtype: torch.dtype, device: torch.device
    ):
        """Allocate the tensor. `dtype` is the type of the plain numbers, or of the codes."""
        self.block_size = cache.block_size
        self.num_blocks = cache.num_blocks
        is_compressed = dtype in LARGEST
        kv_shape = torch.Size(
            (model.num_layers, 2, model.num_kv_heads, cache.block_size, model.head_dim)
        )
        num_codes = kv_shape.numel()
        block_shape = kv_shape
        block_dtype = dtype
        if is_compressed:
            scale_bytes = kv_shape[:-1].numel() * KV_SCALE_BYTES
            block_shape = torch.Size((num_codes + scale_bytes,))
            block_dtype = torch.uint8
        self.tensor = _allocate(cache.num_blocks + 1, block_shape, block_dtype, device)
        self.tensor[0].zero_()  # The padding of a batch may read block 0, which must not be NaN.
        self.view: KV = self.tensor
        if is_compressed:
            codes = self.tensor[:, :num_codes].view(dtype)
            scales = self.tensor[:, num_codes:].view(torch.float32)
            self.view = QuantKV(codes.unflatten(1, kv_shape), scales.unflatten(1, kv_shape[:-1]))

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy blocks sources[i] to targets[i] (int64 [n]). All are read before any is written."""
        self.tensor.index_copy_(0, targets, self.tensor.index_select(0, sources))


def _allocate(
    num_blocks: int, block_shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> Tensor:
    try:
        return advise_huge(torch.empty(num_blocks, *block_shape, dtype=dtype, device=device))
    except RuntimeError as error:
        gib = num_blocks * block_shape.numel() * dtype.itemsize / 2**30
        raise NotEnoughMemory(
            f"a KV pool of {num_blocks - 1} blocks needs {gib:.2f} GiB, which cannot be allocated "
            f"on {device}: lower num_gpu_blocks_override, max_model_len or "
            "gpu_memory_utilization, or compress KV (kv_cache_dtype int8 or fp8)"
        ) from error
