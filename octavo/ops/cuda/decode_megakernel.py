"""A decode step of a few rows as one kernel: all layers, from the embeddings to the last norm and the logits (decode_megakernel.cu).

With up to eight rows a step is bound by reading weights, and they could be read at any time: they depend on nothing. Kernel by
kernel they are not. A layer is nine kernels, each begins when the one before has ended, and asks for its first weights then;
between two products memory does nothing for microseconds. One kernel that stays on all multiprocessors lets a warp of each read
on, up to 190 KB ahead, while the others compute and wait for each other.
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
MOST_ROWS = 8  # that a tensor core instruction takes without waste
WARPS = 8  # that compute, beside one that orders weights
# of the ring: bytes, and columns of 64 inputs; as decode_megakernel.cu has them
CHUNK = 16384
COLUMNS = 16
LEAST_SLOTS = 4  # chunks: with less the ring is no help
# Copies on their way at once, and while the others meet: more would come no sooner, and what the others ask memory for would wait
# behind them. Layers of so many bytes are read for longer than others wait.
FLYING = (3, 4)
MEETING = (1, 2)
LARGE = 2**28
KEPT = 7  # heads that share a key: more would not fit the registers together


class Batch(ctypes.Structure):
    """As in decode_megakernel.cu."""

    _fields_ = [
        *(
            (name, c_void_p)
            for name in (
                "layers",
                "maps",
                "head",
                "norm",
                "h",
                "weighed",
                "squares",
                "last",
                "logits",
            )
        ),
        *((name, c_void_p) for name in ("qkv", "attended", "inner", "parts", "kv")),
        *((name, c_uint64) for name in ("s_block", "s_layer", "s_kind", "s_head")),
        ("table", c_void_p),
        ("s_table", c_uint64),
        *((name, c_void_p) for name in ("rows", "lengths", "slots", "positions", "met")),
        ("num_layers", c_int),
        ("eps", c_float),
        ("scale", c_float),
    ]


def computes(spec: DecoderSpec) -> bool:
    """Whether the kernel computes such a decoder: plain bfloat16 weights, and sizes that its tiles divide."""
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
        and spec.dim in (64, 128)
        and all(n % 64 == 0 for n in inputs)
        and together(spec) <= KEPT
    )


def available(device: torch.device) -> bool:
    """A Hopper GPU or a later one, of NVIDIA's, and nobody said OCTAVO_MEGAKERNEL=none."""
    if os.environ.get("OCTAVO_MEGAKERNEL") == "none":
        return False
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device)[0] >= 9
    )


def together(spec: DecoderSpec) -> int:
    """How many heads of those that share a key a block attends to, where contexts are long."""
    group = spec.heads // spec.kv_heads
    return 4 if group % 4 == 0 else group


def fuse(spec: DecoderSpec) -> DecodeMegakernel | None:
    if not computes(spec) or not available(spec.layers[0].qkv.device):
        return None
    try:
        return DecodeMegakernel(spec)
    except CudaError as error:
        log.warning("decoding of few rows goes on kernel by kernel, more slowly: %s", error)
        return None


