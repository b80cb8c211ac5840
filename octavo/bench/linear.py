"""Matrix products of a model, one by one: how long each takes in each weight format, for some numbers of rows.

A product is timed as a decoder meets it: replayed from a graph, each time with other weights, so that they come from memory and
not from a cache.
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
from octavo.ops import Ops, select
from octavo.ops.reference import ReferenceOps
from octavo.ops.weight import QuantWeight, WeightFormat

FORMATS = ("int8", "int8-a8", "fp8", "int4-g128")
ROWS = (1, 4, 16, 64, 256, 1024, 4096)
# bytes of weights, at least, before the first ones are met again: four times the L2 cache of an
# H200
COLD = 2**28
MOST_COPIES = 64


class Product(NamedTuple):
    """One of the products of a step."""

    names: tuple[str, ...]  # of the tensors in its weight
    outputs: int
    inputs: int
    times: int  # in a step


def products(hf: dict[str, Any]) -> list[Product]:
    """The distinct ones of a model, as its config describes it."""
    cls = registry.find(hf)
    model = build(cls.parse_config(hf), cls, ReferenceOps(), torch.float32, "meta")
    tied = bool(hf.get("tie_word_embeddings"))
    matrices = [
        m for m in model.modules() if isinstance(m, Linear) or (tied and isinstance(m, Matrix))
    ]
    found: dict[tuple[int, int], list[tuple[str, ...]]] = {}
    for matrix in matrices:
        found.setdefault(tuple(matrix.weight.shape), []).append(tuple(matrix.parts))
    return [Product(names[0], *shape, len(names)) for shape, names in found.items()]


# ---- one product --------------------------------------------------------------------------------------------


def random_weight(form: WeightFormat, outputs: int, inputs: int, device: str) -> QuantWeight:
    """Any codes: speed does not depend on what they say. Scales make the products' results a few units large."""
    with torch.device(device):
        weight = QuantWeight.empty(form, outputs, inputs)
    weight.codes.random_(0, 256)
    if form.is_float:
        weight.codes &= 0xBF  # no infinite numbers, none that are none
    weight.scale.fill_(1 / (inputs**0.5 * (1 if form.is_float else 1 << (form.bits - 2))))
    if weight.least is not None:
        weight.least.fill_(-8 * float(weight.scale[0, 0]))
    return weight


def copies(make: Callable[[], Any]) -> list[Any]:
    """As many weights as are needed for the first to be forgotten when the last was read."""
    first = make()
    tensors = [first] if isinstance(first, Tensor) else list(first.buffers())
    size = sum(t.nbytes for t in tensors)
    return [first, *(make() for _ in range(min(MOST_COPIES, -(-COLD // size)) - 1))]


@torch.inference_mode()
def seconds(call: Callable[[Any], Any], weights: list[Any], device: str, repeat: int = 7) -> float:
    """Of one call, the median over rounds through all weights."""
    if device == "cpu":
        times = []
        for _ in range(2):
            start = time.perf_counter()
            call(weights[0])
            times.append(time.perf_counter() - start)
        return min(times)
    call(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(weight)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(repeat + 1):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(weights))
    return statistics.median(times[1:])


def plain_weights(product: Product, dtype: torch.dtype, device: str) -> list[Tensor]:
    def make() -> Tensor:
        return (
            torch.randn(product.outputs, product.inputs, dtype=dtype, device=device)
            / product.inputs**0.5
        )

    return copies(make)


def packed_weights(product: Product, form: WeightFormat, ops: Ops, device: str) -> list[Any]:
    """In the format that the product has in a model of this one."""
    form = quant.choose(form)(product.names)
    return copies(lambda: ops.pack(random_weight(form, product.outputs, product.inputs, device)))


# ---- measure ------------------------------------------------------------------------------------------------


def measure(
    hf: dict[str, Any],
    formats: tuple[str, ...] = FORMATS,
    rows: tuple[int, ...] = ROWS,
    done: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """One record for each format ("none" is plain weights), product and number of rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ops = select(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    records = []
    for product in products(hf):
        plain: dict[int, float] = {}
        for name in ("none", *formats):
            form = quant.parse(name)
            weights = (
                packed_weights(product, form, ops, device)
                if isinstance(form, WeightFormat)
                else plain_weights(product, dtype, device)
            )
            size = (
                weights[0].nbytes
                if isinstance(weights[0], Tensor)
                else sum(b.nbytes for b in weights[0].buffers())
            )
            for count in rows:
                x = torch.randn(count, product.inputs, device=device).to(dtype)
                took = seconds(partial(ops.linear, x), weights, device)
                plain.setdefault(count, took)
                records.append(
                    {
                        "product": "+".join(name.removesuffix("_proj") for name in product.names),
                        "outputs": product.outputs,
                        "inputs": product.inputs,
                        "times": product.times,
                        "format": name,
                        "rows": count,
                        "us": 1e6 * took,
                        "gb_s": (size + x.nbytes + count * product.outputs * x.itemsize)
                        / took
                        / 1e9,
                        "tflop_s": 2 * count * product.outputs * product.inputs / took / 1e12,
                        "ratio": plain[count] / took,
                    }
                )
                done()
            del weights
    return records


def step_ratios(records: list[dict[str, Any]]) -> dict[tuple[str, int], tuple[float, float]]:
    """(format, rows) -> microseconds of a step's products, and plain weights' time over it."""
    totals: dict[tuple[str, int], float] = {}
    for r in records:
        key = r["format"], r["rows"]
        totals[key] = totals.get(key, 0.0) + r["us"] * r["times"]
    return {(name, rows): (us, totals["none", rows] / us) for (name, rows), us in totals.items()}
