"""The decode megakernel: a decode step of up to eight rows as one CUDA kernel (decode_megakernel.cu).

With few rows a decode step is bound by reading weights, and weights can be read at any time because
they depend on nothing. Separate kernels cannot use this freedom: a layer is nine kernels, each starts
when the previous one has ended, and memory is idle for microseconds between two products. One
persistent kernel on all multiprocessors lets a producer warp read up to 190 KB ahead while the other
warps compute and wait for each other.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
from ctypes import c_float, c_int, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops import ForwardBatch
from octavo.ops.cuda.driver import (
    MAP_BYTES,
    CudaError,
    Kernel,
    compile_source,
    tensor_map,
    with_header,
)
from octavo.ops.fused_spec import DecoderLayer, DecoderSpec
from octavo.ops.kv import KV

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("decode_megakernel.cu")
MAX_ROWS = 8  # rows of one tensor core instruction
WARPS = 8  # warps that compute, besides the producer warp
# A chunk of the ring in bytes, and in columns of 64 inputs; decode_megakernel.cu has the same.
CHUNK = 16384
COLUMNS = 16
MIN_STAGES = 4  # with fewer chunks the ring does not help
# Copies in flight, and while the block waits at a grid barrier, for small and large layers. More copies
# would not arrive sooner, and the loads of the other warps would queue behind them. A layer is large if
# reading its weights takes longer than the other warps wait.
COPIES_IN_FLIGHT = (3, 4)
COPIES_AT_BARRIER = (1, 2)
LARGE_LAYER_BYTES = 2**28
MAX_HEADS_PER_BLOCK = 7  # more query heads do not fit in registers


class Batch(ctypes.Structure):
    """The kernel's argument, as decode_megakernel.cu declares it."""

    _fields_ = [
        *(
            (name, c_void_p)
            for name in (
                "layers",
                "maps",
                "head",
                "norm",
                "h",
                "scaled_hidden",
                "squares",
                "last",
                "logits",
            )
        ),
        *(
            (name, c_void_p)
            for name in ("qkv", "attention_out", "mlp_inner", "split_results", "kv")
        ),
        *((name, c_uint64) for name in ("s_block", "s_layer", "s_kind", "s_head")),
        ("table", c_void_p),
        ("s_table", c_uint64),
        *((name, c_void_p) for name in ("rows", "lengths", "slots", "positions", "barrier_count")),
        ("num_layers", c_int),
        ("eps", c_float),
        ("scale", c_float),
    ]


def supports(spec: DecoderSpec) -> bool:
    """Whether the kernel supports a decoder: plain bfloat16 weights and sizes that its tiles divide."""
    layer = spec.layers[0]
    matrices = [[each.qkv, each.out, each.gate_up, each.down] for each in spec.layers]
    if not all(
        isinstance(w, Tensor) and w.dtype == torch.bfloat16 and w.is_contiguous()
        for ws in matrices
        for w in ws
    ):
        return False
    if (
        len({tuple(w.shape for w in ws) for ws in matrices}) > 1
        or len({each.q_norm is None for each in spec.layers}) > 1
    ):
        return False
    inputs = (layer.qkv.shape[1], layer.out.shape[1], layer.down.shape[1])
    posts = any(
        each.post_attn_norm is not None or each.post_mlp_norm is not None for each in spec.layers
    )
    return (
        not posts
        and spec.head_dim in (64, 128)
        and all(n % 64 == 0 for n in inputs)
        and heads_per_block(spec) <= MAX_HEADS_PER_BLOCK
    )


def available(device: torch.device) -> bool:
    """Whether the device is an NVIDIA Hopper GPU or later. OCTAVO_MEGAKERNEL=none disables the kernel."""
    if os.environ.get("OCTAVO_MEGAKERNEL") == "none":
        return False
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device)[0] >= 9
    )


def heads_per_block(spec: DecoderSpec) -> int:
    """Query heads per attention task for long contexts; they share a KV head."""
    group = spec.num_heads // spec.num_kv_heads
    return 4 if group % 4 == 0 else group


def fuse(spec: DecoderSpec) -> DecodeMegakernel | None:
    if not supports(spec) or not available(spec.layers[0].qkv.device):
        return None
    try:
        return DecodeMegakernel(spec)
    except CudaError as error:
        log.warning(
            "the decode megakernel is not available, so small batches decode more slowly: %s", error
        )
        return None


