"""The one KV tensor: `kv[block, layer, 2, kv_head, offset, dim]`.

Block-major, so that a block is one contiguous record across layers and copy on write is one copy. A layer sees the
strided view `kv[:, layer]`. Block 0 is padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.config import CacheConfig, ModelConfig
from octavo.errors import NotEnoughMemory


class KVStore:
    def __init__(self, model: ModelConfig, cache: CacheConfig, dtype: torch.dtype, device: torch.device):
        self.block_size, self.num_blocks = cache.block_size, cache.num_blocks
        shape = (cache.num_blocks + 1, model.num_layers, 2, model.num_kv_heads, cache.block_size, model.head_dim)
        try:
            self.tensor: Tensor = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as e:
            size = torch.Size(shape).numel() * dtype.itemsize / 2**30
            raise NotEnoughMemory(
                f"a KV pool of {cache.num_blocks} blocks takes {size:.2f} GiB, which {device} cannot give: "
                "lower num_blocks, max_model_len or gpu_memory_utilization"
            ) from e
        self.tensor[0].zero_()  # padded entries of a batch may read it: zeros, never NaN

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy blocks source[i] -> target[i] (int64 [n]). All are read before any is written."""
        self.tensor.index_copy_(0, target, self.tensor.index_select(0, source))
