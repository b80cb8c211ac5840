"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits where it needs its results.

Hopper and later. Every kernel here lets the next one start at once (`start_next`) and reads nothing that another kernel
wrote before it has waited for all of them to end (`wait_for_inputs`). What it may do before that is fetch weights. One exception:
decoding beside prompts (attention_kernels.py) starts when the kernel before it has seen the inputs of both, and waits at its end.

With one row a step of Qwen3-0.6B is 250 kernels of 2 to 5 us: the gaps between them and the first reads are a quarter of it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

AVAILABLE = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
OVERLAP = tl.constexpr(AVAILABLE)
# for the call of a kernel that uses these two
LAUNCH: dict[str, Any] = {"launch_pdl": True} if AVAILABLE else {}


@triton.jit
def start_next():
    if OVERLAP:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs():
    if OVERLAP:
        cuda.gdc_wait()


@triton.jit
def fetch(at):
    """Ask for the cache lines at these addresses, which no kernel writes: they come while this one may still wait."""
    if OVERLAP:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], tl.int32, False, 1
        )
