"""The decode megakernel: a decode step of up to eight rows as one kernel, decode_megakernel.cu.

With few rows a decode step is bound by reading weights, and weights can be read at any time because
they do not depend on other kernels. Separate kernels cannot use this freedom: a layer is nine
kernels, each starts when the previous one has ended, and memory is idle for microseconds between
two products.
One persistent kernel on all multiprocessors lets a producer warp read up to 190 KB ahead while the
other warps compute and wait for each other.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
from ctypes import c_float, c_int, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.ops import ForwardBatch
from octavo.ops.cuda.driver import (
    MAP_BYTES,
    CudaError,
    Kernel,
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
# The most copies in flight, in general and while the block waits at a grid barrier, for small and
# for large layers. More copies would not arrive sooner, and the loads of the other warps would
# queue behind them. A layer is large if reading its weights takes longer than the other warps wait.
COPIES_IN_FLIGHT = (3, 4)
COPIES_AT_BARRIER = (1, 2)
LARGE_LAYER_BYTES = 2**28
MAX_HEADS_PER_BLOCK = 7  # more query heads do not fit in registers


POINTERS = (
    "layers",
    "maps",
    "head",
    "norm",
    "embeddings",
    "scaled_hidden",
    "squares",
    "last",
    "logits",
    "qkv",
    "attention_out",
    "mlp_inner",
    "split_results",
    "kv_cache",
)
STRIDES = ("stride_block", "stride_layer", "stride_kind", "stride_head")


class Batch(ctypes.Structure):
    """The kernel's argument, as decode_megakernel.cu declares it."""

    _fields_ = [
        *((name, c_void_p) for name in POINTERS),
        *((name, c_uint64) for name in STRIDES),
        ("block_table", c_void_p),
        ("stride_table", c_uint64),
        ("table_rows", c_void_p),
        ("seq_lens", c_void_p),
        ("kv_indices", c_void_p),
        ("positions", c_void_p),
        ("barrier_count", c_void_p),
        ("num_layers", c_int),
        ("epsilon", c_float),
        ("softmax_scale", c_float),
    ]


class Buffers(NamedTuple):
    """The memory that the kernel writes to."""

    scaled_hidden: Tensor
    squares: Tensor
    last: Tensor
    logits: Tensor
    qkv: Tensor
    attention_out: Tensor
    mlp_inner: Tensor
    split_results: Tensor
    barrier_count: Tensor


def supports(spec: DecoderSpec) -> bool:
    """Whether the kernel supports a decoder: bfloat16 weights, and sizes that its tiles divide."""
    layer = spec.layers[0]
    matrices = [
        [decoder_layer.qkv, decoder_layer.out, decoder_layer.gate_up, decoder_layer.down]
        for decoder_layer in spec.layers
    ]
    if not all(
        isinstance(weight, Tensor) and weight.dtype == torch.bfloat16 and weight.is_contiguous()
        for weights in matrices
        for weight in weights
    ):
        return False
    if (
        len({tuple(weight.shape for weight in weights) for weights in matrices}) > 1
        or len({decoder_layer.q_norm is None for decoder_layer in spec.layers}) > 1
    ):
        return False
    inputs = (layer.qkv.shape[1], layer.out.shape[1], layer.down.shape[1])
    has_post_norms = any(
        decoder_layer.post_attn_norm is not None or decoder_layer.post_mlp_norm is not None
        for decoder_layer in spec.layers
    )
    return (
        not has_post_norms
        and spec.head_dim in (64, 128)
        and all(num_inputs % 64 == 0 for num_inputs in inputs)
        and heads_per_block(spec) <= MAX_HEADS_PER_BLOCK
    )


