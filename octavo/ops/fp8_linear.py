"""Products of e4m3 weights with activations that are rounded to e4m3, as in fp8 checkpoints.

A row of activations is divided into the groups of the weight: groups of 128 inputs, or one group
for the whole row. The scale of a group is dynamic or static:

    dynamic     scale[t, g] = largest magnitude of the group / 448
    static      scale[t, g] = a number of the checkpoint, the same for every row

    code[t, k] = e4m3(activation[t, k] * (1 / scale[t, g])), and values beyond 448 become 448
    output[t, n] = sum over g of scale[t, g] * weight_scale[n, g] *
                   sum over k in g of code[t, k] * weight_code[n, k]

All sums are in float32. The codes of a row depend on nothing but the row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.weight import QuantWeight

E4M3_MAX = 448.0
LEAST_MAGNITUDE = 1e-30  # The largest magnitude of a group counts as this one if it is smaller.


def linear(hidden: Tensor, weight: QuantWeight, bias: Tensor | None = None) -> Tensor:
    """hidden [T, in] -> [T, out]"""
    group_size = weight.format.group_size or weight.shape[1]
    static_scale = None if weight.input_scale is None else weight.input_scale.amax()
    codes, scale = round_activations(hidden, group_size, static_scale)
    weight_codes = weight.codes.view(torch.float8_e4m3fn)
    weight_scale = weight.scale.float()
    shape = len(hidden), weight.shape[0]
    output = torch.zeros(shape, dtype=torch.float32, device=hidden.device)
    for group in range(scale.shape[1]):
        inputs = slice(group * group_size, (group + 1) * group_size)
        product = F.linear(codes[:, inputs].float(), weight_codes[:, inputs].float())
        output += product * scale[:, group, None] * weight_scale[None, :, group]
    if bias is not None:
        output += bias
    return output.to(hidden.dtype)


def round_activations(
    hidden: Tensor, group_size: int, static_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """hidden [T, in] -> codes [T, in] e4m3, scale [T, groups] float32"""
    inputs = hidden.shape[1]
    grouped = F.pad(hidden.float(), (0, -inputs % group_size)).unflatten(1, (-1, group_size))
    if static_scale is None:
        largest = grouped.abs().amax(2).clamp(min=LEAST_MAGNITUDE)
        # On a GPU, PyTorch multiplies by the inverse of a Python number, which rounds twice.
        scale = largest / torch.full_like(largest, E4M3_MAX)
    else:
        scale = static_scale.expand(grouped.shape[:2])
    scaled = grouped * (torch.ones_like(scale) / scale)[:, :, None]
    codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, :inputs], scale
