"""Computes how much memory a model needs and how many tokens of KV fit beside it.

device memory = weights + activations of the largest step + KV cache + a reserve
host memory   = the host tier of the KV cache, if there is one

octavo/assemble.py puts these numbers together for LLM and for `octavo plan`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.config import DTYPE_BYTES, CacheConfig, ModelConfig, ScheduleConfig
from octavo.errors import InvalidRequest, NotEnoughMemory
from octavo.model.base import CausalLM, build

BLOCK_SIZE = {"cuda": 64, "cpu": 16}  # default KV block size
STEP_TOKENS = {"cuda": 16384, "cpu": 2048}  # default token budget of a step (step_tokens)
PIGGYBACK_TOKENS = 320  # default of piggyback_tokens (default_piggyback_tokens)
PIGGYBACK_PARAMETERS = 2 * 10**9  # parameters of the smallest model that gains by it
# bytes of device memory for staging copies between the device and the host
STAGING = {"cuda": 2**29, "cpu": 0}
DISK_PASSAGE = 1.0  # default GiB of host memory if only a disk tier is configured
KV_BUDGET = 1024  # default positions of a bounded KV cache per sequence
CPU_KV_SHARE = 0.25  # fraction of free memory, after the weights are loaded, for KV on a CPU


@dataclass(frozen=True)
class MemoryPlan:
    """Memory in bytes, by purpose."""

    weights: int
    activations: int
    kv_per_token: int
    block_size: int
    num_blocks: int
    host_blocks: int = 0
    disk: int = 0  # bytes of the disk tier
    draft_kv_per_token: int = 0  # bytes for a drafter with its own KV cache; it has no tiers

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.kv_per_token

    @property
    def host(self) -> int:
        return self.host_blocks * self.block_bytes

    @property
    def kv(self) -> int:
        return self.kv_tokens * (self.kv_per_token + self.draft_kv_per_token)

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def concurrency(self, length: int) -> int:
        """Return how many sequences of this length fit at once, in whole blocks.

        The KV of the last token is never computed."""
        return self.num_blocks // max(1, -(-(length - 1) // self.block_size))


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of parameters and buffers. The model may be on the meta device."""
    return sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])


def parameter_count(model: CausalLM) -> int:
    """Return the number of parameters of the config, however the weights are stored."""
    return sum(
        p.numel()
        for p in build(model.config, type(model), model.ops, model.dtype, "meta").parameters()
    )


def step_tokens(kind: str, parameters: int, max_num_seqs: int) -> int:
    """Return the default token budget of a step.

    On a GPU a step takes at most about 0.2 s at 600 TFLOP/s: larger steps are not faster and delay
    all sequences that decode."""
    tokens = STEP_TOKENS[kind]
    if kind == "cuda":
        tokens = max(2048, min(tokens, 2 ** round(math.log2(0.2 * 600e12 / (2 * parameters)))))
    return max(max_num_seqs, tokens)


def default_piggyback_tokens(kind: str, parameters: int, weights: int) -> int:
    """Return the default of ScheduleConfig.piggyback_tokens.

    Piggybacking is on for GPUs and 16-bit weights of models so large that matrix products dominate
    a step. A smaller model loses more by the second attention kernel than its products gain, and
    products of quantised weights gain nothing."""
    gains = kind == "cuda" and parameters >= PIGGYBACK_PARAMETERS and weights >= 2 * parameters
    return PIGGYBACK_TOKENS if gains else 0


def activation_bytes(model: ModelConfig, schedule: ScheduleConfig, dtype: str) -> int:
    """Return an upper bound on the peak of one step: the tensors of the widest layer for every
    token of the budget, and float32 logits with the copies that sampling makes."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    widest = 3 * model.hidden_size + max(2 * heads, 3 * model.intermediate_size)
    logits = 4 * schedule.max_num_seqs * model.vocab_size * 4
    return schedule.max_num_batched_tokens * widest * DTYPE_BYTES[dtype] + logits


def graph_bytes(model: ModelConfig, rows: int, dtype: str) -> int:
    """Return the bytes that CUDA graphs hold after capture: rows of logits
    (octavo.runner.graph_shapes.held_logits)."""
    return rows * model.vocab_size * DTYPE_BYTES[dtype]


def available_memory(device: torch.device) -> tuple[int, int]:
    """Return the free and the total bytes of a device. On a CPU the limit of a container counts."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = total
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit_bytes, used_bytes = (
                int(Path("/sys/fs/cgroup", name).read_text()) for name in (limit, used)
            )
        except (OSError, ValueError):
            continue
        if limit_bytes < total:
            stat = Path("/sys/fs/cgroup", used).with_name("memory.stat")
            free = min(free, limit_bytes - used_bytes + _reclaimable(stat))
            total = limit_bytes
    return free, total


