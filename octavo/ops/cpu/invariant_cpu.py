"""Batch-invariant operators on a CPU: the bits of a row do not depend on the other rows of a step.

    products       oneDNN, with the weight in its own layout and between 4 and ROW_BLOCK rows.
                   Fewer rows are padded, more rows are computed in blocks
    attention      the kernels of this package: the order of a row's sums depends on positions alone
    activations    the same kernels. Torch computes the last numbers of a thread's part with
                   another exponential function than the rest
    norms, rope    torch: each row is reduced on its own

Products with quantised weights are batch-invariant already. docs/determinism.md has the promise,
and tests/test_determinism.py compares the bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.errors import InvalidRequest
from octavo.ops.cpu import CpuOps, can_reorder
from octavo.ops.cpu.thread_pool import thread_pool
from octavo.ops.cpu.weight_layout import CpuWeight
from octavo.ops.weight import QuantWeight

# oneDNN adds the inputs of an output in the same order for every number of rows up to this one.
# tests/ops/test_invariant_cpu.py tries all of them.
ROW_BLOCK = 512


class InvariantCpuOps(CpuOps):
    variant = "deterministic"

    def __init__(self) -> None:
        super().__init__()
        if thread_pool() is None:
            raise InvalidRequest(
                "deterministic needs the CPU kernels, which cannot run on this machine: leave it "
                "out",
                "deterministic",
            )
        self.packed = True  # attention and activations run in the kernels, for plain weights too
        # A tied embedding is not packed, because it is looked up too. The head has its own copy:
        # the address of an embedding -> the embedding, which keeps its address, and the copy.
        self.heads: dict[int, tuple[Tensor, Tensor]] = {}

    def pack(self, weight: Tensor | QuantWeight) -> Tensor | CpuWeight | QuantWeight:
        if isinstance(weight, Tensor):
            return self._reordered(weight)
        packed = super().pack(weight)
        if not isinstance(packed, CpuWeight):
            raise InvalidRequest(
                f"deterministic has no CPU kernel for weights of the format {weight.format}: use "
                "an integer format such as int8, or float32 weights",
                "deterministic",
            )
        return packed

    def _reordered(self, weight: Tensor) -> Tensor:
        if weight.dtype != torch.float32 or not can_reorder(weight.dtype):
            raise InvalidRequest(
                "deterministic on a CPU needs float32 or quantised weights, and a build of torch "
                f"with oneDNN; these weights are {str(weight.dtype).removeprefix('torch.')}: use "
                "dtype float32",
                "deterministic",
            )
        packed = super().pack(weight)
        assert isinstance(packed, Tensor)
        return packed

    def linear(
        self,
        hidden: Tensor,
        weight: Tensor | CpuWeight | QuantWeight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if not isinstance(weight, Tensor):
            return super().linear(hidden, weight, bias, residual)
        if not weight.is_mkldnn:
            key = weight.data_ptr()
            if key not in self.heads:
                self.heads[key] = (weight, self._reordered(weight))
            weight = self.heads[key][1]
        if len(hidden) <= ROW_BLOCK:
            return super().linear(hidden, weight, bias, residual)
        multiply = super().linear
        output = torch.cat([multiply(rows, weight, bias) for rows in hidden.split(ROW_BLOCK)])
        return output if residual is None else output + residual
