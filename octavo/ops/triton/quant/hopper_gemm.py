"""A quantised matrix times many rows on a Hopper GPU: weights become bfloat16 in registers while the tensor cores are at work.

What quant_gemm.py does, in Gluon, Triton's language in which waits and layouts are written out. Triton itself decides when to wait for
the tensor cores, and with weights in registers it is wrong unless every round waits (quant_gemm.py's `_finished`): they stand still
while weights are made. Here a step is 64 inputs, and two sets of registers take turns:

    threads         make 1 | wait for 0 | make 2 | wait for 1 | make 3 | ...
    tensor cores    0 ------------------|1 ------------------|2 ---------- ...

A set is filled only after the product that read it was waited for, and there is always one under way. Rows and words come through
a ring of STAGES steps in shared memory, copied by the GPU's own engine: a barrier says that a step is there, and its place is
filled anew once all threads have waited for its product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from octavo.ops.triton.dependent_launch import LAUNCH
from octavo.ops.triton.quant.packed_weight import LOCKS, PackedWeight
from octavo.ops.triton.quant.quant_gemm import PROCESSORS
from octavo.ops.triton.quant.weight_codes import BYTES, E4M3, FP8, INT4
from octavo.ops.weight import WeightFormat

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
STEP = gl.constexpr(64)  # inputs
# a multiprocessor's memory, and what of it a program cannot have for its ring
SHARED = 228 << 10
RESERVED = 2 << 10
SPLITS = (1, 2, 4, 8)
# what starting a program and adding up parts cost, in steps
STARTING = 2
ADDING = 12
# of an output: a block's, which is a step of 8-bit codes and two of 4-bit ones
WORDS = gl.constexpr(32)


class Hopper(NamedTuple):
    """How a product of many rows is cut up: tiles of `outputs` x `rows`, each along all inputs or one of `split` parts."""

    rows: int
    outputs: int
    warps: int
    resident: int  # programs that fit on a multiprocessor
    cost: int  # of a step of as many, in 10 ns
    split: int = 1

    def stages(self, kind: int) -> int:
        """Steps in the ring: as many as there is memory for."""
        step = 2 * STEP.value * self.rows + self.outputs * STEP.value // (
            2 if kind == INT4.value else 1
        )
        return ((SHARED // self.resident) - RESERVED) // step


# The larger a tile, the less is read; the smaller, the fewer multiprocessors have nothing to do at the end.
TILES = (Hopper(256, 128, 8, 1, 66), Hopper(128, 128, 4, 2, 75), Hopper(128, 64, 4, 2, 42))


def _nibbles(first: int) -> gl.constexpr:
    """Two words and a scale twice -> two times two numbers: parts `first` and `first` + 1, less 8, times the scale."""
    return gl.constexpr(f"""{{
    .reg .b32 a, b, least;
    mov.b32 least, 0x43084308;
    shr.u32 a, $2, {4 * first};
    shr.u32 b, $2, {4 * first + 4};
    lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
    sub.rn.bf16x2 a, a, least;
    sub.rn.bf16x2 b, b, least;
    mul.rn.bf16x2 $0, a, $3;
    mul.rn.bf16x2 $1, b, $3;
    }}""")


LOW = _nibbles(0)
HIGH = _nibbles(2)


@gluon.jit
def _weights(words, scale, HALF: gl.constexpr, KIND: gl.constexpr, OPERAND: gl.constexpr):
    """A block's words [N, 32] -> a step's weights [N, 64]: all of 8-bit codes, the first or second half of 4-bit ones, scaled."""
    if KIND == INT4:
        words, scale = gl.broadcast(words, scale)
        CODE: gl.constexpr = HIGH if HALF else LOW
        a, b = gl.inline_asm_elementwise(
            CODE, "=r,=r,r,r", [words, scale], (gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    else:
        EIGHT: gl.constexpr = E4M3 if KIND == FP8 else BYTES
        a, b = gl.inline_asm_elementwise(
            EIGHT, "=r,=r,r", [words], (gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    beside = gl.join(a, b).permute(0, 2, 1).reshape(words.shape[0], 64)
    return gl.convert_layout(beside, OPERAND, assert_trivial=True)


@gluon.constexpr_function
def _pairs(outputs, warps):
    """Where words with the scales of outputs n and n + 8 lie, [outputs / 16, 8]: in the threads that make those weights."""
    bits = [[1 << i, 0] for i in range((outputs // 16).bit_length() - 1)]
    own = warps.bit_length() - 1
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(bits[own:], lanes, bits[:own], [], [outputs // 16, 8])


@gluon.jit
def _info(at, block, width, KIND: gl.constexpr):
    """Read ahead: memory is far."""
    if KIND == INT4:
        return gl.load(at + block * width)
    else:
        return 0


@gluon.jit
def _scales(info, KIND: gl.constexpr, OPERAND: gl.constexpr):
    """Words of two float16 [N / 16, 8] -> [N, 1] bfloat16, each where it is"""
    if KIND == INT4:
        low = info.to(gl.int16).to(gl.float16, bitcast=True).to(gl.bfloat16)
        high = (info >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.bfloat16)
        flat = gl.join(low, high).permute(0, 2, 1).reshape(info.shape[0] * 16)
        return gl.convert_layout(flat, gl.SliceLayout(1, OPERAND), assert_trivial=True).expand_dims(
            1
        )
    else:
        return 0


@gluon.jit
def _fetch_words(w, x, ws, there, n0, first, i, inside, HALF: gl.constexpr, KIND: gl.constexpr):
    """A step's words on their way; of 4-bit codes the first half of a block brings them for both. Announces the rows, too."""
    bar = there.index(i % there.shape[0])
    if KIND == INT4 and HALF == 1:
        mbarrier.expect(bar, x.block_type.nbytes, pred=inside)
    else:
        block = i // 2 if KIND == INT4 else i
        begin = first // 2 if KIND == INT4 else first
        mbarrier.expect(bar, x.block_type.nbytes + w.block_type.nbytes, pred=inside)
        tma.async_copy_global_to_shared(
            w, [n0, (begin + block) * WORDS], bar, ws.index(block % ws.shape[0]), pred=inside
        )


