"""Weight formats: their names, the quantisation of numbers, and the format of each weight.

    float32, bfloat16, float16      plain numbers (the dtype option of LLM)
    int8                            one scale for each output
    int8-g32                        one scale for each 32 inputs (GGUF's Q8_0)
    int8-a8                         as int8; activations may be rounded to 8 bits too, row by row
    fp8                             e4m3, one scale for each output; activations are rounded to e4m3
                                    too, with one scale for each row
    fp8-a16                         e4m3, one scale for each output; activations are not rounded
    int4-g32, -g64, -g128           one scale for each group, codes around 8 (g32: GGUF's Q4_0)
    int4-g32-asym, ...              a scale and a minimum for each group (g32: GGUF's Q4_1)

Tensors are quantised one by one as they are read, so the model never exists at full precision.
octavo.ops.weight defines the meaning of codes. This module reads no files and contains no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.errors import CheckpointError, InvalidRequest
from octavo.ops.fp8_linear import E4M3_MAX
from octavo.ops.weight import QuantWeight, WeightFormat

GROUPS = (32, 64, 128)
EIGHT_BITS = [
    WeightFormat(8, 0),
    WeightFormat(8, 32),
    WeightFormat(8, 0, quantizes_activations=True),
    WeightFormat(8, 0, is_float=True, quantizes_activations=True),
    WeightFormat(8, 0, is_float=True),
]
FORMATS = {
    str(form): form
    for form in EIGHT_BITS + [WeightFormat(4, g, a) for a in (False, True) for g in GROUPS]
}
NAMES = ("auto", "none", *FORMATS)
# The embedding and the head have 8 bits when the layers have 4. In the embedded model they are a
# fifth of the weights, and int4-g32-asym for them raised perplexity by 8%. In fp8 models they are
# int8, whose errors are smaller than those of e4m3, and the head's activations are not rounded.
EDGE_FORMAT = WeightFormat(8, 32)
FP8_EDGE_FORMAT = WeightFormat(8, 0)
EDGE_NAMES = {"embed_tokens", "lm_head"}
CHUNK = {"cpu": 1 << 20, "cuda": 1 << 24}  # values quantised at a time, to keep temporaries small
# The 4-bit ranges to try. Clipping the largest values often costs less than coarser steps.
SHRINK_FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8)


def parse(name: str | None) -> WeightFormat | str:
    """Return the format of this name. "auto" and "none" are returned as such; None is "auto"."""
    if name is None or name in ("auto", "none"):
        return name or "auto"
    if name not in FORMATS:
        raise InvalidRequest(
            f"quantization (--quant) must be one of {', '.join(NAMES)}, not {name!r}",
            "quantization",
        )
    return FORMATS[name]


def choose(weight_format: WeightFormat) -> Callable[[Iterable[str]], WeightFormat]:
    """Return a function from the names of a weight's parts to its format.

    `weight_format` is the format that was requested.
    """
    edge_format = EDGE_FORMAT if weight_format.bits == 4 else weight_format
    if weight_format.is_float:
        edge_format = FP8_EDGE_FORMAT
    return lambda names: edge_format if EDGE_NAMES.intersection(names) else weight_format


def for_cpu(weight_format: WeightFormat) -> WeightFormat:
    """Return the nearest format that the CPU kernels support.

    The CPU kernels read float16 scales for groups of 32 or more inputs, and minima for 4 bits only.
    For 4-bit codes only the scales are rounded, by a hundredth of a step. Other codes are quantised
    again, in steps of 1/254. fp8 has no CPU kernels: the reference computes its products.
    """
    if weight_format.is_float:
        return weight_format
    if weight_format.bits == 4:
        return weight_format._replace(float32_scales=False)
    return (
        EDGE_FORMAT if weight_format.float32_scales or weight_format.asymmetric else weight_format
    )


def fill(target: QuantWeight, value: Tensor | QuantWeight) -> None:
    """Quantise value [out, in] into the target, or copy its codes if the formats are the same."""
    if (
        isinstance(value, QuantWeight)
        and value.format._replace(float32_scales=target.format.float32_scales) == target.format
    ):
        target.codes.copy_(value.codes)
        for destination, source in (
            (target.scale, value.scale),
            (target.least, value.least),
            (target.input_scale, value.input_scale),
        ):
            if destination is not None and source is not None:
                destination.copy_(source)
                if destination.dtype != source.dtype and not destination.isfinite().all():
                    raise CheckpointError(
                        "a weight has scales that float16 cannot hold: "
                        'load it with quantization="none"'
                    )
        return
    if target.input_scale is not None:
        raise CheckpointError(
            "a weight with a static scale of its activations cannot be rearranged: load the "
            'checkpoint with quantization="none"'
        )
    numbers = value.dequantize() if isinstance(value, QuantWeight) else value
    device = target.codes.device
    chunk_rows = max(1, CHUNK[device.type] // numbers.shape[1])
    for first_row in range(0, len(numbers), chunk_rows):
        rows = slice(first_row, first_row + chunk_rows)
        _quantize(numbers[rows].to(device, torch.float32), target[rows])


def quantized(values: Tensor, like: QuantWeight) -> QuantWeight:
    """Return values [out, in] in the format of another weight, and on its device."""
    with like.codes.device:
        weight = QuantWeight.empty(like.format, *values.shape)
    fill(weight, values)
    return weight


def _quantize(values: Tensor, target: QuantWeight) -> None:
    weight_format = target.format
    (outputs, inputs) = values.shape
    group_size = weight_format.group_size or inputs
    grouped = F.pad(values, (0, -inputs % group_size)).view(outputs, -1, group_size)
    least: Tensor | None = None
    if weight_format.is_float:
        scale = (grouped.abs().amax(2) / E4M3_MAX).half()
        codes = (
            (grouped * _inverse(scale))
            .clamp_(-E4M3_MAX, E4M3_MAX)
            .to(torch.float8_e4m3fn)
            .view(torch.uint8)
        )
    elif weight_format.bits == 8:
        scale = (grouped.abs().amax(2) / 127).half()
        codes = _codes(grouped, scale, None, weight_format)
    else:
        scale, least, codes = _search(grouped, weight_format)
    target.scale.copy_(scale)
    if target.least is not None and least is not None:
        target.least.copy_(least)
    codes = codes.view(outputs, -1)[:, :inputs]
    if weight_format.bits == 4:
        codes = F.pad(codes, (0, inputs % 2), value=weight_format.zero_point)
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    target.codes.copy_(codes)


def _codes(
    grouped: Tensor, scale: Tensor, least: Tensor | None, weight_format: WeightFormat
) -> Tensor:
    """Return the nearest codes [out, groups, group_size] for the scales that will be stored."""
    inverse = _inverse(scale)
    shifted = (
        grouped * inverse + weight_format.zero_point
        if least is None
        else (grouped - least.float()[:, :, None]) * inverse
    )
    return (
        shifted.round_()
        .clamp_(1 if weight_format.bits == 8 else 0, (1 << weight_format.bits) - 1)
        .to(torch.uint8)
    )


def _inverse(scale: Tensor) -> Tensor:
    """scale [out, groups] -> 1 / scale [out, groups, 1]; the inverse of 0 is 0."""
    step_size = scale.float()
    return torch.where(step_size == 0, 0.0, 1 / step_size)[:, :, None]


def _search(grouped: Tensor, weight_format: WeightFormat) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return scales, minima and codes of the range with the smallest squared error per group."""
    low = grouped.amin(2)
    high = grouped.amax(2)
    best: tuple[Tensor, Tensor | None, Tensor] | None = None
    least_error = torch.full_like(low, torch.inf)
    for shrink in SHRINK_FACTORS:
        if weight_format.asymmetric:
            scale = ((high - low) * (shrink / 15)).half()
            least = ((high + low) / 2 - scale.float() * 7.5).half()
        else:
            # The value of largest magnitude gets code 0, which reaches a step further than code 15.
            scale = (torch.where(high > -low, high, low) * (-shrink / 8)).half()
            least = None
        codes = _codes(grouped, scale, least, weight_format)
        values = (codes.float() - weight_format.zero_point) * scale.float()[:, :, None]
        if least is not None:
            values += least.float()[:, :, None]
        error = (values - grouped).square_().sum(2)
        if best is None:
            best = (scale, least, codes)
            least_error = error
            continue
        better = error < least_error
        least_error = torch.where(better, error, least_error)
        best = (
            torch.where(better, scale, best[0]),
            None if least is None or best[1] is None else torch.where(better, least, best[1]),
            torch.where(better[:, :, None], codes, best[2]),
        )
    assert best is not None
    return best
