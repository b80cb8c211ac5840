"""Sampling with min-p, top-k and top-p on a GPU, without sorting: filtered_sampling.cu."""

from __future__ import annotations

import ctypes
import logging
from ctypes import c_int, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from octavo.ops import SamplingColumns
from octavo.ops.cuda.driver import CudaError, Kernel, with_header

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("filtered_sampling.cu")
THREADS = 1024
LIST = 2048  # tokens that fit into shared memory, where they are read without the row
BINS = 2048
STORAGE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Arguments(ctypes.Structure):
    """The kernel's argument, as filtered_sampling.cu declares it."""

    _fields_ = [
        ("logits", c_void_p),
        ("stride_logits", c_uint64),
        ("slots", c_void_p),
        ("positions", c_void_p),
        ("temperature", c_void_p),
        ("top_p", c_void_p),
        ("top_k", c_void_p),
        ("max_distance", c_void_p),
        ("seed_low", c_void_p),
        ("seed_high", c_void_p),
        ("stride_float", c_uint64),
        ("stride_int", c_uint64),
        ("tokens", c_void_p),
        ("vocab_size", c_int),
    ]


def shared_bytes(threads: int, list_size: int) -> int:
    """Return the size of the struct Shared of filtered_sampling.cu."""
    histogram = 3 * 4 * BINS
    prefix_sums = 2 * 16 * threads
    choices = 8 * threads
    return histogram + prefix_sums + choices + 8 * list_size + 64


def constants(logits: Tensor, threads: int, list_size: int) -> dict[str, int]:
    row_bytes = logits.stride(0) * logits.element_size()
    is_aligned = logits.data_ptr() % 16 == 0 and (row_bytes % 16 == 0 or len(logits) == 1)
    return {
        "THREADS": threads,
        "LIST": list_size,
        "STORAGE": STORAGE[logits.dtype],
        "ALIGNED": int(is_aligned),
    }


def arguments(
    logits: Tensor, slots: Tensor, positions: Tensor, sampling: SamplingColumns, tokens: Tensor
) -> Arguments:
    return Arguments(
        logits=logits.data_ptr(),
        stride_logits=logits.stride(0),
        slots=slots.data_ptr(),
        positions=positions.data_ptr(),
        temperature=sampling.temperature.data_ptr(),
        top_p=sampling.top_p.data_ptr(),
        top_k=sampling.top_k.data_ptr(),
        max_distance=sampling.max_distance.data_ptr(),
        seed_low=sampling.seed_low.data_ptr(),
        seed_high=sampling.seed_high.data_ptr(),
        stride_float=sampling.temperature.stride(0),
        stride_int=sampling.top_k.stride(0),
        tokens=tokens.data_ptr(),
        vocab_size=logits.shape[1],
    )


@cache
def is_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel runs on a device. If it cannot be compiled, the log says why."""
    if device.type != "cuda" or torch.version.hip is not None or dtype not in STORAGE:
        return False
    try:
        kernel(constants(torch.empty(1, 8, dtype=dtype, device=device), THREADS, LIST), device)
    except CudaError as error:
        log.warning("top-k and top-p sort the vocabulary, which is slow: %s", error)
        return False
    return True


def kernel(compile_constants: dict[str, int], device: torch.device) -> Kernel:
    return _kernel(tuple(compile_constants.items()), device)


@cache
def _kernel(compile_constants: tuple[tuple[str, int], ...], device: torch.device) -> Kernel:
    properties = torch.cuda.get_device_properties(device)
    return Kernel.load(
        with_header(SOURCE),
        dict(compile_constants),
        f"sm_{properties.major}{properties.minor}",
        "sample_filtered",
        shared_bytes(THREADS, LIST),
    )


def sample_filtered(
    logits: Tensor, slots: Tensor, positions: Tensor, sampling: SamplingColumns, tokens: Tensor
) -> None:
    """Sample a token for each row of logits [R, vocab] whose slot has min-p, top-k or top-p.

    tokens [R] (int32) holds the likeliest token of each row, or -1, and is overwritten.
    """
    launched = kernel(constants(logits, THREADS, LIST), logits.device)
    launched.launch(
        blocks=len(logits),
        threads=THREADS,
        argument=arguments(logits, slots, positions, sampling, tokens),
        device=logits.device,
    )
