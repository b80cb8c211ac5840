"""The one KV tensor. Its first dimension is the block: one contiguous record across layers, so that copies, host and disk are
single copies of `tensor[block]`. Block 0 is padding. What a model is given is `view`.

    plain        tensor [block, layer, 2, kv_head, offset, dim], which is the view
    compressed   tensor [block, bytes]: codes [layer, 2, kv_head, offset, dim], then scales [layer, 2, kv_head, offset]; the view
                 is a QuantKV over both. Codes come first, so that each of their rows lies as it would in a plain tensor

A layer's part of the view is strided: `view[:, layer]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.config import KV_SCALE_BYTES, CacheConfig, ModelConfig
from octavo.errors import NotEnoughMemory
from octavo.ops.huge_pages import huge
from octavo.ops.kv import KV, LARGEST, QuantKV


class KVStore:
    def __init__(
        self, model: ModelConfig, cache: CacheConfig, dtype: torch.dtype, device: torch.device
    ):
        """dtype: of plain numbers, or of codes."""
        self.block_size = cache.block_size
        self.num_blocks = cache.num_blocks
        shape = (model.num_layers, 2, model.num_kv_heads, cache.block_size, model.head_dim)
        codes = torch.Size(shape).numel()
        scales = torch.Size(shape[:-1]).numel() * KV_SCALE_BYTES
        record, kind = ((codes + scales,), torch.uint8) if dtype in LARGEST else (shape, dtype)
        try:
            self.tensor: Tensor = huge(
                torch.empty(cache.num_blocks + 1, *record, dtype=kind, device=device)
            )
        except RuntimeError as e:
            size = (cache.num_blocks + 1) * torch.Size(record).numel() * kind.itemsize / 2**30
            raise NotEnoughMemory(
                f"a KV pool of {cache.num_blocks} blocks takes {size:.2f} GiB, which {device} cannot give: "
                "lower num_blocks, max_model_len or gpu_memory_utilization, or compress it (kv_cache_dtype int8 or fp8)"
            ) from e
        self.tensor[0].zero_()  # padded entries of a batch may read it: zeros, never NaN
        self.view: KV = self.tensor
        if dtype in LARGEST:
            parts = self.tensor[:, :codes].view(dtype), self.tensor[:, codes:].view(torch.float32)
            self.view = QuantKV(parts[0].unflatten(1, shape), parts[1].unflatten(1, shape[:-1]))

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy blocks source[i] -> target[i] (int64 [n]). All are read before any is written."""
        self.tensor.index_copy_(0, target, self.tensor.index_select(0, source))
