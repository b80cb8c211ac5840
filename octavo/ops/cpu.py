"""What is worth doing otherwise on a CPU: matrix products with weights that oneDNN packed. The rest is the reference.

A decode step on a CPU is one pass over the weights, at the speed of memory if the product keeps up. For a 1.1B Llama in
float32 on two AVX-512 cores it took 216 ms with 1 row and 513 ms with 4 rows through F.linear, and 113 ms and 118 ms with
packed weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.reference import ReferenceOps

# oneDNN lays a weight out for a number of rows. Of 1, 4, 8, 16 and 32, 4 was fastest at 1 to 64 rows, provided that fewer
# rows are padded up to it: as it came, 1 row took 1.4 times as long as 4.
ROWS = 4


class CpuOps(ReferenceOps):
    name = "cpu"

    def pack(self, weight: Tensor) -> Tensor:
        if not torch.backends.mkldnn.is_available() or weight.dtype not in (torch.float32, torch.bfloat16):
            return weight
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not weight.is_mkldnn:
            return F.linear(x, weight, bias)
        rows = x.shape[0]
        if rows < ROWS:
            x = F.pad(x, (0, 0, 0, ROWS - rows))
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight, bias, "none", [], "")[:rows]
