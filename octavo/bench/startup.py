"""Measures how long a new process takes from its start to the first token."""

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

SHARD_BYTES = 4 * 2**30

CHILD_PROGRAM = """
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
    advance: Callable[[], None] = lambda: None,
) -> list[dict[str, float]]:
    """Return the seconds from the start to the end of the imports, the load and the first token.

    The first run fills the caches of compiled kernels and of the file system.
    """
    runs = []
    for _ in range(repeat):
        started_at = time.time()
        command = [sys.executable, "-c", CHILD_PROGRAM, json.dumps([model, asdict(options)])]
        finished = subprocess.run(command, capture_output=True, text=True)
        if finished.returncode:
            raise OctavoError(
                f"the process ended with {finished.returncode}: {finished.stderr.strip()[-500:]}"
            )
        timestamps = json.loads(finished.stdout.strip().splitlines()[-1])
        runs.append({name: timestamp - started_at for name, timestamp in timestamps.items()})
        advance()
    return runs


def write_checkpoint(
    hf_config: dict[str, Any], directory: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write random weights for a model config as a Hugging Face directory with shards."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    model = build(
        registry.parse(hf_config), registry.find(hf_config), ReferenceOps(), dtype, "meta"
    )
    shards: list[dict[str, torch.Tensor]] = [{}]
    shard_bytes = 0
    weight_map: dict[str, str] = {}

    def flush() -> None:
        save_file(shards[-1], directory / f"model-{len(shards):05d}.safetensors")
        shards[-1].clear()
        shards.append({})

    for name, target in model.weight_map().items():
        is_norm = len(target.dest.shape) == 1
        if is_norm:
            tensor = torch.ones(target.dest.shape, dtype=dtype)
        else:
            # The product of a random column and a random row is fast to make and does not compress.
            column = torch.randn(target.dest.shape[0], 1).to(dtype)
            row = torch.randn(1, target.dest.shape[1]).to(dtype)
            tensor = (column * row * 0.02).contiguous()
        shards[-1][name] = tensor
        weight_map[name] = f"model-{len(shards):05d}.safetensors"
        shard_bytes += tensor.nbytes
        if shard_bytes > SHARD_BYTES:
            flush()
            shard_bytes = 0
    if shards[-1]:
        flush()
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (directory / "config.json").write_text(json.dumps(hf_config))
