"""The modules of a model. Each holds parameters and lists the checkpoint tensors that fill them.

A module calls `ops` for the arithmetic. The layers are the same for every device and architecture.
A module that is divided between ranks (tensor_parallel.py) also sums or concatenates over the
ranks, so its result is that of the undivided module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.config import Share
from octavo.model.base import Matrix, TensorPart, WeightTarget
from octavo.ops import Ops
from octavo.ops.weight import JoinedWeight, QuantWeight


class Linear(Matrix):
    """One matrix product for several projections of the same input, such as q, k and v.

    With some of the outputs on this rank (column parallel), the result has those outputs only. With
    some of the inputs (row parallel), the products of all ranks are summed.
    """

    def __init__(
        self,
        ops: Ops,
        inputs: int | Share,
        parts: Mapping[str, int | Share],
        bias: bool = False,
    ):
        super().__init__(ops, inputs, parts)
        self.bias = (
            nn.Parameter(torch.empty(sum(self.parts.values())), requires_grad=False)
            if bias
            else None
        )

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """hidden [T, in] -> [T, out], plus the residual, whose memory may be overwritten."""
        if not self.inputs.is_part:
            return self.ops.linear(hidden, self.weight, self.bias, residual)
        total = self.ops.ranks.all_reduce(self.ops.linear(hidden, self.weight))
        if self.bias is not None:
            total += self.bias
        return total if residual is None else total.add_(residual)

    def weight_targets(
        self, prefix: str = "", transform: Callable[[Tensor], Tensor] | None = None
    ) -> dict[str, WeightTarget]:
        """Return the weight targets of all parts. `transform` does not apply to the biases."""
        targets = {}
        first_output = 0
        for name, num_outputs in self.parts.items():
            rows = slice(first_output, first_output + num_outputs)
            weight = self.weight[rows]
            targets[f"{prefix}{name}.weight"] = WeightTarget(
                weight, transform, self, self.part(name)
            )
            if self.bias is not None:
                share = self.outputs[name]
                part = TensorPart(share) if share.is_part else None
                targets[f"{prefix}{name}.bias"] = WeightTarget(self.bias[rows], part=part)
            first_output += num_outputs
        return targets


class Embedding(Matrix):
    def __init__(self, ops: Ops, num_embeddings: int | Share, hidden_size: int, scale: float = 1.0):
        super().__init__(ops, hidden_size, {"embed_tokens": num_embeddings})
        self.scale = scale
        self.dtype = torch.get_default_dtype()

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> [T, hidden]"""
        return self.rows(token_ids, self.scale).to(self.dtype)

    def rows(self, token_ids: Tensor, scale: float = 1.0) -> Tensor:
        """token_ids [T] -> [T, hidden], times scale. Ranks with other tokens add zeros."""
        share = self.outputs["embed_tokens"]
        if not share.is_part:
            return self.ops.embedding(token_ids, self.weight, scale)
        local_ids = token_ids - share.ranges[0].start
        is_foreign = (local_ids < 0) | (local_ids >= share.count)
        rows = self.ops.embedding(local_ids.masked_fill(is_foreign, 0), self.weight, scale)
        return self.ops.ranks.all_reduce(rows.masked_fill_(is_foreign[:, None], 0))

    def weight_target(self) -> WeightTarget:
        return WeightTarget(self.weight, matrix=self, part=self.part("embed_tokens"))


def vocabulary_logits(head: Matrix, hidden: Tensor) -> Tensor:
    """hidden [R, hidden] -> logits [R, vocab]. Each rank computes the logits of its own tokens."""
    logits = head.ops.logits(hidden, head.weight)
    (share,) = head.outputs.values()
    if not share.is_part:
        return logits
    ranks = head.ops.ranks
    width = -(-share.total // ranks.size)
    padded = F.pad(logits, (0, width - share.count))
    return ranks.all_gather(padded)[:, : share.total]


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