def _reclaimable(stat: Path) -> int:
    """Return the bytes of cached files that count as used in a container and can be reclaimed."""
    try:
        fields = dict(line.split() for line in stat.read_text().splitlines())
        return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0


def kv_share(kind: str, free: int, total: int, utilization: float, activations: int) -> int:
    """Return the bytes for the KV cache of a "cuda" or "cpu" device. `free` is the memory after the
    weights are loaded."""
    if kind == "cuda":
        return int(total * utilization) - (total - free) - activations
    return int((free - activations) * CPU_KV_SHARE)


def size_pool(
    model: ModelConfig,
    block_size: int,
    kv_per_token: int,
    budget: int,
    max_num_seqs: int,
    max_model_len: int | None,
    num_blocks: int | None,
) -> tuple[CacheConfig, int]:
    """Return the KV cache and the context length. `budget` is the memory for KV in bytes, and
    `kv_per_token` includes the KV of a drafter.

    A given max_model_len must fit. The default is the model's own length, or what max_blocks."""
    if max_model_len is not None and max_model_len > model.max_position:
        raise InvalidRequest(
            f"max_model_len {max_model_len} (--max-model-len) is longer than the model's context "
            f"of {model.max_position} tokens: use at most {model.max_position}",
            "max_model_len",
        )
    per_block = block_size * kv_per_token
    max_blocks = num_blocks if num_blocks is not None else max(budget, 0) // per_block
    if max_blocks < 1:
        raise NotEnoughMemory(
            f"no memory is left for KV: one block of {block_size} tokens takes "
            f"{per_block / 2**20:.1f} MiB and the budget is {budget / 2**20:.1f} MiB. Use a "
            "smaller model or dtype, or raise gpu_memory_utilization"
        )
    longest = max_blocks * block_size
    if max_model_len is None:
        max_model_len = min(model.max_position, longest + 1)  # the last token is never computed
    elif max_model_len > longest + 1 and num_blocks is None:
        raise NotEnoughMemory(
            f"max_model_len {max_model_len} needs {-(-max_model_len // block_size)} KV blocks, but "
            f"memory holds {max_blocks}: max_model_len={longest} would work, or raise "
            "gpu_memory_utilization or use a smaller dtype or kv_cache_dtype"
        )
    # More blocks than all batch slots need at full length help only the prefix cache.
    if num_blocks is None:
        max_blocks = min(max_blocks, 2 * max_num_seqs * -(-max_model_len // block_size))
    return CacheConfig(block_size, max_blocks), max_model_len


def size_tiers(
    swap_space: float | None, disk_path: object, disk_gib: float, block_bytes: int, free: int
) -> tuple[int, int]:
    """Return the blocks of the host tier and the bytes of the disk tier. The host tier must fit
    into `free` bytes.

    Blocks read from disk pass through host memory, so a disk tier needs some host memory too."""
    gib = swap_space
    if gib is None:
        gib = 0.0 if disk_path is None else DISK_PASSAGE
    host = int(gib * 2**30)
    disk = int(disk_gib * 2**30) if disk_path is not None else 0
    if host > free:
        raise NotEnoughMemory(
            f"swap_space ({gib:g} GiB, --kv-host-gib) is more than the "
            f"{max(free, 0) / 2**30:.1f} GiB of memory that are left: lower it"
        )
    if 0 < host < block_bytes or (disk and not host):
        advice = "use more, or 0 for no host tier"
        if disk:
            advice = "use more, because every block from disk passes through host memory"
        raise InvalidRequest(
            f"swap_space ({gib:g} GiB, --kv-host-gib) is less than one KV block "
            f"({block_bytes / 2**20:.1f} MiB): {advice}",
            "swap_space",
        )
    if disk and disk < 2 * block_bytes:
        raise InvalidRequest(
            f"kv_disk_gib {disk_gib:g} is less than two KV blocks of "
            f"{block_bytes / 2**20:.1f} MiB: use more",
            "kv_disk_gib",
        )
    return host // block_bytes, disk
