"""How long a fresh process takes from its start to the first token."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from octavo.engine_options import EngineOptions
from octavo.errors import OctavoError
from octavo.model import build, registry
from octavo.ops.reference import ReferenceOps

SHARD = 4 * 2**30  # bytes

CHILD = """
import json, sys, time
model, options = json.loads(sys.argv[1])
from octavo import LLM, SamplingParams
imported = time.time()
llm = LLM(model, progress=False, **options)
loaded = time.time()
next(iter(llm.stream([1, 2, 3, 4, 5, 6, 7, 8], SamplingParams(max_tokens=2, ignore_eos=True))))
print(json.dumps({"imported": imported, "loaded": loaded, "first_token": time.time()}))
"""


def measure(
    model: str | None,
    options: EngineOptions,
    repeat: int = 3,
    done: Callable[[], None] = lambda: None,
) -> list[dict[str, float]]:
    """Return the seconds from the start of a process until its imports are done, its model is loaded
    and it has the first token. The first run fills caches of compiled kernels and of the file
    system."""
    runs = []
    for _ in range(repeat):
        start = time.time()
        child = [sys.executable, "-c", CHILD, json.dumps([model, asdict(options)])]
        finished = subprocess.run(child, capture_output=True, text=True)
        if finished.returncode:
            raise OctavoError(
                f"the process ended with {finished.returncode}: {finished.stderr.strip()[-500:]}"
            )
        times = json.loads(finished.stdout.strip().splitlines()[-1])
        runs.append({name: at - start for name, at in times.items()})
        done()
    return runs


def write_checkpoint(
    config: dict[str, Any], directory: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Random weights of a shape as a Hugging Face directory, in shards: something to start from where there is no model."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    model = build(registry.parse(config), registry.find(config), ReferenceOps(), dtype, "meta")
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    index: dict[str, str] = {}

    def flush() -> None:
        save_file(shards[-1], directory / f"model-{len(shards):05d}.safetensors")
        shards[-1].clear()
        shards.append({})

    for name, slot in model.weight_map().items():
        norm = len(slot.dest.shape) == 1
        tensor = (
            torch.ones(slot.dest.shape, dtype=dtype)
            if norm
            else torch.randn(slot.dest.shape[0], 1).to(dtype)
        )
        # rows of one random number each, shuffled by position: fast to make, nothing for a loader
        # to exploit
        if not norm:
            tensor = (tensor * torch.randn(1, slot.dest.shape[1]).to(dtype) * 0.02).contiguous()
        shards[-1][name] = tensor
        index[name] = f"model-{len(shards):05d}.safetensors"
        size += tensor.nbytes
        if size > SHARD:
            flush()
            size = 0
    if shards[-1]:
        flush()
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    (directory / "config.json").write_text(json.dumps(config))
