"""Compiles and launches CUDA C++ with NVRTC and the CUDA driver.

Torch has loaded both libraries already, so no toolkit is needed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Mapping
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from octavo.ops.cache_dir import cache_folder

MAP_BYTES = 128  # the size of a tensor map (TMA descriptor)


class CudaError(RuntimeError):
    pass


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(str(error)) from error


@cache
def _nvrtc() -> ctypes.CDLL:
    """Load NVRTC from a wheel next to torch, or as the system's linker finds it.

    If there are several versions, torch's own version is preferred.
    """
    major = (torch.version.cuda or "").split(".")[0]
    wheels = sorted((Path(torch.__file__).parents[1] / "nvidia").glob("*/lib/libnvrtc.so.[0-9]*"))
    wheels.sort(key=lambda path: path.name != f"libnvrtc.so.{major}")
    for name in [*map(str, wheels), f"libnvrtc.so.{major}", "libnvrtc.so"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CudaError(
        "libnvrtc was not found: it comes with torch for CUDA, and is the package nvidia-cuda-nvrtc"
    )


def _check(status: int, action: str) -> None:
    if status:
        text = c_char_p()
        _driver().cuGetErrorString(status, byref(text))
        raise CudaError(f"{action}: {(text.value or b'error %d' % status).decode()}")


def with_header(source: Path, header: Path | None = None) -> str:
    """Return the source with its header included.

    `header` replaces the header for GPUs, in order to emulate a kernel.
    """
    name = "hopper.cuh"
    include = f'#include "{name}"'
    header = header or source.with_name(name)
    before, after = source.read_text().split(include)
    line = before.count("\n") + 1
    included = f'#line 1 "{header.name}"\n{header.read_text()}'
    return f'{before}{included}#line {line} "{source.name}"\n{after}'


def compile_source(
    source: str, constants: Mapping[str, int], arch: str, force: bool = False
) -> bytes:
    """Compile to machine code, or read it from the cache: compiling takes a second or two.

    `force` compiles even if the cache has the code.
    """
    options = [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        *(f"-D{name}={value}" for name, value in constants.items()),
    ]
    key = hashlib.sha256(
        "\0".join([source, *options, str(torch.version.cuda)]).encode()
    ).hexdigest()[:32]
    cached = cache_folder("cuda") / f"{key}.cubin"
    if not force:
        try:
            return cached.read_bytes()
        except OSError:
            pass
    code, _ = translate(source, options)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cached.parent, delete=False) as part:
            part.write(code)
        os.replace(part.name, cached)
    except OSError:
        pass  # it is compiled again next time
    return code


def translate(source: str, options: list[str]) -> tuple[bytes, str]:
    """Return the machine code and the log of the compiler."""
    nvrtc = _nvrtc()
    program = c_void_p()
    size = c_size_t()
    if nvrtc.nvrtcCreateProgram(byref(program), source.encode(), b"octavo.cu", 0, None, None):
        raise CudaError("NVRTC cannot create a program")
    try:
        arguments = (c_char_p * len(options))(*(option.encode() for option in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
        nvrtc.nvrtcGetProgramLogSize(program, byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        if failed:
            raise CudaError(f"a kernel does not compile:\n{log.value.decode()}")
        nvrtc.nvrtcGetCUBINSize(program, byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
        return code.raw, log.value.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


class Kernel:
    """A kernel on the current device."""

    def __init__(self, code: bytes, name: str, shared: int):
        module = c_void_p()
        self.function = c_void_p()
        self.shared = shared
        _check(_driver().cuModuleLoadData(byref(module), code), "loading a kernel")
        _check(
            _driver().cuModuleGetFunction(byref(self.function), module, name.encode()),
            f"finding {name}",
        )
        _check(
            _driver().cuFuncSetAttribute(self.function, 8, shared),
            f"giving {name} {shared} bytes of shared memory",
        )

    @classmethod
    def load(
        cls, source: str, constants: Mapping[str, int], arch: str, name: str, shared: int
    ) -> Kernel:
        """Compile a kernel, or take it from the cache."""
        try:
            return cls(compile_source(source, constants, arch), name, shared)
        except CudaError:  # the cached binary may be damaged
            return cls(compile_source(source, constants, arch, force=True), name, shared)

    def launch(
        self,
        blocks: int,
        threads: int,
        argument: ctypes.Structure,
        device: torch.device,
        cooperative: bool = False,
    ) -> None:
        """Launch the kernel. The blocks of a cooperative kernel wait for each other: CudaError is
        raised if they cannot be resident at once."""
        stream = c_void_p(torch.cuda.current_stream(device).cuda_stream)
        arguments = (c_void_p * 1)(ctypes.addressof(argument))
        shape = (blocks, 1, 1, threads, 1, 1)
        if cooperative:
            status = _driver().cuLaunchCooperativeKernel(
                self.function, *shape, self.shared, stream, arguments
            )
        else:
            status = _driver().cuLaunchKernel(
                self.function, *shape, self.shared, stream, arguments, None
            )
        _check(status, "launching a kernel")


def tensor_map(weight: Tensor, halves: int, columns: int) -> bytes:
    """Return the TMA descriptor of weight [outputs, inputs] (bfloat16, contiguous).

    A copy is [columns][8][64]: eight outputs, of which each of the `halves` of the matrix gives an
    equal share. Lines of 128 bytes are swizzled in parts of 16 bytes. Elements outside are zero.
    """
    outputs, inputs = weight.shape
    rows = outputs // halves
    buffer = ctypes.create_string_buffer(MAP_BYTES + 64)
    address = (ctypes.addressof(buffer) + 63) // 64 * 64
    sizes = (c_uint64 * 4)(64, rows, halves, inputs // 64)
    strides = (c_uint64 * 3)(inputs * 2, rows * inputs * 2, 128)
    box = (c_uint32 * 4)(64, 8 // halves, halves, columns)
    element_strides = (c_uint32 * 4)(1, 1, 1, 1)
    bfloat16 = 9
    swizzle = 3
    promote = 2
    status = _driver().cuTensorMapEncodeTiled(
        c_void_p(address),
        c_int(bfloat16),
        c_uint32(4),
        c_void_p(weight.data_ptr()),
        sizes,
        strides,
        box,
        element_strides,
        c_int(0),
        c_int(swizzle),
        c_int(promote),
        c_int(0),
    )
    _check(status, "describing weights")
    return ctypes.string_at(address, MAP_BYTES)
