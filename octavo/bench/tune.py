"""Which way to cut up the GPU's products with quantised weights is fastest, over all products of a step but the head.

Ways that do not compile, do not fit or compute something else are left out. What is found goes into the tables of
octavo/ops/triton/quant/__init__.py, by hand.
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
from octavo.ops.weight import WeightFormat

ROWS = (1, 16, 32, 64, 128, 256)
THREADS = 12  # that compile
EDGES = {"lm_head", "embed_tokens"}


def candidates(form: WeightFormat, rows: int) -> list[Any]:
    """Ways that are worth trying for so many rows."""
    from octavo.ops.triton.quant.activation_gemm import Rounded
    from octavo.ops.triton.quant.hopper_gemm import SPLITS, TILES, known
    from octavo.ops.triton.quant.quant_gemm import Gemm
    from octavo.ops.triton.quant.quant_gemv import Gemv

    tall = min(256, max(16, 1 << (rows - 1).bit_length()))
    if form.quantizes_activations and rows > 16:
        tiles = [(tall, 64), (tall, 128)] + ([(128, 128), (128, 256)] if tall == 256 else [])
        return [
            Rounded(Gemm(m, n, 2, s, 2 if m * n <= 8192 else 1))
            for m, n in tiles
            for s in (3, 4, 5)
        ]
    found: list[Any] = []
    if rows == 1:
        found += [Gemv(n, warps) for n in (2, 4, 8) for warps in (2, 4, 8)]
    if rows <= 32:
        afters = (
            (True, False)
            if form.bits == 4 and form.group_size == 128 and not form.asymmetric
            else (False,)
        )
        found += [
            Gemm(tall, 64, b, s, r, a)
            for b, s in ((1, 4), (1, 6), (2, 4), (4, 3))
            for r in (2, 4)
            for a in afters
        ]
    elif rows <= 128:
        found += [
            Gemm(tall, n, b, s, r)
            for n, r in ((64, 2), (64, 3), (128, 1), (128, 2))
            for b, s in ((1, 3), (1, 4), (2, 3))
        ]
    else:
        shapes = (
            (256, 128, 1),
            (256, 64, 2),
            (128, 128, 1),
            (128, 128, 2),
            (128, 64, 2),
            (128, 256, 1),
        )
        found += [Gemm(m, n, 1, s, r) for m, n, r in shapes for s in (3, 4)]
    if rows > 32 and known(form):
        found += [tile._replace(split=split) for tile in TILES for split in SPLITS]
    return found


class TuningCase:
    """Products of one format and number of rows, and one small enough to be computed exactly beside them."""

    def __init__(
        self, form: WeightFormat, rows: int, weights: dict[Product, list[Any]], device: str
    ):
        from octavo.ops.triton import quant as packed

        dtype = torch.bfloat16 if device == "cuda" else torch.float16
        self.packed = packed
        self.weights = weights
        self.device = device
        self.exact = not form.quantizes_activations
        self.x = {p: torch.randn(rows, p.inputs, device=device).to(dtype) for p in weights}
        inputs = next(iter(weights)).inputs
        small = random_weight(form, 256, inputs, device)
        self.small = packed.TritonWeight(small)
        self.small_x = torch.randn(rows, inputs, device=device).to(dtype)
        self.want = self.small_x.float() @ small.dequantize().T

    def fault(self, how: Any) -> str | None:
        """Why this way is none. Compiles it, for every product."""
        try:
            with torch.inference_mode():
                for product, x in self.x.items():
                    self.packed.linear(x, self.weights[product][0], how=how)
                got = self.packed.linear(self.small_x, self.small, how=how).float()
                error = float((got - self.want).norm() / self.want.norm())
        except Exception as problem:  # whatever the compiler or the driver refuses
            return " ".join(str(problem).split())[:100] or type(problem).__name__
        return None if error < (0.01 if self.exact else 0.05) else f"off by {error:.2g}"

    def cost(self, how: Any) -> float:
        """Seconds."""

        def multiply(x: Tensor, weight: Any) -> Tensor:
            return self.packed.linear(x, weight, how=how)

        return sum(
            p.times * seconds(partial(multiply, x), self.weights[p], self.device, 3)
            for p, x in self.x.items()
        )


def tune(
    hf: dict[str, Any],
    formats: tuple[str, ...] = FORMATS,
    rows: tuple[int, ...] = ROWS,
    told: Callable[[str], None] = lambda line: None,
    device: str = "cuda",
) -> list[dict[str, Any]]:
    """The fastest way for each format and number of rows. `told` hears the three fastest, the present one, and what failed."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("ways to compute on a GPU can only be tried on one", "tune")
    from octavo.ops.triton import TritonOps

    ops = TritonOps()
    best = []
    for name in formats:
        form = quant.parse(name)
        assert isinstance(form, WeightFormat)
        weights = {
            p: packed_weights(p, form, ops, device)
            for p in products(hf)
            if not EDGES.intersection(p.names)
        }
        for count in rows:
            case = TuningCase(form, count, weights, device)
            present = case.packed.choose(count, torch.bfloat16, next(iter(weights.values()))[0])
            ways = list(dict.fromkeys([present, *candidates(form, count)]))
            case.fault(present)  # alone first: what the compiler prepares once is then in place
            with ThreadPoolExecutor(THREADS) as pool:
                faults = dict(zip(ways, pool.map(case.fault, ways), strict=True))
            for how, fault in faults.items():
                if fault is not None:
                    told(f"{name} {count} rows: no {how}: {fault}")
            costs = {how: case.cost(how) for how, fault in faults.items() if fault is None}
            order = sorted(costs, key=lambda how: costs[how])
            for how in dict.fromkeys(order[:3] + [present] * (present in costs)):
                told(
                    f"{name} {count} rows: {1e6 * costs[how]:8.1f} us  {how}{' (present)' if how == present else ''}"
                )
            if order:
                best.append(
                    {
                        "format": name,
                        "rows": count,
                        "how": str(order[0]),
                        "us": 1e6 * costs[order[0]],
                    }
                )
        del weights
        torch.cuda.empty_cache()
    return best
