"""Runs all layers of a decoder as one job of the CPU kernels.

It fills the records that jit/decoder_jit.py reads with addresses and sizes.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import ForwardBatch, Watched
from octavo.ops.cpu.thread_pool import ThreadPool
from octavo.ops.cpu.weight_layout import CpuWeight
from octavo.ops.fused_spec import DecoderLayer, DecoderSpec
from octavo.ops.kv import KV, QuantKV

Record = NDArray[np.int64]


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def write_float(record: Record, field: int, value: float) -> None:
    record[field : field + 1].view(np.float32)[0] = value


def supports(spec: DecoderSpec, lanes: int) -> bool:
    """Whether the kernels can compute this decoder."""
    packed = all(
        isinstance(weight, CpuWeight)
        for layer in spec.layers
        for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)
    )
    if not packed or spec.dtype != torch.float32:
        return False
    hidden = spec.layers[0].out.shape[0]
    intermediate = spec.layers[0].down.shape[1]
    return are_whole_vectors(lanes, (spec.head_dim, hidden, intermediate))


def are_whole_vectors(lanes: int, widths: tuple[int, int, int]) -> bool:
    """Whether heads, hidden states and MLP activations of these widths fill whole vectors."""
    return all(width % lanes == 0 for width in widths)


def scratch_bytes(lanes: int, tile: int, widest: int) -> int:
    """Return the size of a thread's scratch memory.

    It holds a row, another row that is padded to whole groups, and two tiles.
    """
    return -(-(4 * (2 * widest + 2 * 128) + 2 * 4 * tile * lanes) // 64) * 64


# With fewer attention tasks per thread, the context is split. Otherwise threads would be idle, for
# example two threads with 3 key heads.
MIN_TASKS_PER_THREAD = 8
# The names of storage formats in jit/llvm_intrinsics.py.
STORAGE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8",
}


def cache_record(pool: ThreadPool, kv_cache: KV) -> Record:
    """Return a record of the cache alone.

    kv_cache is [N, ..., 2, Hk, B, D], and its last four dimensions are contiguous.
    """
    fields = pool.kernels.attention_jit
    # Counters of finished segments follow the fields.
    record: Record = np.zeros(
        fields.NUM_FIELDS + MIN_TASKS_PER_THREAD * pool.threads, dtype=np.int64
    )
    record[fields.NUM_KV_HEADS], record[fields.BLOCK_SIZE], record[fields.HEAD_DIM] = (
        kv_cache.shape[-3:]
    )
    stored = kv_cache.codes if isinstance(kv_cache, QuantKV) else kv_cache
    record[fields.KV_CACHE] = stored.data_ptr()
    record[fields.BLOCK_STRIDE] = stored.stride(0) * stored.element_size()
    record[fields.STORAGE] = getattr(fields, STORAGE_NAMES[kv_cache.dtype])
    if isinstance(kv_cache, QuantKV):
        record[fields.SCALES] = kv_cache.scales.data_ptr()
        record[fields.SCALES_STRIDE] = kv_cache.scales.stride(0) * kv_cache.scales.element_size()
    return record


def attention_record(
    pool: ThreadPool,
    batch: ForwardBatch,
    num_heads: int,
    kv_cache: KV,
    scale: float,
    watched: tuple[Tensor, Tensor] | None = None,
) -> Record:
    """Return the record of a batch.

    `watched` is the index of each item among the watched items or -1 (int32 [S]), and their mass
    [n, Hk, W].
    """
    fields = pool.kernels.attention_jit
    num_kv_heads, block_size, head_dim = kv_cache.shape[-3:]
    record = cache_record(pool, kv_cache)
    record[fields.NUM_HEADS] = num_heads
    record[fields.NUM_SEQUENCES] = len(batch.seq_lens)
    record[fields.QUERY_START] = batch.query_start.data_ptr()
    record[fields.SEQ_LENS] = batch.seq_lens.data_ptr()
    record[fields.TABLE_ROWS] = batch.slots.data_ptr()
    record[fields.BLOCK_TABLE] = batch.block_table.data_ptr()
    record[fields.TABLE_WIDTH] = batch.block_table.stride(0)
    write_float(record, fields.SCALE, scale)
    if watched is not None:
        watched_index, mass = watched
        num_watched, _, num_blocks = mass.shape
        padded_keys = -(-num_blocks * block_size // fields.CHUNK) * fields.CHUNK
        record[fields.WATCHED] = watched_index.data_ptr()
        record[fields.MASS] = mass.data_ptr()
        record[fields.MASS_BLOCKS] = num_blocks
        record[fields.SCORES] = pool.memory("scores", 4 * num_watched * num_heads * padded_keys)
        record[fields.SCORES_KEYS] = padded_keys
    if all(span.num == 1 for span in batch.spans):
        split_context(pool, record, max(span.end for span in batch.spans))
    thread_bytes = -(-fields.scratch_bytes.py_func(num_heads, num_kv_heads, head_dim) // 64) * 64
    record[fields.SCRATCH] = pool.memory("attention", thread_bytes * pool.threads)
    record[fields.SCRATCH_SIZE] = thread_bytes
    record[fields.ZEROS] = pool.zeros(4 * head_dim)
    return record


def split_context(pool: ThreadPool, record: Record, max_len: int) -> None:
    """Split the context of sequences with one token each into segments, if threads would be idle
    otherwise. No sequence is longer than max_len."""
    fields = pool.kernels.attention_jit
    num_tasks = int(record[fields.NUM_SEQUENCES] * record[fields.NUM_KV_HEADS])
    if num_tasks >= MIN_TASKS_PER_THREAD * pool.threads or pool.threads == 1:
        return
    num_segments = -(-max_len // fields.SEGMENT)
    if num_segments != record[fields.NUM_SEGMENTS]:
        group_size = int(record[fields.NUM_HEADS] // record[fields.NUM_KV_HEADS])
        head_dim = int(record[fields.HEAD_DIM])
        part_bytes = num_tasks * num_segments * fields.segment_bytes.py_func(group_size, head_dim)
        record[fields.NUM_SEGMENTS] = num_segments
        record[fields.PARTS] = pool.memory("parts", part_bytes)
        record[fields.PARTS_DONE] = record.ctypes.data + 8 * fields.NUM_FIELDS


def index_watched(
    batch: ForwardBatch, watched: Watched, num_kv_heads: int
) -> tuple[Tensor, Tensor]:
    """Return the `watched` argument of attention_record().

    Each key head has its own sums, so that threads do not share them.
    """
    watched_index = torch.full((len(batch.seq_lens),), -1, dtype=torch.int32)
    last_tokens = batch.query_start[1:].long() - 1
    watched_index[torch.searchsorted(last_tokens, watched.tokens)] = torch.arange(
        len(watched.tokens), dtype=torch.int32
    )
    num_watched, num_blocks = watched.mass.shape
    return watched_index, torch.zeros(num_watched, num_kv_heads, num_blocks)


class FusedDecoder:
    def __init__(self, spec: DecoderSpec, pool: ThreadPool):
        self.spec = spec
        self.pool = pool
        kernels = pool.kernels
        lanes = pool.kernels.LANES
        self.table: Record = np.zeros((len(spec.layers), kernels.NUM_LAYER_FIELDS), dtype=np.int64)
        self.tensors: list[Tensor] = [spec.norm]  # keeps the tensors that the table points to
        for layer_record, layer in zip(self.table, spec.layers, strict=True):
            self._describe(layer_record, layer, lanes)
        first_layer = spec.layers[0]
        self.hidden = first_layer.out.shape[0]
        self.inner = first_layer.down.shape[1]
        self.qkv = first_layer.qkv.shape[0]
        weights = [
            weight
            for layer in spec.layers
            for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)
        ]
        self.row_bytes = max(
            kernels.row_bytes.py_func(weight.shape[1], weight.group_size) for weight in weights
        )
        self.scratch_size = scratch_bytes(
            lanes,
            kernels.TILE,
            max(-(-weight.shape[1] // weight.group_size) * weight.group_size for weight in weights),
        )

    def _describe(self, layer_record: Record, layer: DecoderLayer, lanes: int) -> None:
        kernels = self.pool.kernels
        for index, (weight, bias) in enumerate(
            zip((layer.qkv, layer.out, layer.gate_up, layer.down), layer.biases, strict=True)
        ):
            offset = index * kernels.matmul_jit.NUM_FIELDS
            layer_record[offset : offset + len(weight.record)] = weight.record
            if bias is not None:  # padded to whole blocks, like the weight
                padded = torch.nn.functional.pad(bias.float(), (0, -len(bias) % lanes)).contiguous()
                self.tensors.append(padded)
                layer_record[offset + kernels.matmul_jit.BIAS] = padded.data_ptr()
        norms = (
            layer.attn_norm,
            layer.mlp_norm,
            layer.q_norm,
            layer.k_norm,
            layer.post_attn_norm,
            layer.post_mlp_norm,
        )
        norm_fields = (
            kernels.ATTN_NORM,
            kernels.MLP_NORM,
            kernels.QUERY_NORM,
            kernels.KEY_NORM,
            kernels.POST_ATTN_NORM,
            kernels.POST_MLP_NORM,
        )
        layer_record[list(norm_fields)] = [address(norm) for norm in norms]
        layer_record[kernels.WINDOW] = layer.window
        layer_record[kernels.ANGLES] = layer.cos_sin.data_ptr()
        self.tensors += [layer.cos_sin, *(norm for norm in norms if norm is not None)]

    def __call__(self, hidden: Tensor, batch: ForwardBatch, kv_cache: KV) -> Tensor:
        """Compute all layers. hidden [T, hidden] is overwritten."""
        spec = self.spec
        num_rows = len(hidden) if batch.last is None else len(batch.logit_indices)
        output = torch.empty(num_rows, self.hidden)
        watched = (
            None
            if batch.watched is None
            else index_watched(batch, batch.watched, spec.num_kv_heads)
        )
        kernels = self.pool.kernels
        with self.pool.lock:
            record = attention_record(
                self.pool, batch, spec.num_heads, kv_cache, spec.scale, watched
            )
            job = self.fill_job(hidden, batch, record, output)
            self.pool.run(job, kernels.PHASES_PER_LAYER * len(self.table) + 1)
        if watched is not None and batch.watched is not None:
            batch.watched.mass += watched[1].sum(1)
        return output

    def fill_job(
        self, hidden: Tensor, batch: ForwardBatch, record: Record, output: Tensor
    ) -> Record:
        """Return the job that computes all layers of a batch. `record` is that of its attention,
        and gets the addresses of queries and results. The caller holds the lock of the pool."""
        spec = self.spec
        pool = self.pool
        kernels = pool.kernels
        fields = kernels.attention_jit
        num_rows = len(hidden)
        last_rows = None if batch.last is None else batch.logit_indices
        job: Record = np.zeros(kernels.NUM_FIELDS, dtype=np.int64)
        job[kernels.JOB_KIND] = kernels.DECODER
        job[kernels.NUM_ROWS] = num_rows
        job[kernels.INPUT] = hidden.data_ptr()
        job[kernels.OUTPUT] = output.data_ptr()
        job[kernels.LAYERS] = self.table.ctypes.data
        job[kernels.NUM_LAYERS] = len(self.table)
        job[kernels.HIDDEN_SIZE] = self.hidden
        job[kernels.WIDTH] = self.inner
        job[kernels.GELU] = int(spec.gelu)
        job[kernels.BATCH] = record.ctypes.data
        job[kernels.LAST_NORM] = spec.norm.data_ptr()
        job[kernels.POSITIONS] = batch.positions.data_ptr()
        job[kernels.KV_INDICES] = batch.kv_indices.data_ptr()
        job[kernels.LAST_ROWS] = address(last_rows)
        job[kernels.NUM_LAST_ROWS] = len(output)
        write_float(job, kernels.EPSILON, spec.norm_eps)
        job[kernels.QUANTIZED] = pool.memory("quantized", num_rows * self.row_bytes)
        job[kernels.SCRATCH] = pool.memory("scratch", self.scratch_size * pool.threads)
        job[kernels.SCRATCH_SIZE] = self.scratch_size
        buffers = {
            kernels.DELTA: self.hidden,
            kernels.QKV: self.qkv,
            kernels.ATTENDED: spec.num_heads * spec.head_dim,
            kernels.ACTIVATED: self.inner,
        }
        for field, width in buffers.items():
            job[field] = pool.memory(f"rows {field}", num_rows * width * 4)
        record[fields.QUERY] = job[kernels.QKV]
        record[fields.QUERY_STRIDE] = self.qkv * 4
        record[fields.OUTPUT] = job[kernels.ATTENDED]
        return job
