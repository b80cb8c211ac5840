"""All layers of a decoder as one job for the CPU kernels: writes down addresses and sizes, then lets the threads run.

The counterpart of jit/decoder_jit.py, whose records it fills.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import ForwardBatch, Watched
from octavo.ops.cpu.thread_pool import Workers
from octavo.ops.cpu.weight_layout import CpuWeight
from octavo.ops.fused_spec import DecoderLayer, DecoderSpec
from octavo.ops.kv import KV, QuantKV

Record = NDArray[np.int64]


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def write_float(record: Record, field: int, value: float) -> None:
    record[field : field + 1].view(np.float32)[0] = value


def fits(spec: DecoderSpec, lanes: int) -> bool:
    """Whether the kernels know how to compute this decoder."""
    packed = all(
        isinstance(w, CpuWeight) for x in spec.layers for w in (x.qkv, x.out, x.gate_up, x.down)
    )
    if not packed or spec.dtype != torch.float32:
        return False
    hidden = spec.layers[0].qkv.shape[1]
    inner = spec.layers[0].down.shape[1]
    return spec.head_dim % lanes == 0 and hidden % lanes == 0 and inner % lanes == 0


def spare_bytes(lanes: int, tile: int, widest: int) -> int:
    """Of one thread's scratch: a row, one more padded to whole groups, and two tiles."""
    return -(-(4 * (2 * widest + 2 * 128) + 2 * 4 * tile * lanes) // 64) * 64


# tasks a thread below which tokens are split, or one thread would wait for another: 3 key heads
# for two threads
FEW = 8
# as jit/llvm_intrinsics.py calls them
KINDS = {torch.float32: "F32", torch.float16: "F16", torch.int8: "I8", torch.float8_e4m3fn: "F8"}


def cache_record(workers: Workers, kv: KV) -> Record:
    """Of what attention_record has, the cache alone: kv [N, ..., 2, Hk, B, D], whose last four dimensions are contiguous."""
    a = workers.step.attention_jit
    # counters follow, where tokens are split
    record: Record = np.zeros(a.FIELDS + FEW * workers.threads, dtype=np.int64)
    record[a.KV_HEADS], record[a.BLOCK_SIZE], record[a.DIM] = kv.shape[-3:]
    numbers = kv.codes if isinstance(kv, QuantKV) else kv
    record[a.KV] = numbers.data_ptr()
    record[a.BLOCK_STRIDE] = numbers.stride(0) * numbers.element_size()
    record[a.KIND] = getattr(a, KINDS[kv.dtype])
    if isinstance(kv, QuantKV):
        record[a.SCALES] = kv.scales.data_ptr()
        record[a.SCALES_STRIDE] = kv.scales.stride(0) * kv.scales.element_size()
    return record


def attention_record(
    workers: Workers,
    batch: ForwardBatch,
    heads: int,
    kv: KV,
    scale: float,
    watched: tuple[Tensor, Tensor] | None = None,
) -> Record:
    """watched: each item's number among the watched ones or -1 (int32 [S]), and their mass [n, Hk, W]."""
    a = workers.step.attention_jit
    kv_heads, block_size, dim = kv.shape[-3:]
    record = cache_record(workers, kv)
    record[a.HEADS] = heads
    record[a.SEQUENCES] = len(batch.seq_lens)
    record[a.QUERY_START] = batch.query_start.data_ptr()
    record[a.SEQ_LENS] = batch.seq_lens.data_ptr()
    record[a.ROW] = batch.slots.data_ptr()
    record[a.TABLE] = batch.block_table.data_ptr()
    record[a.TABLE_WIDTH] = batch.block_table.stride(0)
    write_float(record, a.SCALE, scale)
    if watched is not None:
        numbers, mass = watched
        count, _, blocks = mass.shape
        keys = -(-blocks * block_size // a.CHUNK) * a.CHUNK
        record[a.WATCHED] = numbers.data_ptr()
        record[a.MASS] = mass.data_ptr()
        record[a.MASS_BLOCKS] = blocks
        record[a.SCORES] = workers.memory("scores", 4 * count * heads * keys)
        record[a.SCORES_KEYS] = keys
    tokens = len(batch.seq_lens) * kv_heads
    if (
        tokens < FEW * workers.threads
        and workers.threads > 1
        and all(span.num == 1 for span in batch.spans)
    ):
        segments = -(-max(span.end for span in batch.spans) // a.SEGMENT)
        size = tokens * segments * a.part_size.py_func(heads // kv_heads, dim)
        record[a.SEGMENTS] = segments
        record[a.PARTS] = workers.memory("parts", size)
        record[a.PARTS_DONE] = record.ctypes.data + 8 * a.FIELDS
    size = -(-a.scratch_size.py_func(heads, kv_heads, dim) // 64) * 64
    record[a.SCRATCH] = workers.memory("attention", size * workers.threads)
    record[a.SCRATCH_SIZE] = size
    record[a.ZEROS] = workers.zeros(4 * dim)
    return record


def numbered(batch: ForwardBatch, watched: Watched, kv_heads: int) -> tuple[Tensor, Tensor]:
    """What attention_record needs of the watched items. Each key head has a sum of its own: threads share none."""
    numbers = torch.full((len(batch.seq_lens),), -1, dtype=torch.int32)
    ends = batch.query_start[1:].long() - 1
    numbers[torch.searchsorted(ends, watched.tokens)] = torch.arange(
        len(watched.tokens), dtype=torch.int32
    )
    count, width = watched.mass.shape
    return numbers, torch.zeros(count, kv_heads, width)


class FusedDecoder:
    def __init__(self, spec: DecoderSpec, workers: Workers):
        self.spec = spec
        self.workers = workers
        step = workers.step
        lanes = workers.step.LANES
        self.table: Record = np.zeros((len(spec.layers), step.LAYER_FIELDS), dtype=np.int64)
        self.kept: list[Tensor] = [spec.norm]  # what the table points to
        for row, layer in zip(self.table, spec.layers, strict=True):
            self._describe(row, layer, lanes)
        first = spec.layers[0]
        self.hidden = first.qkv.shape[1]
        self.inner = first.down.shape[1]
        self.qkv = first.qkv.shape[0]
        weights = [w for x in spec.layers for w in (x.qkv, x.out, x.gate_up, x.down)]
        self.row_bytes = max(step.row_bytes.py_func(w.shape[1], w.group) for w in weights)
        self.spare = spare_bytes(
            lanes, step.TILE, max(-(-w.shape[1] // w.group) * w.group for w in weights)
        )

    def _describe(self, row: Record, layer: DecoderLayer, lanes: int) -> None:
        step = self.workers.step
        for i, (weight, bias) in enumerate(
            zip((layer.qkv, layer.out, layer.gate_up, layer.down), layer.biases, strict=True)
        ):
            at = i * step.matmul_jit.FIELDS
            row[at : at + len(weight.record)] = weight.record
            if bias is not None:  # in whole blocks, as the weight is
                padded = torch.nn.functional.pad(bias.float(), (0, -len(bias) % lanes)).contiguous()
                self.kept.append(padded)
                row[at + step.matmul_jit.BIAS] = padded.data_ptr()
        norms = (
            layer.attn_norm,
            layer.mlp_norm,
            layer.q_norm,
            layer.k_norm,
            layer.post_attn_norm,
            layer.post_mlp_norm,
        )
        fields = (
            step.ATTN_NORM,
            step.MLP_NORM,
            step.Q_NORM,
            step.K_NORM,
            step.POST_ATTN,
            step.POST_MLP,
        )
        row[list(fields)] = [address(norm) for norm in norms]
        row[step.WINDOW] = layer.window
        row[step.ANGLES] = layer.cos_sin.data_ptr()
        self.kept += [layer.cos_sin, *(norm for norm in norms if norm is not None)]

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: KV) -> Tensor:
        """x [T, hidden] is overwritten."""
        spec = self.spec
        workers = self.workers
        step = self.workers.step
        rows = len(x)
        wide = spec.num_heads * spec.head_dim
        last = None if batch.last is None else batch.logit_indices
        out = torch.empty(rows if last is None else len(last), self.hidden)
        watched = (
            None if batch.watched is None else numbered(batch, batch.watched, spec.num_kv_heads)
        )
        with workers.lock:
            record = attention_record(workers, batch, spec.num_heads, kv, spec.scale, watched)
            a = step.attention_jit
            job: Record = np.zeros(step.FIELDS, dtype=np.int64)
            job[step.KIND] = step.DECODER
            job[step.ROWS] = rows
            job[step.X] = x.data_ptr()
            job[step.Y] = out.data_ptr()
            job[step.LAYERS] = self.table.ctypes.data
            job[step.LAYER_COUNT] = len(self.table)
            job[step.HIDDEN] = self.hidden
            job[step.INNER] = self.inner
            job[step.GELU] = int(spec.gelu)
            job[step.BATCH] = record.ctypes.data
            job[step.LAST_NORM] = spec.norm.data_ptr()
            job[step.POSITIONS] = batch.positions.data_ptr()
            job[step.SLOTS] = batch.kv_indices.data_ptr()
            job[step.LAST] = address(last)
            job[step.LAST_COUNT] = len(out)
            write_float(job, step.EPS, spec.norm_eps)
            job[step.QUANTIZED] = workers.memory("quantized", rows * self.row_bytes)
            job[step.SPARE] = workers.memory("spare", self.spare * workers.threads)
            job[step.SPARE_SIZE] = self.spare
            parts = {
                step.DELTA: self.hidden,
                step.QKV: self.qkv,
                step.MIXED: wide,
                step.ACTED: self.inner,
            }
            for field, width in parts.items():
                job[field] = workers.memory(f"rows {field}", rows * width * 4)
            record[a.QUERY] = job[step.QKV]
            record[a.QUERY_STRIDE] = self.qkv * 4
            record[a.OUT] = job[step.MIXED]
            workers.run(job, step.PHASES_OF_LAYER * len(self.table) + 1)
        if watched is not None and batch.watched is not None:
            batch.watched.mass += watched[1].sum(1)
        return out
