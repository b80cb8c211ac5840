"""Measures each matrix product of a model, in each weight format and for several row counts.

A product is timed as a decoder runs it: it is replayed from a graph with other weights each time,
so that the weights come from memory and not from a cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.model import build, quant, registry
from octavo.model.base import Matrix
from octavo.model.layers import Linear
from octavo.ops import Ops
from octavo.ops.backends import select
from octavo.ops.reference import ReferenceOps
from octavo.ops.weight import QuantWeight, WeightFormat

FORMATS = ("int8", "int8-a8", "fp8", "fp8-a16", "int4-g128")
ROWS = (1, 4, 16, 64, 256, 1024, 4096)
# The least bytes of weights between two uses of the same weight: four times the L2 cache of an
# H200.
COLD_BYTES = 2**28
MAX_COPIES = 64


class Product(NamedTuple):
    """A matrix product of a step."""

    names: tuple[str, ...]  # names of the tensors in the weight
    outputs: int
    inputs: int
    times: int  # how often a step computes it


def products(hf_config: dict[str, Any]) -> list[Product]:
    """Return the distinct products of a model with this config."""
    model_class = registry.find(hf_config)
    model = build(
        model_class.parse_config(hf_config), model_class, ReferenceOps(), torch.float32, "meta"
    )
    tied = bool(hf_config.get("tie_word_embeddings"))
    matrices = [
        module
        for module in model.modules()
        if isinstance(module, Linear) or (tied and isinstance(module, Matrix))
    ]
    names_by_shape: dict[tuple[int, int], list[tuple[str, ...]]] = {}
    for matrix in matrices:
        names_by_shape.setdefault(tuple(matrix.weight.shape), []).append(tuple(matrix.parts))
    return [Product(names[0], *shape, len(names)) for shape, names in names_by_shape.items()]


# ---- one product ---------------------------------------------------------------------------------


def random_weight(
    weight_format: WeightFormat, outputs: int, inputs: int, device: str
) -> QuantWeight:
    """Return a weight with random codes, because speed does not depend on the codes.

    The scales keep the results of products at a few units.
    """
    with torch.device(device):
        weight = QuantWeight.empty(weight_format, outputs, inputs)
    weight.codes.random_(0, 256)
    if weight_format.is_float:
        weight.codes &= 0xBF  # excludes infinities and NaN
    code_size = 1 if weight_format.is_float else 1 << (weight_format.bits - 2)
    weight.scale.fill_(1 / (inputs**0.5 * code_size))
    if weight.least is not None:
        weight.least.fill_(-8 * float(weight.scale[0, 0]))
    return weight


def copies(make_weight: Callable[[], Any]) -> list[Any]:
    """Return enough weights that reading all of them evicts the first from the cache."""
    first_weight = make_weight()
    count = min(MAX_COPIES, -(-COLD_BYTES // tensor_bytes(first_weight)))
    return [first_weight, *(make_weight() for _ in range(count - 1))]


def tensor_bytes(weight: Any) -> int:
    """Return the bytes of a plain or packed weight."""
    if isinstance(weight, Tensor):
        return weight.nbytes
    return sum(buffer.nbytes for buffer in weight.buffers())


@torch.inference_mode()
def seconds(call: Callable[[Any], Any], weights: list[Any], device: str, repeat: int = 7) -> float:
    """Return the seconds of one call: the median over rounds through all weights."""
    if device == "cpu":
        elapsed_times = []
        for _ in range(2):
            start = time.perf_counter()
            call(weights[0])
            elapsed_times.append(time.perf_counter() - start)
        return min(elapsed_times)
    call(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(weight)
    start_event = torch.cuda.Event(enable_timing=True)
    end_event = torch.cuda.Event(enable_timing=True)
    elapsed_times = []
    for _ in range(repeat + 1):
        start_event.record()
        graph.replay()
        end_event.record()
        end_event.synchronize()
        elapsed_times.append(start_event.elapsed_time(end_event) / 1e3 / len(weights))
    return statistics.median(elapsed_times[1:])


def plain_weights(product: Product, dtype: torch.dtype, device: str) -> list[Tensor]:
    def make() -> Tensor:
        weight = torch.randn(product.outputs, product.inputs, dtype=dtype, device=device)
        return weight / product.inputs**0.5

    return copies(make)


def packed_weights(
    product: Product, weight_format: WeightFormat, ops: Ops, device: str
) -> list[Any]:
    """Return weights in the format that the product has in a model with this format."""
    weight_format = quant.choose(weight_format)(product.names)
    return copies(
        lambda: ops.pack(random_weight(weight_format, product.outputs, product.inputs, device))
    )


# ---- measure -------------------------------------------------------------------------------------


def measure(
    hf_config: dict[str, Any],
    formats: tuple[str, ...] = FORMATS,
    row_counts: tuple[int, ...] = ROWS,
    advance: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Return one record for each product, format ("none" is plain weights) and number of rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ops = select(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    records = []
    for product in products(hf_config):
        plain_seconds: dict[int, float] = {}
        for format_name in ("none", *formats):
            weight_format = quant.parse(format_name)
            if isinstance(weight_format, WeightFormat):
                weights = packed_weights(product, weight_format, ops, device)
            else:
                weights = plain_weights(product, dtype, device)
            for row_count in row_counts:
                activations = torch.randn(row_count, product.inputs, device=device).to(dtype)
                elapsed = seconds(partial(ops.linear, activations), weights, device)
                plain_seconds.setdefault(row_count, elapsed)
                output_bytes = row_count * product.outputs * activations.itemsize
                moved_bytes = tensor_bytes(weights[0]) + activations.nbytes + output_bytes
                flops = 2 * row_count * product.outputs * product.inputs
                records.append(
                    {
                        "product": "+".join(name.removesuffix("_proj") for name in product.names),
                        "outputs": product.outputs,
                        "inputs": product.inputs,
                        "times": product.times,
                        "format": format_name,
                        "rows": row_count,
                        "us": 1e6 * elapsed,
                        "gb_s": moved_bytes / elapsed / 1e9,
                        "tflop_s": flops / elapsed / 1e12,
                        "ratio": plain_seconds[row_count] / elapsed,
                    }
                )
                advance()
            del weights
    return records


def step_ratios(records: list[dict[str, Any]]) -> dict[tuple[str, int], tuple[float, float]]:
    """Return the microseconds of a step's products, and the speedup over plain weights.

    The keys are (format, rows).
    """
    totals: dict[tuple[str, int], float] = {}
    for record in records:
        case = record["format"], record["rows"]
        totals[case] = totals.get(case, 0.0) + record["us"] * record["times"]
    return {
        (format_name, row_count): (microseconds, totals["none", row_count] / microseconds)
        for (format_name, row_count), microseconds in totals.items()
    }
