"""A process of the server returns memory to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.serve.running import ROOT

# Prints the resident memory, in MiB, while many small blocks are allocated, after all of them but
# the last are freed, and after the interval of return_free_memory.
SCRIPT = """
import time
from pathlib import Path
from octavo.serve.process import return_free_memory

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

blocks = [bytearray(50_000) for _ in range(1000)]
print(resident_mib())
del blocks[:-1]
print(resident_mib())
return_free_memory(interval=0.05)
time.sleep(0.3)
print(resident_mib())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries are left alone")
def test_free_memory_below_a_block_in_use_goes_back_to_the_system() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    allocated, freed, returned = map(float, ran.stdout.split())
    assert freed > allocated - 10, "the C library returned the memory by itself"
    assert returned < allocated - 40
