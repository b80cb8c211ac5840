"""The modules of a model. Each holds parameters and lists the checkpoint tensors that fill them.

A module calls `ops` for the arithmetic. It knows neither the device nor the architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from octavo.model.base import Matrix, Slot
from octavo.ops import Ops
from octavo.ops.weight import JoinedWeight, QuantWeight


class Linear(Matrix):
    """One matrix product for several projections of the same input, such as q, k and v."""

    def __init__(self, ops: Ops, inputs: int, parts: Mapping[str, int], bias: bool = False):
        super().__init__(ops, inputs, parts)
        self.bias = (
            nn.Parameter(torch.empty(sum(parts.values())), requires_grad=False) if bias else None
        )

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """hidden [T, in] -> [T, out], plus the residual, whose memory may be overwritten."""
        return self.ops.linear(hidden, self.weight, self.bias, residual)

    def slots(
        self, prefix: str = "", transform: Callable[[Tensor], Tensor] | None = None
    ) -> dict[str, Slot]:
        """Return the slots of all parts. `transform` applies to the weights, not to the biases."""
        slots = {}
        first_output = 0
        for name, num_outputs in self.parts.items():
            rows = slice(first_output, first_output + num_outputs)
            slots[f"{prefix}{name}.weight"] = Slot(self.weight[rows], transform, self)
            if self.bias is not None:
                slots[f"{prefix}{name}.bias"] = Slot(self.bias[rows])
            first_output += num_outputs
        return slots


class Embedding(Matrix):
    def __init__(self, ops: Ops, num_embeddings: int, hidden_size: int, scale: float = 1.0):
        super().__init__(ops, hidden_size, {"embed_tokens": num_embeddings})
        self.scale = scale
        self.dtype = torch.get_default_dtype()

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> [T, hidden]"""
        return self.ops.embedding(token_ids, self.weight, self.scale).to(self.dtype)

    def slot(self) -> Slot:
        return Slot(self.weight, matrix=self)


def norm_weight(size: int) -> nn.Parameter:
    """Return the weight of a norm, which is float32 in every model: norms compute in float32."""
    return nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)


def pack_weights(model: nn.Module) -> None:
    """Let the backend choose the memory layout of all loaded weights.

    A plain embedding keeps its layout, because it is only looked up.
    """
    for module in model.modules():
        if isinstance(module, Matrix):
            if isinstance(module.weight, QuantWeight | JoinedWeight):
                module.weight = module.ops.pack(module.weight)
            elif isinstance(module, Linear):
                module.weight = nn.Parameter(
                    module.ops.pack(module.weight.data), requires_grad=False
                )