class DecodeMegakernel:
    """Takes decode steps of up to eight rows over plain KV; None for anything else."""

    def __init__(self, spec: DecoderSpec):
        self.spec = spec
        layer = spec.layers[0]
        self.hidden = layer.qkv.shape[1]
        self.width = layer.out.shape[1]
        self.inter = layer.down.shape[1]
        self.kernels: dict[tuple[int, int], Kernel | None] = {}  # by rows and positions a block
        properties = torch.cuda.get_device_properties(layer.qkv.device)
        self.blocks = properties.multi_processor_count
        # none said: no kernel
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
            [described(each) for each in spec.layers], dtype=torch.int64, device=layer.qkv.device
        )

    def __call__(
        self, hidden: Tensor, batch: ForwardBatch, kv: KV
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        rows = hidden.shape[0]
        spec = self.spec
        if (
            rows > MOST_ROWS
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
        splits = max(1, self.blocks // (rows * spec.kv_heads))
        parts = torch.empty(
            rows * spec.heads * splits * (spec.dim + 2), dtype=torch.float32, device=hidden.device
        )
        met = torch.zeros(1, dtype=torch.int32, device=hidden.device)
        qkv, attended, inner = (
            hidden.new_empty(rows, n)
            for n in (self.width + 2 * spec.kv_heads * spec.dim, self.width, self.inter)
        )
        weighed = torch.empty_like(hidden)
        last = torch.empty_like(hidden)
        logits = hidden.new_empty(rows, self.vocab)
        squares = torch.empty(rows * self.hidden // 8, dtype=torch.float32, device=hidden.device)
        head = self.maps[4 * MAP_BYTES * len(spec.layers) :]
        given = (self.layers, self.maps, head, spec.norm, hidden)
        tensors = (*given, weighed, squares, last, logits, qkv, attended, inner, parts, kv)
        lists = (batch.rows, batch.seq_lens, batch.kv_slots, batch.positions, met)
        argument = Batch(
            *(tensor.data_ptr() for tensor in tensors),
            *kv.stride()[:4],
            batch.block_table.data_ptr(),
            batch.block_table.stride(0),
            *(tensor.data_ptr() for tensor in lists),
            len(spec.layers),
            spec.eps,
            spec.scale * math.log2(math.e),
        )
        try:
            kernel.launch(self.blocks, (WARPS + 1) * 32, argument, hidden.device)
        except (
            CudaError
        ) as error:  # refused, say because some multiprocessors are not ours: nothing has run
            self._do_without(rows, kv.shape[4], error)
            return None
        if batch.last is not None:
            return last[batch.logit_rows]
        return (last, logits) if self.vocab else last

    def kernel(self, rows: int, block: int) -> Kernel | None:
        """For so many rows; None where it cannot be: then the layers are computed op by op."""
        if (rows, block) not in self.kernels:
            try:
                self.kernels[rows, block] = self._compile(rows, block)
            except CudaError as error:
                self._do_without(rows, block, error)
        return self.kernels[rows, block]

    def _do_without(self, rows: int, block: int, error: CudaError) -> None:
        log.warning("decoding of %d rows goes on kernel by kernel, more slowly: %s", rows, error)
        self.kernels[rows, block] = None

    def _compile(self, rows: int, block: int) -> Kernel | None:
        slots, shared, parts = room(self.spec, rows, self.blocks, self.shared)
        if slots < LEAST_SLOTS:
            return None  # the inputs of that many rows leave the ring too little
        constants = constants_of(self.spec, rows, block, slots, shared, parts, self.blocks)
        source = with_header(SOURCE)
        try:
            return Kernel(compile_source(source, constants, self.arch), "decode_megakernel", shared)
        except CudaError:  # what was kept may be damaged
            return Kernel(
                compile_source(source, constants, self.arch, anew=True), "decode_megakernel", shared
            )


def vocabulary(spec: DecoderSpec) -> int:
    """Logits that the kernel computes: all or none."""
    head = spec.head
    plain = (
        isinstance(head, Tensor)
        and head.dtype == torch.bfloat16
        and head.is_contiguous()
        and head.shape[0] % 8 == 0
    )
    return head.shape[0] if plain else 0


def room(spec: DecoderSpec, rows: int, blocks: int, shared: int) -> tuple[int, int, int]:
    """How many chunks the ring holds, the bytes of shared memory in all, and in how many parts x comes to W_down: in two if the
    ring then holds more. As decode_megakernel.cu divides it."""
    layer = spec.layers[0]
    group = together(spec)
    attend = (spec.dim + group * (spec.dim + 8) + WARPS * group * spec.dim + 3 * group + 4) * 4
    inner = -(-layer.down.shape[1] // 64 // COLUMNS)  # chunks of a unit
    fold = min(-(-2 * inner // 3) * COLUMNS * 64, layer.down.shape[1])

    def holds(most: int) -> tuple[int, int]:
        """Where no more than so many inputs of W_down are there at a time."""
        inputs = ((layer.qkv, 0), (layer.out, 0), (layer.gate_up, 0), (layer.down, most))
        products = (
            # x, and what the warps sum up
            rows * (n or w.shape[1]) * 2 + WARPS * -(-w.shape[0] // 8 // blocks) * rows * 32
            for w, n in inputs
        )
        other = max(*products, attend) + 1024  # barriers
        slots = min(32, (shared - other) // CHUNK)
        return slots, slots * CHUNK + other

    whole = holds(layer.down.shape[1])
    apart = holds(fold)
    return (*apart, 2) if apart[0] > whole[0] else (*whole, 1)


def constants_of(
    spec: DecoderSpec, rows: int, block: int, slots: int, shared: int, parts: int, blocks: int
) -> dict[str, int]:
    """The constants of decode_megakernel.cu."""
    layer = spec.layers[0]
    large = sum(w.numel() for w in (layer.qkv, layer.out, layer.gate_up, layer.down)) * 2 > LARGE
    return {
        "WARPS": WARPS,
        "ROWS": rows,
        "HIDDEN": layer.qkv.shape[1],
        "INTER": layer.down.shape[1],
        "VOCAB": vocabulary(spec),
        "HEADS": spec.heads,
        "KV_HEADS": spec.kv_heads,
        "DIM": spec.dim,
        "BLOCK": block,
        "BLOCKS": blocks,
        "SLOTS": slots,
        "SHARED": shared,
        "PARTS": parts,
        "FLYING": min(FLYING[large], slots - 1),
        "MEETING": min(MEETING[large], slots - 1),
        "TOGETHER": together(spec),
        "GELU": int(spec.gelu),
        "QK_NORM": int(layer.q_norm is not None),
        "WINDOWS": int(any(each.window for each in spec.layers)),
        "BIASES": int(any(bias is not None for each in spec.layers for bias in each.biases)),
    }


def described(layer: DecoderLayer) -> list[int]:
    """A layer as decode_megakernel.cu knows it."""
    tensors: list[Any] = [
        layer.attn_norm,
        layer.mlp_norm,
        layer.q_norm,
        layer.k_norm,
        layer.cos_sin,
        *layer.biases,
    ]
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors] + [layer.window]
