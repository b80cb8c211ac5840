"""The modules that models are made of: each holds parameters and says which checkpoint tensors fill them.

A layer asks `ops` for the arithmetic and knows neither the device nor the architecture it is part of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from octavo.model.base import Matrix, Slot
from octavo.ops import Ops
from octavo.ops.weight import JoinedWeight, QuantWeight


class Linear(Matrix):
    """One matrix product for several projections of the same input: q, k and v, or gate and up."""

    def __init__(self, ops: Ops, inputs: int, parts: Mapping[str, int], bias: bool = False):
        super().__init__(ops, inputs, parts)
        self.bias = (
            nn.Parameter(torch.empty(sum(parts.values())), requires_grad=False) if bias else None
        )

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """[T, in] -> [T, out], plus add, which is gone then"""
        return self.ops.linear(x, self.weight, self.bias, add)

    def slots(
        self, prefix: str = "", transform: Callable[[Tensor], Tensor] | None = None
    ) -> dict[str, Slot]:
        """Where the parts' tensors go; `transform` is for the weights."""
        slots = {}
        first = 0
        for name, size in self.parts.items():
            rows = slice(first, first + size)
            slots[f"{prefix}{name}.weight"] = Slot(self.weight[rows], transform, self)
            if self.bias is not None:
                slots[f"{prefix}{name}.bias"] = Slot(self.bias[rows])
            first += size
        return slots


class Embedding(Matrix):
    def __init__(self, ops: Ops, count: int, hidden: int, scale: float = 1.0):
        super().__init__(ops, hidden, {"embed_tokens": count})
        self.scale = scale
        self.dtype = torch.get_default_dtype()

    def forward(self, ids: Tensor) -> Tensor:
        """[T] -> [T, hidden]"""
        return self.ops.embedding(ids, self.weight, self.scale).to(self.dtype)

    def slot(self) -> Slot:
        return Slot(self.weight, matrix=self)


def norm_weight(size: int) -> nn.Parameter:
    """Norms keep float32 weights whatever the model's dtype: they are applied in float32 and weigh next to nothing."""
    return nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)


def pack_weights(model: nn.Module) -> None:
    """The weights are in place: hand them to the backend to lay out as it likes. A plain embedding is looked up as it is."""
    for module in model.modules():
        if isinstance(module, Matrix):
            if isinstance(module.weight, QuantWeight | JoinedWeight):
                module.weight = module.ops.pack(module.weight)
            elif isinstance(module, Linear):
                module.weight = nn.Parameter(
                    module.ops.pack(module.weight.data), requires_grad=False
                )
