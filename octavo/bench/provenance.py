"""Records the origin of a measurement: the date, the commit, the machine and the versions.

Every bench adds this record to its result, so that a figure in the documentation can be traced to
one run. The record never names a user, a host or a path.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "numba", "numpy", "tokenizers")


def provenance() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": machine(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "versions": {"python": platform.python_version(), **package_versions()},
    }


def commit() -> str | None:
    """Return the commit of the source tree, or None without git.

    A plus sign means that files differ from the commit.
    """
    root = Path(__file__).parents[2]
    try:
        head = run_git(root, "rev-parse", "--short=10", "HEAD")
        changed = run_git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def run_git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    finished = subprocess.run(command, text=True, capture_output=True, check=True, timeout=10)
    return finished.stdout.strip()


def machine() -> dict[str, Any]:
    """Return the processor, the number of usable cores, and the GPU if torch sees one."""
    description: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": instructions(),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        description["gpu"] = torch.cuda.get_device_name()
        description["cuda"] = torch.version.cuda
    return description


def instructions() -> str:
    """Return the vector instructions that decide the speed of matrix products on a CPU."""
    flags = cpu_field("flags").split()
    if "avx512f" in flags:
        return "AVX-512 VNNI" if "avx512_vnni" in flags else "AVX-512"
    return "AVX2" if "avx2" in flags else "none"


def cpu_name() -> str:
    return cpu_field("model name") or platform.processor() or platform.machine()


def cpu_field(name: str) -> str:
    """Return a field of the first processor, or "" if the system does not report it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""


def package_versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
