"""The CPU backend: JIT kernels for quantised weights, attention and decoders; oneDNN for the rest.

A decode step on a CPU is one pass over the weights, at memory speed if the product keeps up. For a
1.1B Llama in float32 on two AVX-512 cores it took 216 ms with 1 row and 513 ms with 4 rows through
F.linear, and 113 ms and 118 ms with weights that oneDNN packed. Ops that are not overridden here,
and all ops on machines where the kernels cannot run, are those of the reference.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops import ForwardBatch, SamplingColumns
from octavo.ops.cpu.cpu_decoder import (
    STORAGE_NAMES,
    FusedDecoder,
    attention_record,
    cache_record,
    scratch_bytes,
    supports,
    write_float,
)
from octavo.ops.cpu.cpu_draft_head import CpuDraftHead
from octavo.ops.cpu.cpu_step import CpuStep
from octavo.ops.cpu.thread_pool import ThreadPool, thread_pool
from octavo.ops.cpu.weight_layout import CpuWeight
from octavo.ops.fused_spec import (
    DecoderSpec,
    DraftHeadSpec,
    Fused,
    FusedDraftHead,
    FusedStep,
    StepSpec,
)
from octavo.ops.kv import KV, LARGEST
from octavo.ops.reference import ReferenceOps, gather_blocks, noise_key, rows_of
from octavo.ops.weight import QuantWeight

# oneDNN packs a weight for a number of rows. Of 1, 4, 8, 16 and 32, 4 was fastest at 1 to 64 rows
# if fewer rows are padded to it. Without padding, 1 row took 1.4 times as long as 4.
ROWS = 4

# oneDNN and torch each keep a compiled primitive, of about 0.6 MiB, for every number of rows that a
# weight was multiplied with: 1,024 primitives by default. 64 primitives serve the row counts of
# about a dozen steps, and compiling one takes 0.4 ms.
for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(variable, "64")


def can_reorder(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies with weights of this type in a layout of its own. bfloat16
    needs instructions that not every CPU has."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class CpuOps(ReferenceOps):
    name = "cpu"

    def __init__(self) -> None:
        # Whether the model has weights in the layout of the kernels. Products with them round
        # activations to 8 bits, which turns a difference in the last bit of a float into one of a
        # hundredth. So attention and activations run in the kernels too: the results of torch for a
        # row depend on the number of rows, but a request's tokens must not depend on its batch.
        self.packed = False

    def pack(self, weight: Tensor | QuantWeight) -> Tensor | CpuWeight | QuantWeight:
        if isinstance(weight, QuantWeight):
            pool = thread_pool()
            if pool is None or weight.format.is_float:
                return weight
            self.packed = True
            return CpuWeight(weight, pool.kernels.LANES)
        if not can_reorder(weight.dtype):
            return weight
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)

    def linear(
        self,
        hidden: Tensor,
        weight: Tensor | CpuWeight | QuantWeight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Multiply. For a quantised weight, hidden is rounded to int8, in groups of 32 inputs."""
        if isinstance(weight, CpuWeight):
            output = product(hidden.float().contiguous(), weight)
            output = (output if bias is None else output.add_(bias)).to(hidden.dtype)
            return output if residual is None else output.add_(residual)
        if isinstance(weight, QuantWeight) or not weight.is_mkldnn:
            return super().linear(hidden, weight, bias, residual)
        rows = hidden.shape[0]
        if rows < ROWS:
            hidden = F.pad(hidden, (0, 0, 0, ROWS - rows))
        output = torch.ops.mkldnn._linear_pointwise(
            hidden.contiguous(), weight, bias, "none", [], ""
        )[:rows]
        return output if residual is None else output + residual

    def embedding(
        self, token_ids: Tensor, weight: Tensor | CpuWeight | QuantWeight, scale: float = 1.0
    ) -> Tensor:
        if not isinstance(weight, CpuWeight):
            return super().embedding(token_ids, weight, scale)
        pool = _pool()
        kernels = pool.kernels
        output = torch.empty(len(token_ids), weight.shape[1])
        job = np.zeros(kernels.NUM_FIELDS, dtype=np.int64)
        job[kernels.JOB_KIND] = kernels.EMBED
        job[kernels.NUM_ROWS] = len(token_ids)
        job[kernels.WEIGHT] = weight.record.ctypes.data
        job[kernels.INDICES] = token_ids.data_ptr()
        job[kernels.OUTPUT] = output.data_ptr()
        write_float(job, kernels.FACTOR, scale)
        with pool.lock:
            pool.run(job)
        return output

    def attention(
        self, query: Tensor, kv_cache: KV, batch: ForwardBatch, scale: float, window: int = 0
    ) -> Tensor:
        """Compute attention with the kernels if the model has packed weights or KV has 8 bits.

        With plain weights torch computes attention too, because its threads spin after every
        product and would block ours. Torch would have to expand codes, which the kernels read in
        place.
        """
        read_in_place = kv_cache.dtype in (torch.float16, *LARGEST) and query.dtype == torch.float32
        pool = thread_pool() if self.packed or read_in_place else None
        if pool is None:
            return super().attention(query, kv_cache, batch, scale, window)
        lanes = pool.kernels.LANES
        head_dim = kv_cache.shape[-1]
        if (
            query.dtype == torch.float32
            and kv_cache.dtype in STORAGE_NAMES
            and head_dim % lanes == 0
        ):
            return paged_attention(pool, query.contiguous(), kv_cache, batch, scale, window)
        if not self.packed:
            return super().attention(query, kv_cache, batch, scale, window)
        padding = (0, -head_dim % lanes)
        padded_cache, batch = padded_blocks(kv_cache, batch, padding)
        queries = F.pad(query.float(), padding).contiguous()
        output = paged_attention(pool, queries, padded_cache, batch, scale, window)
        return output[..., :head_dim].to(query.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return apply_activation(gate_up, gelu=False) if self.packed else super().silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return apply_activation(gate_up, gelu=True) if self.packed else super().gelu_mul(gate_up)

    def gelu(self, hidden: Tensor) -> Tensor:
        return (
            apply_activation(hidden, gelu=True, gated=False)
            if self.packed
            else super().gelu(hidden)
        )

    def shift(self, kv_cache: Tensor, blocks: Tensor, distance: int, cos_sin: Tensor) -> None:
        pool = thread_pool() if kv_cache.dtype in (torch.float32, torch.float16) else None
        if pool is None or kv_cache.shape[-1] // 2 % pool.kernels.LANES:
            return super().shift(kv_cache, blocks, distance, cos_sin)
        # YaRN scales cos and sin. The keys are scaled already, so the scale is divided out.
        cos, sin = cos_sin[distance].float() / cos_sin[0, 0].float()
        angles = torch.stack((cos, -sin))
        kernels = pool.kernels
        job = np.zeros(kernels.NUM_FIELDS, dtype=np.int64)
        record = cache_record(pool, kv_cache)
        blocks = blocks.contiguous()
        job[kernels.JOB_KIND] = kernels.SHIFT
        job[kernels.NUM_ROWS] = len(blocks)
        job[kernels.NUM_LAYERS] = kv_cache.shape[1]
        job[kernels.BATCH] = record.ctypes.data
        job[kernels.INDICES] = blocks.data_ptr()
        job[kernels.INPUT] = angles.data_ptr()
        with pool.lock:
            pool.run(job)

    def kv_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """Return the dtypes of KV. The kernels compute in float32 and do not read bfloat16."""
        return tuple(
            kv_dtype
            for kv_dtype in super().kv_dtypes(dtype)
            if (dtype, kv_dtype) != (torch.float32, torch.bfloat16)
        )

    def fuse(self, decoder: DecoderSpec) -> Fused | None:
        pool = thread_pool() if isinstance(decoder.layers[0].qkv, CpuWeight) else None
        return (
            FusedDecoder(decoder, pool)
            if pool is not None and supports(decoder, pool.kernels.LANES)
            else None
        )

    def fuse_draft_head(self, head: DraftHeadSpec) -> FusedDraftHead | None:
        fused = self.fuse(head.decoder)
        is_packed = isinstance(head.embedding, CpuWeight) and isinstance(
            head.decoder.head, CpuWeight
        )
        return CpuDraftHead(head, fused) if isinstance(fused, FusedDecoder) and is_packed else None

    def fuse_step(self, model: StepSpec) -> FusedStep | None:
        fused = self.fuse(model.decoder)
        is_packed = isinstance(model.embedding, CpuWeight) and isinstance(
            model.decoder.head, CpuWeight
        )
        return CpuStep(model, fused) if isinstance(fused, FusedDecoder) and is_packed else None

    def choose(
        self, logits: Tensor, slots: Tensor, positions: Tensor, sampling: SamplingColumns
    ) -> Tensor:
        """Sample. Noise is computed only for rows with a temperature, and for tokens that may win.

        Logits are read in place: torch would copy rows with its own threads, which then spin on the
        cores of ours.
        """
        if logits.dtype != torch.float32:
            return super().choose(logits, slots, positions, sampling)
        values = logits.numpy()
        best = values.argmax(1)
        not_finite = ~np.isfinite(values[np.arange(len(best)), best])
        chosen = torch.from_numpy(best)
        rows = rows_of(sampling, slots)
        if not rows.temperature.any():
            best[not_finite] = -1
            return chosen.int()
        pool = thread_pool()
        if pool is None:
            return super().choose(logits, slots, positions, sampling)
        noise_keys = noise_key(rows.seed_low, rows.seed_high, positions).long()
        kernels = pool.kernels
        logits = logits.contiguous()
        num_rows, vocab_size = logits.shape
        job = np.zeros(kernels.NUM_FIELDS, dtype=np.int64)
        job[kernels.JOB_KIND] = kernels.CHOOSE
        job[kernels.NUM_ROWS] = num_rows
        job[kernels.WIDTH] = vocab_size
        job[kernels.INPUT] = logits.data_ptr()
        job[kernels.OUTPUT] = chosen.data_ptr()
        job[kernels.INDICES] = noise_keys.data_ptr()
        job[kernels.TEMPERATURE] = rows.temperature.data_ptr()
        job[kernels.TOP_P] = rows.top_p.data_ptr()
        job[kernels.TOP_K] = rows.top_k.data_ptr()
        job[kernels.MAX_DISTANCE] = rows.max_distance.data_ptr()
        with pool.lock:
            job[kernels.SCRATCH] = pool.memory("scratch", 8 * vocab_size * pool.threads)
            job[kernels.SCRATCH_SIZE] = 8 * vocab_size
            pool.run(job)
        best[not_finite] = -1
        return chosen.int()


def _pool() -> ThreadPool:
    pool = thread_pool()
    assert pool is not None  # a packed weight exists only where the kernels run
    return pool


def paged_attention(
    pool: ThreadPool, query: Tensor, kv_cache: KV, batch: ForwardBatch, scale: float, window: int
) -> Tensor:
    """Compute ops.attention in the kernels.

    query is float32 and contiguous. kv_cache is float32, float16 or codes, and the part of a layer
    in a block is contiguous.
    """
    kernels = pool.kernels
    output = torch.empty_like(query)
    job = np.zeros(kernels.NUM_FIELDS, dtype=np.int64)
    with pool.lock:
        record = attention_record(pool, batch, query.shape[1], kv_cache, scale)
        fields = kernels.attention_jit
        record[fields.QUERY] = query.data_ptr()
        record[fields.QUERY_STRIDE] = query.stride(0) * 4
        record[fields.OUTPUT] = output.data_ptr()
        job[kernels.JOB_KIND] = kernels.ATTENTION
        job[kernels.BATCH] = record.ctypes.data
        job[kernels.ATTENTION_WINDOW] = window
        pool.run(job)
    return output


def padded_blocks(
    kv_cache: KV, batch: ForwardBatch, padding: tuple[int, int]
) -> tuple[Tensor, ForwardBatch]:
    """Copy the blocks of a batch as float32, with heads padded with zeros to whole vectors.

    This is for KV that the kernels cannot read in place. Returns the copies, and the batch with a
    block table of the copies.
    """
    block_size = kv_cache.shape[-2]
    widths = [-(-span.end // block_size) for span in batch.spans]
    rows = batch.slots.tolist()
    blocks = [batch.block_table[row, :width] for row, width in zip(rows, widths, strict=True)]
    blocks_read = F.pad(gather_blocks(kv_cache, torch.cat(blocks)).float(), padding)
    block_table = torch.zeros(len(rows), max(widths), dtype=torch.int32)
    first_block = 0
    for index, width in enumerate(widths):
        block_table[index, :width] = torch.arange(
            first_block, first_block + width, dtype=torch.int32
        )
        first_block += width
    row_numbers = torch.arange(len(rows), dtype=torch.int32)
    return blocks_read, replace(batch, block_table=block_table, slots=row_numbers)


def apply_activation(values: Tensor, gelu: bool, gated: bool = True) -> Tensor:
    """values [T, 2 * inter] -> act(gate) * up [T, inter]; not gated: [T, inter] -> act(values)"""
    pool = _pool()
    kernels = pool.kernels
    source = values.float().contiguous()
    rows, width = source.shape
    if gated:
        width //= 2
    output = torch.empty(rows, width)
    job = np.zeros(kernels.NUM_FIELDS, dtype=np.int64)
    job[kernels.JOB_KIND] = kernels.ACTIVATE
    job[kernels.NUM_ROWS] = rows
    job[kernels.WIDTH] = width
    job[kernels.GELU] = int(gelu)
    job[kernels.NUM_LAYERS] = int(not gated)
    job[kernels.INPUT] = source.data_ptr()
    job[kernels.OUTPUT] = output.data_ptr()
    with pool.lock:
        job[kernels.SCRATCH] = pool.memory("scratch", kernels.ACTIVATE_BYTES * pool.threads)
        job[kernels.SCRATCH_SIZE] = kernels.ACTIVATE_BYTES
        pool.run(job)
    return output.to(values.dtype)


def product(hidden: Tensor, weight: CpuWeight) -> Tensor:
    """hidden [T, in] float32, contiguous -> [T, out]"""
    pool = _pool()
    kernels = pool.kernels
    rows = len(hidden)
    output = torch.empty(rows, weight.shape[0])
    job = np.zeros(kernels.NUM_FIELDS, dtype=np.int64)
    job[kernels.JOB_KIND] = kernels.PRODUCT
    job[kernels.NUM_ROWS] = rows
    job[kernels.WEIGHT] = weight.record.ctypes.data
    job[kernels.INPUT] = hidden.data_ptr()
    job[kernels.OUTPUT] = output.data_ptr()
    scratch = scratch_bytes(kernels.LANES, kernels.TILE, weight.shape[1] + weight.group_size)
    with pool.lock:
        job[kernels.QUANTIZED] = pool.memory(
            "quantized", rows * kernels.row_bytes.py_func(weight.shape[1], weight.group_size)
        )
        job[kernels.SCRATCH] = pool.memory("scratch", scratch * pool.threads)
        job[kernels.SCRATCH_SIZE] = scratch
        pool.run(job)
    return output
