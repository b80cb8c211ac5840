"""Weight formats: their names, how numbers become codes, and which format each weight of a model gets.

    float32, bfloat16, float16      as they are (LLM's dtype)
    int8                            a scale for each output; int8-g32: for each 32 inputs, which is GGUF's Q8_0
    int8-a8                         as int8, and activations may be rounded to 8 bits too, row by row
    fp8                             e4m3 and a scale for each output; activations as in int8-a8
    int4-g32, -g64, -g128           a scale for each group, codes around 8; int4-g32 is GGUF's Q4_0
    int4-g32-asym, ...              a scale and a smallest value for each group; int4-g32-asym is GGUF's Q4_1

A weight is quantised tensor by tensor as it is read, so the model never exists at full precision. What a code means is
octavo.ops.weight's. Knows no file and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.errors import CheckpointError, InvalidRequest
from octavo.ops.weight import Format, QuantWeight

GROUPS = (32, 64, 128)
EIGHT_BITS = [Format(8, 0), Format(8, 32), Format(8, 0, rounds=True), Format(8, 0, float=True)]
FORMATS = {
    str(form): form
    for form in EIGHT_BITS + [Format(4, g, a) for a in (False, True) for g in GROUPS]
}
NAMES = ("auto", "none", *FORMATS)
# The embedding and the head next to 4-bit layers: 8 bits. In the embedded model they are a fifth of the weights, and at
# int4-g32-asym they raised perplexity by 8%.
EDGE = Format(8, 32)
EDGE_NAMES = {"embed_tokens", "lm_head"}
CHUNK = {"cpu": 1 << 20, "cuda": 1 << 24}  # values quantised at a time: temporaries stay small
MOST = 448.0  # of e4m3
# 4-bit ranges tried: clipping the largest values often costs less than coarser steps
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)


def parse(name: str | None) -> Format | str:
    """A format by its name; "auto" and "none" stay what they are, and no name is "auto"."""
    if name is None or name in ("auto", "none"):
        return name or "auto"
    if name not in FORMATS:
        raise InvalidRequest(
            f"quantization is one of {', '.join(NAMES)}, not {name!r}", "quantization"
        )
    return FORMATS[name]


def choose(form: Format) -> Callable[[Iterable[str]], Format]:
    """The format of the weight whose parts are called so, when this one is asked for."""
    return lambda names: EDGE if form.bits == 4 and EDGE_NAMES.intersection(names) else form


def for_cpu(form: Format) -> Format:
    """The nearest format that the CPU's kernels read: scales of float16, of 32 inputs or more, least values for 4 bits only. Of
    4-bit codes only the scales are rounded, by a hundredth of a step; the others are quantised anew, to steps of 1/254."""
    if form.bits == 4:
        return form._replace(wide=False)
    return EDGE if form.wide or form.least else form


def fill(target: QuantWeight, value: Tensor | QuantWeight) -> None:
    """Quantise value [out, in] into the target, or copy it where its codes are the same already."""
    if isinstance(value, QuantWeight) and value.form._replace(wide=target.form.wide) == target.form:
        target.codes.copy_(value.codes)
        for to, info in ((target.scale, value.scale), (target.least, value.least)):
            if to is not None and info is not None:
                to.copy_(info)
                if to.dtype != info.dtype and not to.isfinite().all():
                    raise CheckpointError(
                        'a weight has scales that float16 cannot hold: load it with quantization="none"'
                    )
        return
    numbers = value.dequantize() if isinstance(value, QuantWeight) else value
    device = target.codes.device
    step = max(1, CHUNK[device.type] // numbers.shape[1])
    for first in range(0, len(numbers), step):
        rows = slice(first, first + step)
        _quantize(numbers[rows].to(device, torch.float32), target[rows])


def _quantize(values: Tensor, target: QuantWeight) -> None:
    form = target.form
    (outputs, inputs) = values.shape
    group = form.group or inputs
    grouped = F.pad(values, (0, -inputs % group)).view(outputs, -1, group)
    least: Tensor | None = None
    if form.float:
        scale = (grouped.abs().amax(2) / MOST).half()
        codes = (
            (grouped * _inverse(scale))
            .clamp_(-MOST, MOST)
            .to(torch.float8_e4m3fn)
            .view(torch.uint8)
        )
    elif form.bits == 8:
        scale = (grouped.abs().amax(2) / 127).half()
        codes = _codes(grouped, scale, None, form)
    else:
        scale, least, codes = _search(grouped, form)
    target.scale.copy_(scale)
    if target.least is not None and least is not None:
        target.least.copy_(least)
    codes = codes.view(outputs, -1)[:, :inputs]
    if form.bits == 4:
        codes = F.pad(codes, (0, inputs % 2), value=form.zero)
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    target.codes.copy_(codes)


def _codes(grouped: Tensor, scale: Tensor, least: Tensor | None, form: Format) -> Tensor:
    """The nearest codes [out, groups, group] for scales as they will be stored."""
    inverse = _inverse(scale)
    shifted = (
        grouped * inverse + form.zero
        if least is None
        else (grouped - least.float()[:, :, None]) * inverse
    )
    return shifted.round_().clamp_(1 if form.bits == 8 else 0, (1 << form.bits) - 1).to(torch.uint8)


def _inverse(scale: Tensor) -> Tensor:
    """[out, groups, 1]; of nothing, nothing."""
    step = scale.float()
    return torch.where(step == 0, 0.0, 1 / step)[:, :, None]


def _search(grouped: Tensor, form: Format) -> tuple[Tensor, Tensor | None, Tensor]:
    """Of a few ranges the one with the least squared error, for every group."""
    low = grouped.amin(2)
    high = grouped.amax(2)
    best: tuple[Tensor, Tensor | None, Tensor] | None = None
    least_error = torch.full_like(low, torch.inf)
    for shrink in SHRINK:
        if form.least:
            scale = ((high - low) * (shrink / 15)).half()
            least = ((high + low) / 2 - scale.float() * 7.5).half()
        else:  # the largest of either sign gets code 0, which reaches one step further than code 15
            scale = (torch.where(high > -low, high, low) * (-shrink / 8)).half()
            least = None
        codes = _codes(grouped, scale, least, form)
        values = (codes.float() - form.zero) * scale.float()[:, :, None]
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
