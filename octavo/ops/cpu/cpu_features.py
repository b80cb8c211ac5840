"""What this machine offers the CPU kernels: its instruction set, its threads, and a place for compiled code.

Where something is missing it says what, in words: the kernels are then left alone and the reference ops compute. Imports no
numba, so that asking costs nothing.
"""

from __future__ import annotations

import hashlib
import os
import platform
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from octavo.ops.cache_dir import kept_in


class InstructionSet(NamedTuple):
    """What a kernel is written for: `lanes` float32 in a vector, and how it multiplies bytes."""

    name: str
    lanes: int
    dot: bool  # has the instruction that multiplies bytes and adds them to 32-bit sums (VNNI)
    flags: tuple[str, ...]  # what /proc/cpuinfo must list


# Best first. OCTAVO_CPU_ISA picks one by name, or "none" for the reference.
INSTRUCTION_SETS = (
    InstructionSet(
        "avx512-vnni",
        16,
        True,
        ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "f16c", "fma"),
    ),
    InstructionSet("avx-vnni", 8, True, ("avx_vnni", "avx2", "f16c", "fma")),
    InstructionSet("avx2", 8, False, ("avx2", "f16c", "fma")),
)


@cache
def cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(found.partition(":")[2].split())


def instruction_set() -> InstructionSet | str:
    """The best that the kernels can use here, or why there is none."""
    wanted = os.environ.get("OCTAVO_CPU_ISA", "")
    if wanted == "none":
        return "OCTAVO_CPU_ISA=none"
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"the CPU kernels are for Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    if find_spec("numba") is None:
        return "numba is not installed: pip install numba"
    if wanted and wanted not in [isa.name for isa in INSTRUCTION_SETS]:
        return f"OCTAVO_CPU_ISA={wanted} is none of {', '.join(isa.name for isa in INSTRUCTION_SETS)}, none"
    for isa in INSTRUCTION_SETS:
        if wanted in ("", isa.name) and cpu_flags().issuperset(isa.flags):
            return isa
    return f"this CPU lacks {wanted or INSTRUCTION_SETS[-1].name}"


def cache_directory(isa: InstructionSet) -> Path:
    """Where compiled code is kept: one folder for each version of the kernels, since numba notices only changes of the file
    a function stands in, not of what that function is built from."""
    digest = hashlib.sha256(f"{isa.name} {version('numba')}".encode())
    for source in sorted(Path(__file__).parent.glob("jit/*.py")):
        digest.update(source.read_bytes())
    return kept_in("numba") / digest.hexdigest()[:16]
