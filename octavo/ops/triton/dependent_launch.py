"""Programmatic dependent launch: a kernel starts while the kernel before it still runs.

It needs Hopper or later. Every kernel lets the next one start at once (`start_next`). Before it
reads the results of other kernels, it waits until they have finished (`wait_for_inputs`); until
then it may only load weights. The exception is decode beside prefill (attention_kernels.py): it
starts when the inputs of both kernels are ready and waits at its end.

A step of Qwen3-0.6B with one row is 250 kernels of 2 to 5 us. The gaps between them and their first
loads take a quarter of the step without dependent launch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

HOPPER_OR_LATER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
OVERLAP = tl.constexpr(HOPPER_OR_LATER)
# The launch option of kernels that call start_next() and wait_for_inputs().
LAUNCH: dict[str, Any] = {"launch_pdl": True} if HOPPER_OR_LATER else {}


@triton.jit
def start_next():
    if OVERLAP:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs():
    if OVERLAP:
        cuda.gdc_wait()


@triton.jit
def prefetch_l2(address):
    """Prefetch the cache lines at these addresses into L2. No kernel may write to them."""
    if OVERLAP:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [address.to(tl.int64)],
            tl.int32,
            False,
            1,
        )
