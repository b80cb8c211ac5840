"""Finds the fastest kernel for products with quantized weights on a GPU.

The time is that of all products of a step except the head. Kernels that do not compile, do not fit
or compute a wrong result are left out. The results are copied by hand into the tables of
octavo/ops/triton/quant/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.bench.linear import FORMATS, Product, packed_weights, products, random_weight, seconds
from octavo.errors import InvalidRequest
from octavo.model import quant
from octavo.ops.weight import WeightFormat, rounds_activations

ROWS = (1, 16, 32, 64, 128, 256)
COMPILE_THREADS = 12
EDGE_NAMES = {"lm_head", "embed_tokens"}


def candidates(weight_format: WeightFormat, rows: int) -> list[Any]:
    """Return the kernels that are worth trying for this number of rows."""
    from octavo.ops.triton.quant.activation_gemm import Rounded
    from octavo.ops.triton.quant.hopper_gemm import SPLITS, TILES, hopper_supports_format
    from octavo.ops.triton.quant.quant_gemm import Gemm
    from octavo.ops.triton.quant.quant_gemv import Gemv

    kernels: list[Any] = []
    tile_rows = min(256, max(16, 1 << (rows - 1).bit_length()))
    if rounds_activations(weight_format) or (weight_format.quantizes_activations and rows > 16):
        tile_sizes = [(tile_rows, 64), (tile_rows, 128)]
        if tile_rows == 256:
            tile_sizes += [(128, 128), (128, 256)]
        for tile_height, tile_width in tile_sizes:
            residents = 2 if tile_height * tile_width <= 8192 else 1
            for stages in (3, 4, 5):
                kernels.append(Rounded(Gemm(tile_height, tile_width, 2, stages, residents)))
        return kernels
    if rows == 1:
        kernels += [Gemv(tile_width, warps) for tile_width in (2, 4, 8) for warps in (2, 4, 8)]
    if rows <= 32:
        is_grouped = weight_format.bits == 4 and weight_format.group_size == 128
        can_scale_after = is_grouped and not weight_format.asymmetric
        scale_after_options = (True, False) if can_scale_after else (False,)
        kernels += [
            Gemm(tile_rows, 64, blocks, stages, residents, scale_after)
            for blocks, stages in ((1, 4), (1, 6), (2, 4), (4, 3))
            for residents in (2, 4)
            for scale_after in scale_after_options
        ]
    elif rows <= 128:
        kernels += [
            Gemm(tile_rows, tile_width, blocks, stages, residents)
            for tile_width, residents in ((64, 2), (64, 3), (128, 1), (128, 2))
            for blocks, stages in ((1, 3), (1, 4), (2, 3))
        ]
    else:
        tile_shapes = (
            (256, 128, 1),
            (256, 64, 2),
            (128, 128, 1),
            (128, 128, 2),
            (128, 64, 2),
            (128, 256, 1),
        )
        kernels += [
            Gemm(tile_height, tile_width, 1, stages, residents)
            for tile_height, tile_width, residents in tile_shapes
            for stages in (3, 4)
        ]
    if rows > 32 and hopper_supports_format(weight_format):
        kernels += [tile._replace(split=split) for tile in TILES for split in SPLITS]
    return kernels


class TuningCase:
    """The products of one format and number of rows.

    A small product, which is also computed exactly, checks the result of a kernel.
    """

    def __init__(
        self, weight_format: WeightFormat, rows: int, weights: dict[Product, list[Any]], device: str
    ):
        from octavo.ops.triton import quant as packed_ops

        dtype = torch.bfloat16 if device == "cuda" else torch.float16
        self.packed_ops = packed_ops
        self.weights = weights
        self.device = device
        self.is_exact = not weight_format.quantizes_activations
        self.activations = {
            product: torch.randn(rows, product.inputs, device=device).to(dtype)
            for product in weights
        }
        inputs = next(iter(weights)).inputs
        small_weight = random_weight(weight_format, 256, inputs, device)
        self.small_weight = packed_ops.TritonWeight(small_weight)
        self.small_activations = torch.randn(rows, inputs, device=device).to(dtype)
        self.expected = self.small_activations.float() @ small_weight.dequantize().T

    def current_kernel(self) -> Any:
        """Return the kernel that the engine uses now."""
        rows = len(self.small_activations)
        weight = next(iter(self.weights.values()))[0]
        return self.packed_ops.choose_tiling(rows, torch.bfloat16, weight)

    def find_failure(self, kernel: Any) -> str | None:
        """Compile a kernel for every product. Return why it fails, or None."""
        try:
            with torch.inference_mode():
                for product, activations in self.activations.items():
                    self.packed_ops.linear(activations, self.weights[product][0], tiling=kernel)
                result = self.packed_ops.linear(
                    self.small_activations, self.small_weight, tiling=kernel
                ).float()
                error = float((result - self.expected).norm() / self.expected.norm())
        except Exception as exception:  # The compiler or the driver may raise anything.
            return " ".join(str(exception).split())[:100] or type(exception).__name__
        tolerance = 0.01 if self.is_exact else 0.05
        return None if error < tolerance else f"the result is off by {error:.2g}"

    def total_seconds(self, kernel: Any) -> float:
        """Return the seconds of all products of a step."""

        def multiply(activations: Tensor, weight: Any) -> Tensor:
            return self.packed_ops.linear(activations, weight, tiling=kernel)

        total = 0.0
        for product, activations in self.activations.items():
            call = partial(multiply, activations)
            total += product.times * seconds(call, self.weights[product], self.device, repeat=3)
        return total


def tune(
    hf_config: dict[str, Any],
    formats: tuple[str, ...] = FORMATS,
    rows: tuple[int, ...] = ROWS,
    report: Callable[[str], None] = lambda line: None,
    device: str = "cuda",
) -> list[dict[str, Any]]:
    """Return the fastest kernel for each format and number of rows.

    `report` gets a line for each of the three fastest kernels, the current one and those that fail.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest(
            "tuning measures GPU kernels and needs a CUDA GPU: run it on a machine that has one",
            "tune",
        )
    from octavo.ops.triton import TritonOps

    ops = TritonOps()
    fastest = []
    for format_name in formats:
        weight_format = quant.parse(format_name)
        assert isinstance(weight_format, WeightFormat)
        weights = {
            product: packed_weights(product, weight_format, ops, device)
            for product in products(hf_config)
            if not EDGE_NAMES.intersection(product.names)
        }
        for row_count in rows:
            case = TuningCase(weight_format, row_count, weights, device)
            title = f"{format_name} {row_count} rows"
            times = time_kernels(case, candidates(weight_format, row_count), title, report)
            if times:
                kernel, kernel_seconds = min(times.items(), key=lambda item: item[1])
                fastest.append(
                    {
                        "format": format_name,
                        "rows": row_count,
                        "how": str(kernel),
                        "us": 1e6 * kernel_seconds,
                    }
                )
        del weights
        torch.cuda.empty_cache()
    return fastest


def time_kernels(
    case: TuningCase, kernels: list[Any], title: str, report: Callable[[str], None]
) -> dict[Any, float]:
    """Return the seconds of each kernel that works. The current choice is measured too."""
    current = case.current_kernel()
    kernels = list(dict.fromkeys([current, *kernels]))
    # The first compilation runs alone, because it prepares what the others share.
    case.find_failure(current)
    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        failures = dict(zip(kernels, pool.map(case.find_failure, kernels), strict=True))
    for kernel, failure in failures.items():
        if failure is not None:
            report(f"{title}: {kernel} fails: {failure}")
    times = {
        kernel: case.total_seconds(kernel)
        for kernel, failure in failures.items()
        if failure is None
    }
    reported = sorted(times, key=lambda kernel: times[kernel])[:3]
    if current in times and current not in reported:
        reported.append(current)
    for kernel in reported:
        note = " (current)" if kernel == current else ""
        report(f"{title}: {1e6 * times[kernel]:8.1f} us  {kernel}{note}")
    return times