@gluon.jit
def _fetch_rows(x, xs, there, m0, first, i, inside):
    s = i % xs.shape[0]
    tma.async_copy_global_to_shared(
        x, [m0, (first + i) * STEP], there.index(s), xs.index(s), pred=inside
    )


@gluon.jit
def _refill(w, x, ws, xs, there, m0, n0, first, i, count, HALF: gl.constexpr, KIND: gl.constexpr):
    """Step i in place of the one that all threads are done with."""
    gl.thread_barrier()
    _fetch_words(w, x, ws, there, n0, first, i, i < count, HALF, KIND)
    _fetch_rows(x, xs, there, m0, first, i, i < count)


@gluon.jit
def _made(ws, there, i, scale, HALF: gl.constexpr, KIND: gl.constexpr, OPERAND: gl.constexpr):
    """Step i's weights, once it is there"""
    STAGES: gl.constexpr = there.shape[0]
    mbarrier.wait(there.index(i % STAGES), i // STAGES & 1)
    block = i // 2 if KIND == INT4 else i
    return _weights(ws.index(block % ws.shape[0]).load(OPERAND), scale, HALF, KIND, OPERAND)


@gluon.jit
def _start(weights, xs, i, acc):
    """acc [N, M] and what step i adds to it, under way"""
    return warpgroup_mma(weights, xs.index(i % xs.shape[0]).permute([1, 0]), acc, is_async=True)


@gluon.jit
def _place(N: gl.constexpr, first, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Where a tile's sums lie in memory, of ROWS rows from `first` on: those that a warp has at a time are neighbours."""
    n = gl.arange(0, N, gl.SliceLayout(1, LAYOUT))
    m = first + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    n = n // 16 * 128 + n // 8 % 2 * 64 + n % 8 * 4
    m = m // 8 * (N * 8) + m % 2 * 32 + m % 8 // 2
    return n.expand_dims(1) + m.expand_dims(0)


@gluon.jit
def _shared(
    acc,
    partial,
    lock,
    part,
    M: gl.constexpr,
    N: gl.constexpr,
    SPLIT: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """A tile of which this program has one of SPLIT parts -> the sums of all parts, in their order, for its share of the rows.
    It waits for the others, which were started with it."""
    WHOLE: gl.constexpr = acc.type.layout
    gl.store(partial + part * (M * N) + _place(N, 0, M, WHOLE), acc)
    gl.thread_barrier()
    seen = gl.atomic_add(lock, 1) + 1
    while seen < SPLIT:
        seen = gl.atomic_add(lock, 0)
    ROWS: gl.constexpr = M // SPLIT
    at = partial + _place(N, part * ROWS, ROWS, LAYOUT)
    total = gl.load(at, cache_modifier=".cg")
    for i in gl.static_range(1, SPLIT):
        total += gl.load(at + i * (M * N), cache_modifier=".cg")
    if gl.atomic_add(lock, 1) == 2 * SPLIT - 1:
        gl.store(lock, 0)
    return total


@gluon.jit(do_not_specialize=["rows"])
def hopper_kernel(
    x, w, out, info, bias, partial, locks, rows, steps, width, KIND: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """A tile [N outputs, M rows] of the transposed product, or its share of one. x [rows, inputs], w, out: descriptors."""
    cuda.gdc_launch_dependents()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, M, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    part = gl.program_id(0) % SPLIT
    tile = gl.program_id(0) // SPLIT
    row_tiles = gl.cdiv(rows, M)
    m0 = tile % row_tiles * M
    n0 = tile // row_tiles * N
    count = steps // SPLIT
    first = part * count
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, M, STEP], x.layout)
    ws = gl.allocate_shared_memory(
        gl.int16, [(STAGES + 1) // 2 if KIND == INT4 else STAGES, N, WORDS], w.layout
    )
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    old = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(there.index(i), count=1)
    mbarrier.init(old, count=1)
    fence_async_shared()
    for i in gl.static_range(STAGES):
        _fetch_words(w, x, ws, there, n0, first, i, i < count, i % 2, KIND)
    cuda.gdc_wait()
    for i in gl.static_range(STAGES):
        _fetch_rows(x, xs, there, m0, first, i, i < count)
    if KIND == INT4:
        PAIRS: gl.constexpr = _pairs(N, WARPS)
        sixteen = gl.arange(0, N // 16, gl.SliceLayout(1, PAIRS)).expand_dims(1)
        pair = gl.arange(0, 8, gl.SliceLayout(0, PAIRS)).expand_dims(0)
        at = info + (first // 2 * width + n0 // 2) + (sixteen * 8 + pair)
    else:
        at = info
    scale = _scales(_info(at, 0, width, KIND), KIND, OPERAND)
    ahead = _info(at, gl.minimum(1, count // 2 - 1), width, KIND)
    even = _made(ws, there, 0, scale, 0, KIND, OPERAND)
    acc = _start(even, xs, 0, gl.zeros([N, M], gl.float32, SUMS))
    acc, even = warpgroup_mma_wait(1, deps=[acc, even])
    for i in range(0, count - 2, 2):
        odd = _made(ws, there, i + 1, scale, 1, KIND, OPERAND)
        acc = _start(odd, xs, i + 1, acc)
        acc, even = warpgroup_mma_wait(1, deps=[acc, even])
        _refill(w, x, ws, xs, there, m0, n0, first, i + STAGES, count, STAGES % 2, KIND)
        scale = _scales(ahead, KIND, OPERAND)
        ahead = _info(at, gl.minimum(i // 2 + 2, count // 2 - 1), width, KIND)
        even = _made(ws, there, i + 2, scale, 0, KIND, OPERAND)
        acc = _start(even, xs, i + 2, acc)
        acc, odd = warpgroup_mma_wait(1, deps=[acc, odd])
        _refill(w, x, ws, xs, there, m0, n0, first, i + 1 + STAGES, count, (STAGES + 1) % 2, KIND)
    odd = _made(ws, there, count - 1, scale, 1, KIND, OPERAND)
    acc = _start(odd, xs, count - 1, acc)
    acc, even, odd = warpgroup_mma_wait(0, deps=[acc, even, odd])
    gl.thread_barrier()  # from here on the ring holds what is written
    ROWS: gl.constexpr = M // SPLIT
    SHARE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    m0 += part * ROWS
    ready = xs._reinterpret(gl.bfloat16, [ROWS, N], out.layout)
    if ADD:
        mbarrier.expect(old, out.block_type.nbytes)
        tma.async_copy_global_to_shared(out, [m0, n0], old, ready)
    if SPLIT > 1:
        acc = _shared(
            acc,
            partial + tile.to(gl.int64) * (SPLIT * M * N),
            locks + tile,
            part,
            M,
            N,
            SPLIT,
            SHARE,
        )
    n = n0 + gl.arange(0, N, gl.SliceLayout(1, SHARE))
    if KIND != INT4:
        acc *= gl.load(info + n).expand_dims(1)
    if BIAS:
        acc += gl.load(bias + n).to(gl.float32).expand_dims(1)
    if ADD:
        mbarrier.wait(old, 0)
        acc += ready.permute([1, 0]).load(SHARE).to(gl.float32)
    ready.permute([1, 0]).store(acc.to(gl.bfloat16))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [m0, n0], ready)
    tma.store_wait(0)


def _described(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What the copy engine must know: the tensor, and the piece of it that is copied at a time."""
    kind = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.int16
    return TensorDescriptor.from_tensor(
        tensor, [rows, columns], gl.NVMMASharedLayout.get_default_for([rows, columns], kind)
    )


def known(form: WeightFormat) -> bool:
    """Groups of 128 inputs or none, and scales alone."""
    return (
        HOPPER
        and form.group_size == (128 if form.bits == 4 else 0)
        and not (form.asymmetric or form.float32_scales or form.quantizes_activations)
    )


def fits(dtype: torch.dtype, weight: PackedWeight) -> bool:
    """Whole tiles and pairs of steps."""
    outputs, inputs = weight.shape
    return (
        known(weight.format)
        and dtype == torch.bfloat16
        and outputs % 128 == 0
        and inputs % (2 * STEP.value) == 0
    )


def fastest(rows: int, outputs: int, inputs: int) -> Hopper:
    """The tile, and how many programs share one, by what they would take."""
    steps = inputs // STEP.value

    def cost(how: Hopper) -> int:
        tiles = outputs // how.outputs * triton.cdiv(rows, how.rows)
        if (how.split > 1 and tiles > LOCKS) or steps % (2 * how.split):
            return 1 << 60
        rounds = triton.cdiv(tiles * how.split, PROCESSORS * how.resident)
        return how.cost * rounds * (steps // how.split + STARTING + ADDING * (how.split > 1))

    return min((how._replace(split=split) for how in TILES for split in SPLITS), key=cost)


def hopper(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, add: Tensor | None, how: Hopper
) -> Tensor:
    """x [T, in] -> [T, out], written over add where there is one"""
    rows = len(x)
    (outputs, inputs) = weight.shape
    split = how.split
    out = x.new_empty(rows, outputs) if add is None else add
    tiles = outputs // how.outputs * triton.cdiv(rows, how.rows)
    partial = (
        x.new_empty(tiles * split * how.rows * how.outputs, dtype=torch.float32)
        if split > 1
        else None
    )
    hopper_kernel[tiles * split,](
        _described(x, how.rows, STEP.value), _described(weight.words, how.outputs, WORDS.value),
        _described(out, how.rows // split, how.outputs), weight.info, bias, partial, weight.locks, rows, inputs // STEP.value,
        weight.info.shape[-1], weight.kind, bias is not None, add is not None, how.rows, how.outputs, how.stages(weight.kind),
        how.warps, split, num_warps=how.warps, **LAUNCH,
    )  # fmt: skip
    return out
