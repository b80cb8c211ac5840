"""The instruction set of this machine, and the directory for compiled CPU kernels.

If the kernels cannot run, instruction_set() returns the reason, and the reference ops compute. This
module does not import numba, so that it is cheap to import.
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

from octavo.ops.cache_dir import cache_folder


class InstructionSet(NamedTuple):
    """An instruction set: `lanes` is the number of float32 in a vector."""

    name: str
    lanes: int
    dot: bool  # VNNI: one instruction multiplies bytes and adds them to 32-bit sums
    flags: tuple[str, ...]  # the flags that /proc/cpuinfo must list


# The best comes first. OCTAVO_CPU_ISA selects one by name, or "none" for the reference ops.
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
    flags_line = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags_line.partition(":")[2].split())


def instruction_set() -> InstructionSet | str:
    """Return the best instruction set for this machine, or the reason why there is none."""
    requested = os.environ.get("OCTAVO_CPU_ISA", "")
    if requested == "none":
        return "OCTAVO_CPU_ISA=none"
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return (
            "the CPU kernels are for Linux on x86-64, "
            f"this is {platform.system()} on {platform.machine()}"
        )
    if find_spec("numba") is None:
        return "numba is not installed: pip install numba"
    if requested and requested not in [isa.name for isa in INSTRUCTION_SETS]:
        names = ", ".join(isa.name for isa in INSTRUCTION_SETS)
        return f"OCTAVO_CPU_ISA={requested} is none of {names}, none"
    for isa in INSTRUCTION_SETS:
        if requested in ("", isa.name) and cpu_flags().issuperset(isa.flags):
            return isa
    return f"this CPU lacks {requested or INSTRUCTION_SETS[-1].name}"


def cache_directory(isa: InstructionSet) -> Path:
    """Return the directory for compiled kernels. Each version of the kernels has its own.

    numba notices only changes of a function's own file, not of the functions that it calls.
    """
    digest = hashlib.sha256(f"{isa.name} {version('numba')}".encode())
    for source in sorted(Path(__file__).parent.glob("jit/*.py")):
        digest.update(source.read_bytes())
    return cache_folder("numba") / digest.hexdigest()[:16]