def available(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU or later. OCTAVO_MEGAKERNEL=none disables the kernel."""
    if os.environ.get("OCTAVO_MEGAKERNEL") == "none":
        return False
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device)[0] >= 9
    )


def heads_per_block(spec: DecoderSpec) -> int:
    """Return the number of query heads per attention task for long contexts.

    They share a KV head.
    """
    group_size = spec.num_heads // spec.num_kv_heads
    return 4 if group_size % 4 == 0 else group_size


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
    """Runs decode steps of up to eight rows over plain KV. It returns None for any other step."""

    def __init__(self, spec: DecoderSpec):
        self.spec = spec
        layer = spec.layers[0]
        self.hidden = layer.qkv.shape[1]
        self.width = layer.out.shape[1]
        self.inter = layer.down.shape[1]
        self.kernels: dict[tuple[int, int], Kernel | None] = {}  # by rows and KV block size
        properties = torch.cuda.get_device_properties(layer.qkv.device)
        self.blocks = properties.multi_processor_count
        # An old torch does not report the size, and the kernel is then not used.
        self.shared = int(getattr(properties, "shared_memory_per_block_optin", 0))
        self.arch = f"sm_{properties.major}{properties.minor}"
        maps = (
            tensor_map(weight, halves, COLUMNS)
            for decoder_layer in spec.layers
            for weight, halves in (
                (decoder_layer.qkv, 1),
                (decoder_layer.out, 1),
                (decoder_layer.gate_up, 2),
                (decoder_layer.down, 1),
            )
        )
        self.vocab = vocabulary(spec)
        head = [tensor_map(spec.head, 1, COLUMNS)] if self.vocab else []
        self.maps = torch.from_numpy(np.frombuffer(b"".join([*maps, *head]), np.uint8).copy()).to(
            layer.qkv.device
        )
        self.layers = torch.tensor(
            [layer_descriptor(decoder_layer) for decoder_layer in spec.layers],
            dtype=torch.int64,
            device=layer.qkv.device,
        )

    def __call__(
        self, hidden: Tensor, batch: ForwardBatch, kv_cache: KV
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        num_rows = hidden.shape[0]
        if not self._supports_batch(hidden, batch, kv_cache):
            return None
        assert isinstance(kv_cache, Tensor)
        block_size = kv_cache.shape[4]
        kernel = self.kernel(num_rows, block_size)
        if kernel is None:
            return None
        buffers = self._allocate(hidden)
        argument = self._argument(hidden, batch, kv_cache, buffers)
        try:
            kernel.launch(
                blocks=self.blocks,
                threads=(WARPS + 1) * 32,
                argument=argument,
                device=hidden.device,
                cooperative=True,
            )
        except CudaError as error:
            # For example, another process occupies some multiprocessors. The kernel has not run.
            self._disable(num_rows, block_size, error)
            return None
        if batch.last is not None:
            return buffers.last[batch.logit_indices]
        return (buffers.last, buffers.logits) if self.vocab else buffers.last

    def _supports_batch(self, hidden: Tensor, batch: ForwardBatch, kv_cache: KV) -> bool:
        """Whether the kernel supports a batch: one token for each of at most MAX_ROWS sequences."""
        num_rows = hidden.shape[0]
        return (
            num_rows <= MAX_ROWS
            and isinstance(kv_cache, Tensor)
            and kv_cache.dtype == hidden.dtype
            and batch.watched is None
            and len(batch.spans) == num_rows
            and all(span.num == 1 for span in batch.spans)
        )

    def _allocate(self, hidden: Tensor) -> Buffers:
        spec = self.spec
        num_rows = hidden.shape[0]
        num_splits = max(1, self.blocks // (num_rows * spec.num_kv_heads))
        split_floats = num_rows * spec.num_heads * num_splits * (spec.head_dim + 2)
        qkv_width = self.width + 2 * spec.num_kv_heads * spec.head_dim

        def floats(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.float32, device=hidden.device)

        return Buffers(
            scaled_hidden=torch.empty_like(hidden),
            squares=floats(num_rows * self.hidden // 8),
            last=torch.empty_like(hidden),
            logits=hidden.new_empty(num_rows, self.vocab),
            qkv=hidden.new_empty(num_rows, qkv_width),
            attention_out=hidden.new_empty(num_rows, self.width),
            mlp_inner=hidden.new_empty(num_rows, self.inter),
            split_results=floats(split_floats),
            barrier_count=torch.zeros(1, dtype=torch.int32, device=hidden.device),
        )

    def _argument(
        self, hidden: Tensor, batch: ForwardBatch, kv_cache: Tensor, buffers: Buffers
    ) -> Batch:
        spec = self.spec
        block, layer, kind, head = kv_cache.stride()[:4]
        return Batch(
            layers=self.layers.data_ptr(),
            maps=self.maps.data_ptr(),
            head=self.maps.data_ptr() + 4 * MAP_BYTES * len(spec.layers),
            norm=spec.norm.data_ptr(),
            embeddings=hidden.data_ptr(),
            **{name: buffer.data_ptr() for name, buffer in buffers._asdict().items()},
            kv_cache=kv_cache.data_ptr(),
            stride_block=block,
            stride_layer=layer,
            stride_kind=kind,
            stride_head=head,
            block_table=batch.block_table.data_ptr(),
            stride_table=batch.block_table.stride(0),
            table_rows=batch.slots.data_ptr(),
            seq_lens=batch.seq_lens.data_ptr(),
            kv_indices=batch.kv_indices.data_ptr(),
            positions=batch.positions.data_ptr(),
            num_layers=len(spec.layers),
            epsilon=spec.norm_eps,
            softmax_scale=spec.scale * math.log2(math.e),
        )

    def kernel(self, num_rows: int, block_size: int) -> Kernel | None:
        """Return the kernel for a number of rows, or None if the layers run op by op."""
        if (num_rows, block_size) not in self.kernels:
            try:
                self.kernels[num_rows, block_size] = self._compile(num_rows, block_size)
            except CudaError as error:
                self._disable(num_rows, block_size, error)
        return self.kernels[num_rows, block_size]

    def _disable(self, num_rows: int, block_size: int, error: CudaError) -> None:
        log.warning(
            "the decode megakernel cannot run %d rows, so they decode more slowly: %s",
            num_rows,
            error,
        )
        self.kernels[num_rows, block_size] = None

    def _compile(self, num_rows: int, block_size: int) -> Kernel | None:
        stages, shared_bytes, num_parts = shared_memory_layout(
            self.spec, num_rows, self.blocks, self.shared
        )
        if stages < MIN_STAGES:
            return None  # the activations leave too little shared memory for the ring
        constants = constants_of(
            self.spec, num_rows, block_size, stages, shared_bytes, num_parts, self.blocks
        )
        return Kernel.load(
            with_header(SOURCE), constants, self.arch, "decode_megakernel", shared_bytes
        )


def vocabulary(spec: DecoderSpec) -> int:
    """Return the number of logits that the kernel computes: the whole vocabulary or 0."""
    head = spec.head
    is_plain = (
        isinstance(head, Tensor)
        and head.dtype == torch.bfloat16
        and head.is_contiguous()
        and head.shape[0] % 8 == 0
    )
    return head.shape[0] if is_plain else 0


def shared_memory_layout(
    spec: DecoderSpec, num_rows: int, num_blocks: int, shared_bytes: int
) -> tuple[int, int, int]:
    """Return the number of chunks in the ring, the bytes of shared memory, and the number of parts.

    The activations of W_down are loaded in one part, or in two if the ring then holds more chunks.
    decode_megakernel.cu divides the memory in the same way.
    """
    layer = spec.layers[0]
    group_size = heads_per_block(spec)
    attention_bytes = (
        spec.head_dim
        + group_size * (spec.head_dim + 8)
        + WARPS * group_size * spec.head_dim
        + 3 * group_size
        + 4
    ) * 4
    chunks_per_unit = -(-layer.down.shape[1] // 64 // COLUMNS)
    split = min(-(-2 * chunks_per_unit // 3) * COLUMNS * 64, layer.down.shape[1])

    def stages_and_bytes(max_inputs: int) -> tuple[int, int]:
        """Return stages and bytes if at most this many inputs of W_down are loaded at a time."""
        weights_and_inputs = (
            (layer.qkv, 0),
            (layer.out, 0),
            (layer.gate_up, 0),
            (layer.down, max_inputs),
        )
        products = (
            # The bytes of the activations, plus those of the partial sums.
            num_rows * (num_inputs or weight.shape[1]) * 2
            + WARPS * -(-weight.shape[0] // 8 // num_blocks) * num_rows * 32
            for weight, num_inputs in weights_and_inputs
        )
        other_bytes = max(*products, attention_bytes) + 1024  # 1024: barriers
        stages = min(32, (shared_bytes - other_bytes) // CHUNK)
        return stages, stages * CHUNK + other_bytes

    one_part = stages_and_bytes(layer.down.shape[1])
    two_parts = stages_and_bytes(split)
    return (*two_parts, 2) if two_parts[0] > one_part[0] else (*one_part, 1)


def constants_of(
    spec: DecoderSpec,
    num_rows: int,
    block_size: int,
    stages: int,
    shared_bytes: int,
    num_parts: int,
    num_blocks: int,
) -> dict[str, int]:
    """Return the compile-time constants of decode_megakernel.cu."""
    layer = spec.layers[0]
    is_large = (
        sum(weight.numel() for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)) * 2
        > LARGE_LAYER_BYTES
    )
    return {
        "WARPS": WARPS,
        "ROWS": num_rows,
        "HIDDEN": layer.qkv.shape[1],
        "INTER": layer.down.shape[1],
        "VOCAB": vocabulary(spec),
        "HEADS": spec.num_heads,
        "KV_HEADS": spec.num_kv_heads,
        "HEAD_DIM": spec.head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCKS": num_blocks,
        "STAGES": stages,
        "SHARED": shared_bytes,
        "PARTS": num_parts,
        "COPIES_IN_FLIGHT": min(COPIES_IN_FLIGHT[is_large], stages - 1),
        "COPIES_AT_BARRIER": min(COPIES_AT_BARRIER[is_large], stages - 1),
        "HEADS_PER_BLOCK": heads_per_block(spec),
        "GELU": int(spec.gelu),
        "QK_NORM": int(layer.q_norm is not None),
        "WINDOWS": int(any(decoder_layer.window for decoder_layer in spec.layers)),
        "BIASES": int(
            any(bias is not None for decoder_layer in spec.layers for bias in decoder_layer.biases)
        ),
    }


def layer_descriptor(layer: DecoderLayer) -> list[int]:
    """Return the struct Layer of decode_megakernel.cu as integers."""
    tensors: list[Any] = [
        layer.attn_norm,
        layer.mlp_norm,
        layer.q_norm,
        layer.k_norm,
        layer.cos_sin,
        *layer.biases,
    ]
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors] + [layer.window]
