"""CUDA kernels without a GPU: compiled for the processor with hopper.h in the place of
octavo/ops/cuda/hopper.cuh."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from ctypes import c_char_p, c_int, c_uint64, c_void_p
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.ops.cuda.driver import CudaError, with_header

HEADER = Path(__file__).with_name("hopper.h")
MAP_WORDS = 16
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-w"]


class EmulatedKernel:
    """As driver.Kernel, but for the compiler. Threads are run in an order drawn from `seed`."""

    def __init__(
        self,
        source: Path,
        constants: Mapping[str, int | str],
        name: str,
        shared: int,
        folder: Path,
        seed: int = 1,
    ):
        compiler = shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("no C++ compiler: kernels cannot be emulated")
        self.shared, self.seed = shared, seed
        key = abs(hash((name, *constants.items())))
        text, library = folder / f"{key}.cpp", folder / f"{key}.so"
        text.write_text(f"{with_header(source, HEADER)}\nEMULATED({name})\n")
        defined = [f"-D{constant}={value}" for constant, value in constants.items()]
        subprocess.run([compiler, *FLAGS, *defined, "-o", str(library), str(text)], check=True)
        self._launch = ctypes.CDLL(str(library)).launch
        self._launch.argtypes = [c_void_p, c_int, c_int, c_int, c_uint64, c_char_p, c_int]

    def launch(
        self,
        blocks: int,
        threads: int,
        argument: ctypes.Structure,
        device: torch.device,
        cooperative: bool = False,
    ) -> None:
        error = ctypes.create_string_buffer(500)
        if self._launch(
            ctypes.addressof(argument), blocks, threads, self.shared, self.seed, error, len(error)
        ):
            raise CudaError(error.value.decode())


def emulated_map(weight: Tensor, halves: int, columns: int) -> bytes:
    """As driver.tensor_map; the Map of hopper.h."""
    words = [weight.data_ptr(), *weight.shape, halves, columns]
    return b"".join(
        word.to_bytes(8, "little") for word in [*words, *[0] * (MAP_WORDS - len(words))]
    )
