"""The CPU backend: kernels of our own for quantised weights, paged attention and whole decoders; oneDNN for plain weights.

A decode step on a CPU is one pass over the weights, at the speed of memory if the product keeps up. For a 1.1B Llama in
float32 on two AVX-512 cores it took 216 ms with 1 row and 513 ms with 4 rows through F.linear, and 113 ms and 118 ms with
weights that oneDNN packed. What is not overridden here is the reference, and so is everything where the kernels cannot run.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops import ForwardBatch
from octavo.ops.cpu.cpu_decoder import (
    KINDS,
    FusedDecoder,
    attention_record,
    cache_record,
    fits,
    spare_bytes,
    write_float,
)
from octavo.ops.cpu.thread_pool import Workers, workers
from octavo.ops.cpu.weight_layout import PackedWeight
from octavo.ops.fused_spec import DecoderSpec, Fused
from octavo.ops.kv import KV, LARGEST
from octavo.ops.reference import ReferenceOps, gathered, noise_key
from octavo.ops.weight import QuantWeight

# oneDNN lays a weight out for a number of rows. Of 1, 4, 8, 16 and 32, 4 was fastest at 1 to 64 rows, provided that fewer
# rows are padded up to it: as it came, 1 row took 1.4 times as long as 4.
ROWS = 4


class CpuOps(ReferenceOps):
    name = "cpu"

    def __init__(self) -> None:
        # The model has weights in the kernels' layout. Their products round activations to 8 bits, which makes a difference in
        # the last bit of a float one of a hundredth. So attention and activations run in the kernels as well: torch's results
        # for a row depend on the number of rows, and a request's tokens must not depend on what is computed beside it.
        self.packed = False

    def pack(self, weight: Tensor | QuantWeight) -> Tensor | PackedWeight | QuantWeight:
        if isinstance(weight, QuantWeight):
            team = workers()
            if team is None or weight.format.is_float:
                return weight
            self.packed = True
            return PackedWeight(weight, team.step.LANES)
        if not torch.backends.mkldnn.is_available() or weight.dtype not in (
            torch.float32,
            torch.bfloat16,
        ):
            return weight
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)

    def linear(
        self,
        x: Tensor,
        weight: Tensor | PackedWeight | QuantWeight,
        bias: Tensor | None = None,
        add: Tensor | None = None,
    ) -> Tensor:
        """A quantised weight is multiplied with x rounded to int8, a scale for each row and 32 inputs."""
        if isinstance(weight, PackedWeight):
            y = product(x.float().contiguous(), weight)
            y = (y if bias is None else y.add_(bias)).to(x.dtype)
            return y if add is None else y.add_(add)
        if isinstance(weight, QuantWeight) or not weight.is_mkldnn:
            return super().linear(x, weight, bias, add)
        rows = x.shape[0]
        if rows < ROWS:
            x = F.pad(x, (0, 0, 0, ROWS - rows))
        y = torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight, bias, "none", [], "")[:rows]
        return y if add is None else y + add

    def embedding(
        self, ids: Tensor, weight: Tensor | PackedWeight | QuantWeight, scale: float = 1.0
    ) -> Tensor:
        if not isinstance(weight, PackedWeight):
            return super().embedding(ids, weight, scale)
        team = _team()
        step = team.step
        out = torch.empty(len(ids), weight.shape[1])
        job = np.zeros(step.FIELDS, dtype=np.int64)
        job[step.KIND] = step.EMBED
        job[step.ROWS] = len(ids)
        job[step.WEIGHT] = weight.record.ctypes.data
        job[step.IDS] = ids.data_ptr()
        job[step.Y] = out.data_ptr()
        write_float(job, step.FACTOR, scale)
        with team.lock:
            team.run(job)
        return out

    def attention(
        self, q: Tensor, kv: KV, batch: ForwardBatch, scale: float, window: int = 0
    ) -> Tensor:
        """Over plain weights torch attends too: its threads spin after every product and would be in the way of ours. Codes
        it would have to expand first: they are read in place."""
        read_in_place = kv.dtype in (torch.float16, *LARGEST) and q.dtype == torch.float32
        team = workers() if self.packed or read_in_place else None
        if team is None:
            return super().attention(q, kv, batch, scale, window)
        lanes = team.step.LANES
        dim = kv.shape[-1]
        if q.dtype == torch.float32 and kv.dtype in KINDS and dim % lanes == 0:
            return paged_attention(team, q.contiguous(), kv, batch, scale, window)
        if not self.packed:
            return super().attention(q, kv, batch, scale, window)
        padding = (0, -dim % lanes)
        pages, batch = padded_pages(kv, batch, padding)
        queries = F.pad(q.float(), padding).contiguous()
        out = paged_attention(team, queries, pages, batch, scale, window)
        return out[..., :dim].to(q.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return activated(gate_up, gelu=False) if self.packed else super().silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return activated(gate_up, gelu=True) if self.packed else super().gelu_mul(gate_up)

    def gelu(self, x: Tensor) -> Tensor:
        return activated(x, gelu=True, gated=False) if self.packed else super().gelu(x)

    def shift(self, kv: Tensor, blocks: Tensor, by: int, cos_sin: Tensor) -> None:
        team = workers() if kv.dtype in (torch.float32, torch.float16) else None
        if team is None or kv.shape[-1] // 2 % team.step.LANES:
            return super().shift(kv, blocks, by, cos_sin)
        # YaRN's are scaled: the keys have had that already
        cos, sin = cos_sin[by].float() / cos_sin[0, 0].float()
        angles = torch.stack((cos, -sin))
        step = team.step
        job = np.zeros(step.FIELDS, dtype=np.int64)
        record = cache_record(team, kv)
        blocks = blocks.contiguous()
        job[step.KIND] = step.SHIFT
        job[step.ROWS] = len(blocks)
        job[step.LAYER_COUNT] = kv.shape[1]
        job[step.BATCH] = record.ctypes.data
        job[step.IDS] = blocks.data_ptr()
        job[step.X] = angles.data_ptr()
        with team.lock:
            team.run(job)

    def kv_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """The kernels, which compute in float32, read no bfloat16."""
        return tuple(
            kind
            for kind in super().kv_dtypes(dtype)
            if (dtype, kind) != (torch.float32, torch.bfloat16)
        )

    def fuse(self, decoder: DecoderSpec) -> Fused | None:
        team = workers() if isinstance(decoder.layers[0].qkv, PackedWeight) else None
        return (
            FusedDecoder(decoder, team)
            if team is not None and fits(decoder, team.step.LANES)
            else None
        )

    def choose(
        self,
        logits: Tensor,
        rows: Tensor,
        temperature: Tensor,
        seed_low: Tensor,
        seed_high: Tensor,
        position: Tensor,
    ) -> Tensor:
        """Noise is computed only for rows that want it, and in those for the tokens that may win. Logits are read where they lie:
        torch copies rows with threads of its own, which then spin where ours should work."""
        if logits.dtype != torch.float32:
            return super().choose(logits, rows, temperature, seed_low, seed_high, position)
        values = logits.numpy()
        best = values.argmax(1)
        lost = ~np.isfinite(values[np.arange(len(best)), best])
        chosen = torch.from_numpy(best)
        at = rows.long()
        heat = temperature[at]
        if not heat.any():
            best[lost] = -1
            return chosen.int()
        team = workers()
        if team is None:
            return super().choose(logits, rows, temperature, seed_low, seed_high, position)
        keys = noise_key(seed_low[at], seed_high[at], position).long()
        step = team.step
        logits = logits.contiguous()
        job = np.zeros(step.FIELDS, dtype=np.int64)
        job[step.KIND], job[step.ROWS], job[step.INNER] = step.CHOOSE, *logits.shape
        job[step.X] = logits.data_ptr()
        job[step.Y] = chosen.data_ptr()
        job[step.IDS] = keys.data_ptr()
        job[step.HEAT] = heat.data_ptr()
        with team.lock:
            team.run(job)
        best[lost] = -1
        return chosen.int()


def _team() -> Workers:
    team = workers()
    assert team is not None  # a packed weight exists only where the kernels run
    return team


def paged_attention(
    team: Workers, q: Tensor, kv: KV, batch: ForwardBatch, scale: float, window: int
) -> Tensor:
    """ops.attention for q float32, contiguous, and kv float32, float16 or codes, of which a layer's part of a block is
    contiguous."""
    step = team.step
    out = torch.empty_like(q)
    job = np.zeros(step.FIELDS, dtype=np.int64)
    with team.lock:
        record = attention_record(team, batch, q.shape[1], kv, scale)
        a = step.attention_jit
        record[a.QUERY] = q.data_ptr()
        record[a.QUERY_STRIDE] = q.stride(0) * 4
        record[a.OUT] = out.data_ptr()
        job[step.KIND] = step.ATTENTION
        job[step.BATCH] = record.ctypes.data
        job[step.WINDOW_OF] = window
        team.run(job)
    return out


def padded_pages(
    kv: KV, batch: ForwardBatch, padding: tuple[int, int]
) -> tuple[Tensor, ForwardBatch]:
    """The blocks that a batch reads as float32, heads padded with zeros to whole vectors, and the batch with a table of these
    copies: for KV that the kernels cannot read in place."""
    block_size = kv.shape[-2]
    widths = [-(-span.end // block_size) for span in batch.spans]
    rows = batch.slots.tolist()
    blocks = [batch.block_table[row, :width] for row, width in zip(rows, widths, strict=True)]
    pages = F.pad(gathered(kv, torch.cat(blocks)).float(), padding)
    table = torch.zeros(len(rows), max(widths), dtype=torch.int32)
    first = 0
    for i, width in enumerate(widths):
        table[i, :width] = torch.arange(first, first + width, dtype=torch.int32)
        first += width
    numbers = torch.arange(len(rows), dtype=torch.int32)
    return pages, replace(batch, block_table=table, slots=numbers)


def activated(x: Tensor, gelu: bool, gated: bool = True) -> Tensor:
    """act(gate) * up of x [T, 2 * inter], or act(x) of x [T, inter] where it is not gated -> [T, inter]"""
    team = _team()
    step = team.step
    source = x.float().contiguous()
    rows, width = source.shape
    if gated:
        width //= 2
    out = torch.empty(rows, width)
    job = np.zeros(step.FIELDS, dtype=np.int64)
    job[step.KIND] = step.ACTIVATE
    job[step.ROWS] = rows
    job[step.INNER] = width
    job[step.GELU] = int(gelu)
    job[step.LAYER_COUNT] = int(not gated)
    job[step.X] = source.data_ptr()
    job[step.Y] = out.data_ptr()
    with team.lock:
        job[step.SPARE] = team.memory("spare", step.ACTIVATE_BYTES * team.threads)
        job[step.SPARE_SIZE] = step.ACTIVATE_BYTES
        team.run(job)
    return out.to(x.dtype)


def product(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [T, in] float32, contiguous -> [T, out]"""
    team = _team()
    step = team.step
    rows = len(x)
    y = torch.empty(rows, weight.shape[0])
    job = np.zeros(step.FIELDS, dtype=np.int64)
    job[step.KIND] = step.PRODUCT
    job[step.ROWS] = rows
    job[step.WEIGHT] = weight.record.ctypes.data
    job[step.X] = x.data_ptr()
    job[step.Y] = y.data_ptr()
    spare = spare_bytes(step.LANES, step.TILE, weight.shape[1] + weight.group)
    with team.lock:
        job[step.QUANTIZED] = team.memory(
            "quantized", rows * step.row_bytes.py_func(weight.shape[1], weight.group)
        )
        job[step.SPARE] = team.memory("spare", spare * team.threads)
        job[step.SPARE_SIZE] = spare
        team.run(job)
    return y