class DecodeMegakernel:
    """Runs decode steps of up to eight rows over uncompressed KV. Returns None for any other step."""

    def __init__(self, spec: DecoderSpec):
        self.spec = spec
        layer = spec.layers[0]
        self.hidden = layer.qkv.shape[1]
        self.width = layer.out.shape[1]
        self.inter = layer.down.shape[1]
        self.kernels: dict[tuple[int, int], Kernel | None] = {}  # by rows and KV block size
        properties = torch.cuda.get_device_properties(layer.qkv.device)
        self.blocks = properties.multi_processor_count
        # 0 if torch does not say: then the kernel is not used
        self.shared = int(getattr(properties, "shared_memory_per_block_optin", 0))
        self.arch = f"sm_{properties.major}{properties.minor}"
        maps = (
            tensor_map(weight, halves, COLUMNS)
            for each in spec.layers
            for weight, halves in ((each.qkv, 1), (each.out, 1), (each.gate_up, 2), (each.down, 1))
        )
        self.vocab = vocabulary(spec)
        head = [tensor_map(spec.head, 1, COLUMNS)] if self.vocab else []
        self.maps = torch.from_numpy(np.frombuffer(b"".join([*maps, *head]), np.uint8).copy()).to(
            layer.qkv.device
        )
        self.layers = torch.tensor(
            [layer_descriptor(each) for each in spec.layers],
            dtype=torch.int64,
            device=layer.qkv.device,
        )

    def __call__(
        self, hidden: Tensor, batch: ForwardBatch, kv: KV
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        rows = hidden.shape[0]
        spec = self.spec
        if (
            rows > MAX_ROWS
            or not isinstance(kv, Tensor)
            or kv.dtype != hidden.dtype
            or batch.watched is not None
        ):
            return None
        if len(batch.spans) != rows or any(span.num != 1 for span in batch.spans):
            return None
        kernel = self.kernel(rows, kv.shape[4])
        if kernel is None:
            return None
        splits = max(1, self.blocks // (rows * spec.num_kv_heads))
        parts = torch.empty(
            rows * spec.num_heads * splits * (spec.head_dim + 2),
            dtype=torch.float32,
            device=hidden.device,
        )
        barrier_count = torch.zeros(1, dtype=torch.int32, device=hidden.device)
        qkv, attention_out, mlp_inner = (
            hidden.new_empty(rows, n)
            for n in (self.width + 2 * spec.num_kv_heads * spec.head_dim, self.width, self.inter)
        )
        scaled_hidden = torch.empty_like(hidden)
        last = torch.empty_like(hidden)
        logits = hidden.new_empty(rows, self.vocab)
        squares = torch.empty(rows * self.hidden // 8, dtype=torch.float32, device=hidden.device)
        head = self.maps[4 * MAP_BYTES * len(spec.layers) :]
        given = (self.layers, self.maps, head, spec.norm, hidden)
        tensors = (
            *given,
            scaled_hidden,
            squares,
            last,
            logits,
            qkv,
            attention_out,
            mlp_inner,
            parts,
            kv,
        )
        lists = (batch.slots, batch.seq_lens, batch.kv_indices, batch.positions, barrier_count)
        argument = Batch(
            *(tensor.data_ptr() for tensor in tensors),
            *kv.stride()[:4],
            batch.block_table.data_ptr(),
            batch.block_table.stride(0),
            *(tensor.data_ptr() for tensor in lists),
            len(spec.layers),
            spec.norm_eps,
            spec.scale * math.log2(math.e),
        )
        try:
            kernel.launch(self.blocks, (WARPS + 1) * 32, argument, hidden.device)
        except (
            CudaError
        ) as error:  # for example, another process holds some multiprocessors; nothing has run
            self._disable(rows, kv.shape[4], error)
            return None
        if batch.last is not None:
            return last[batch.logit_indices]
        return (last, logits) if self.vocab else last

    def kernel(self, rows: int, block: int) -> Kernel | None:
        """The kernel for a number of rows. None: the layers run operator by operator."""
        if (rows, block) not in self.kernels:
            try:
                self.kernels[rows, block] = self._compile(rows, block)
            except CudaError as error:
                self._disable(rows, block, error)
        return self.kernels[rows, block]

    def _disable(self, rows: int, block: int, error: CudaError) -> None:
        log.warning(
            "the decode megakernel cannot run %d rows, so they decode more slowly: %s", rows, error
        )
        self.kernels[rows, block] = None

    def _compile(self, rows: int, block: int) -> Kernel | None:
        stages, shared, parts = shared_memory_layout(self.spec, rows, self.blocks, self.shared)
        if stages < MIN_STAGES:
            return None  # the activations leave too little shared memory for the ring
        constants = constants_of(self.spec, rows, block, stages, shared, parts, self.blocks)
        source = with_header(SOURCE)
        try:
            return Kernel(compile_source(source, constants, self.arch), "decode_megakernel", shared)
        except CudaError:  # the cached binary may be damaged
            return Kernel(
                compile_source(source, constants, self.arch, anew=True), "decode_megakernel", shared
            )


def vocabulary(spec: DecoderSpec) -> int:
    """Number of logits that the kernel computes: the whole vocabulary or 0."""
    head = spec.head
    plain = (
        isinstance(head, Tensor)
        and head.dtype == torch.bfloat16
        and head.is_contiguous()
        and head.shape[0] % 8 == 0
    )
    return head.shape[0] if plain else 0


def shared_memory_layout(
    spec: DecoderSpec, rows: int, blocks: int, shared: int
) -> tuple[int, int, int]:
    """(chunks in the ring, bytes of shared memory, parts in which W_down's activations are loaded).

    Two parts if the ring then holds more chunks. decode_megakernel.cu divides the memory likewise."""
    layer = spec.layers[0]
    group = heads_per_block(spec)
    attend = (
        spec.head_dim + group * (spec.head_dim + 8) + WARPS * group * spec.head_dim + 3 * group + 4
    ) * 4
    chunks_per_unit = -(-layer.down.shape[1] // 64 // COLUMNS)
    split = min(-(-2 * chunks_per_unit // 3) * COLUMNS * 64, layer.down.shape[1])

    def holds(most: int) -> tuple[int, int]:
        """Stages and bytes if at most this many inputs of W_down are loaded at a time."""
        inputs = ((layer.qkv, 0), (layer.out, 0), (layer.gate_up, 0), (layer.down, most))
        products = (
            # activations and partial sums
            rows * (n or w.shape[1]) * 2 + WARPS * -(-w.shape[0] // 8 // blocks) * rows * 32
            for w, n in inputs
        )
        other = max(*products, attend) + 1024  # barriers
        stages = min(32, (shared - other) // CHUNK)
        return stages, stages * CHUNK + other

    whole = holds(layer.down.shape[1])
    apart = holds(split)
    return (*apart, 2) if apart[0] > whole[0] else (*whole, 1)


def constants_of(
    spec: DecoderSpec, rows: int, block: int, stages: int, shared: int, parts: int, blocks: int
) -> dict[str, int]:
    """The compile-time constants of decode_megakernel.cu."""
    layer = spec.layers[0]
    large = (
        sum(w.numel() for w in (layer.qkv, layer.out, layer.gate_up, layer.down)) * 2
        > LARGE_LAYER_BYTES
    )
    return {
        "WARPS": WARPS,
        "ROWS": rows,
        "HIDDEN": layer.qkv.shape[1],
        "INTER": layer.down.shape[1],
        "VOCAB": vocabulary(spec),
        "HEADS": spec.num_heads,
        "KV_HEADS": spec.num_kv_heads,
        "DIM": spec.head_dim,
        "BLOCK": block,
        "BLOCKS": blocks,
        "STAGES": stages,
        "SHARED": shared,
        "PARTS": parts,
        "COPIES_IN_FLIGHT": min(COPIES_IN_FLIGHT[large], stages - 1),
        "COPIES_AT_BARRIER": min(COPIES_AT_BARRIER[large], stages - 1),
        "HEADS_PER_BLOCK": heads_per_block(spec),
        "GELU": int(spec.gelu),
        "QK_NORM": int(layer.q_norm is not None),
        "WINDOWS": int(any(each.window for each in spec.layers)),
        "BIASES": int(any(bias is not None for each in spec.layers for bias in each.biases)),
    }


def layer_descriptor(layer: DecoderLayer) -> list[int]:
    """The struct Layer of decode_megakernel.cu as integers."""
    tensors: list[Any] = [
        layer.attn_norm,
        layer.mlp_norm,
        layer.q_norm,
        layer.k_norm,
        layer.cos_sin,
        *layer.biases,
    ]
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors] + [layer.window]
