"""How much memory a model takes and how many tokens of KV fit beside it. Arithmetic on configs; `octavo plan` prints it.

device memory = weights + activations of the largest step + KV pool + what must stay free
host memory   = the KV pool's second tier, if there is one
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.config import DTYPE_BYTES, KV_CODES, CacheConfig, ModelConfig, ScheduleConfig
from octavo.errors import InvalidRequest, NotEnoughMemory
from octavo.model.base import CausalLM, build
from octavo.params import check_real

BLOCK_SIZE = {"cuda": 64, "cpu": 16}  # where nobody says otherwise
STEP_TOKENS = {"cuda": 16384, "cpu": 2048}  # likewise: see step_tokens
PIGGYBACK_TOKENS = 320  # likewise: see default_piggyback_tokens
PIGGYBACK_PARAMETERS = 2 * 10**9  # of the smallest model that gains by it
# bytes of device memory that blocks pass through on their way to the host
STAGING = {"cuda": 2**29, "cpu": 0}
DISK_PASSAGE = 1.0  # GiB of host memory, where a disk is given and nothing is said
DISK_GIB = 16.0  # of a disk, likewise
KV_BUDGET = 1024  # positions of a sequence whose cache is bounded, likewise
CPU_KV_SHARE = 0.25  # of the memory that is available once the weights are loaded


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes, by what they are for."""

    weights: int
    activations: int
    kv_per_token: int
    block_size: int
    num_blocks: int
    host_blocks: int = 0
    disk: int = 0  # bytes that KV may take there

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.kv_per_token

    @property
    def host(self) -> int:
        return self.host_blocks * self.block_bytes

    @property
    def kv(self) -> int:
        return self.num_blocks * self.block_size * self.kv_per_token

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def concurrency(self, length: int) -> int:
        """Sequences of this many tokens that fit at once: whole blocks each, and the last token is never computed."""
        return self.num_blocks // max(1, -(-(length - 1) // self.block_size))


def weight_bytes(model: torch.nn.Module) -> int:
    """Of the parameters and buffers; a model built on the meta device answers without holding any."""
    return sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])


def parameter_count(model: CausalLM) -> int:
    """Of the model as its config describes it, however its weights are stored."""
    return sum(
        p.numel()
        for p in build(model.config, type(model), model.ops, model.dtype, "meta").parameters()
    )


def step_tokens(kind: str, parameters: int, max_num_seqs: int) -> int:
    """Token budget of a step where nobody says otherwise. On a GPU no more than takes about 0.2 s at 600 TFLOP/s: larger steps
    are no faster and make everybody who decodes wait."""
    tokens = STEP_TOKENS[kind]
    if kind == "cuda":
        tokens = max(2048, min(tokens, 2 ** round(math.log2(0.2 * 600e12 / (2 * parameters)))))
    return max(max_num_seqs, tokens)


def default_piggyback_tokens(kind: str, parameters: int, weights: int) -> int:
    """ScheduleConfig.piggyback_tokens where the user gives none.

    It is on for GPUs and 16-bit weights of models so large that matrix products dominate a step. A smaller
    model loses more by the second attention kernel than its products gain, and products of quantised
    weights gain nothing."""
    gains = kind == "cuda" and parameters >= PIGGYBACK_PARAMETERS and weights >= 2 * parameters
    return PIGGYBACK_TOKENS if gains else 0


def activation_bytes(model: ModelConfig, schedule: ScheduleConfig, dtype: str) -> int:
    """Peak of one step, from above: the widest layer's tensors for every token of the budget, and float32 logits with
    the copies that sampling makes."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    widest = 3 * model.hidden_size + max(2 * heads, 3 * model.intermediate_size)
    logits = 4 * schedule.max_num_seqs * model.vocab_size * 4
    return schedule.max_num_batched_tokens * widest * DTYPE_BYTES[dtype] + logits


def graph_bytes(model: ModelConfig, rows: int, dtype: str) -> int:
    """That stay taken once all graphs are captured: so many rows of logits (octavo.runner.shapes.held_rows)."""
    return rows * model.vocab_size * DTYPE_BYTES[dtype]


def available_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of the device; on a CPU what this process may still take, a container's limit included."""
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
            cap, now = (int(Path("/sys/fs/cgroup", name).read_text()) for name in (limit, used))
        except (OSError, ValueError):
            continue
        if cap < total:
            free = min(
                free, cap - now + _given_back(Path("/sys/fs/cgroup", used).with_name("memory.stat"))
            )
            total = cap
    return free, total


def _given_back(stat: Path) -> int:
    """Bytes of files that a container holds in memory and gives back when they are needed: they count as used."""
    try:
        fields = dict(line.split() for line in stat.read_text().splitlines())
        return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0


def kv_memory(device: torch.device, utilization: float, activations: int) -> int:
    """Bytes for the KV pool, asked after the weights are loaded."""
    return kv_share(device.type, *available_memory(device), utilization, activations)


def kv_share(kind: str, free: int, total: int, utilization: float, activations: int) -> int:
    """kv_memory of a "cuda" or "cpu" device that has this much memory free once the weights are loaded."""
    if kind == "cuda":
        return int(total * utilization) - (total - free) - activations
    return int((free - activations) * CPU_KV_SHARE)


def parse_kv_dtype(asked: str) -> str | None:
    """What a KV cache is to hold; None for "auto", which leaves it to the model."""
    names = (*DTYPE_BYTES, *KV_CODES)
    found = {"auto": None, "fp8_e4m3": "fp8"} | {name: name for name in names}
    if asked not in found:
        raise InvalidRequest(
            f"kv_cache_dtype is auto, {', '.join(names)} (which is e4m3), not {asked!r}",
            "kv_cache_dtype",
        )
    return found[asked]


def size_pool(
    model: ModelConfig,
    block_size: int,
    kv_dtype: str,
    budget: int,
    max_num_seqs: int,
    max_model_len: int | None,
    num_blocks: int | None,
) -> tuple[CacheConfig, int]:
    """The pool and the context length. A length that was asked for must fit; otherwise the model's own, or what fits."""
    if max_model_len is not None and max_model_len > model.max_position:
        raise InvalidRequest(
            f"max_model_len {max_model_len} is beyond the model's {model.max_position} positions: use at most that",
            "max_model_len",
        )
    # or scales would not lie on a multiple of their size
    if kv_dtype in KV_CODES and model.head_dim % 4:
        raise InvalidRequest(
            f"kv_cache_dtype int8 or fp8 needs heads of a multiple of 4 numbers, this model's have {model.head_dim}: use auto",
            "kv_cache_dtype",
        )
    per_block = block_size * model.kv_bytes_per_token(kv_dtype)
    fits = num_blocks if num_blocks is not None else max(budget, 0) // per_block
    if fits < 1:
        raise NotEnoughMemory(
            f"no memory is left for KV: one block of {block_size} tokens takes {per_block / 2**20:.1f} MiB and the budget is "
            f"{budget / 2**20:.1f} MiB. Use a smaller model or dtype, or raise gpu_memory_utilization"
        )
    longest = fits * block_size
    if max_model_len is None:
        max_model_len = min(model.max_position, longest + 1)  # the last token is never computed
    elif max_model_len > longest + 1 and num_blocks is None:
        raise NotEnoughMemory(
            f"max_model_len {max_model_len} needs {-(-max_model_len // block_size)} KV blocks, but memory holds {fits}: "
            f"max_model_len={longest} would work, or raise gpu_memory_utilization or use a smaller dtype or kv_cache_dtype"
        )
    # more than every row at full length is of no use but to the prefix cache
    if num_blocks is None:
        fits = min(fits, 2 * max_num_seqs * -(-max_model_len // block_size))
    return CacheConfig(block_size, fits), max_model_len


def check_disk(path: object, gib: float) -> None:
    check_real("kv_disk_gib", gib, 0, 2**30, open_low=True)
    if path is None and gib != DISK_GIB:
        raise InvalidRequest(
            "kv_disk_gib bounds nothing here: say where, kv_disk_path (--kv-disk)", "kv_disk_gib"
        )


def size_tiers(
    swap_space: float | None, disk_path: object, disk_gib: float, block_bytes: int, free: int
) -> tuple[int, int]:
    """(blocks in host memory, bytes on disk), of which `free` bytes of memory must hold the former. What is read from disk
    passes through host memory, so that a disk alone takes some of that too."""
    gib = swap_space if swap_space is not None else DISK_PASSAGE if disk_path is not None else 0.0
    host = int(gib * 2**30)
    disk = int(disk_gib * 2**30) if disk_path is not None else 0
    if host > free:
        raise NotEnoughMemory(
            f"swap_space ({gib:g} GiB, --kv-host-gib) is more than the {max(free, 0) / 2**30:.1f} GiB of memory that are left: "
            "use at most that"
        )
    if 0 < host < block_bytes or (disk and not host):
        raise InvalidRequest(
            f"swap_space ({gib:g} GiB, --kv-host-gib) holds no KV block of {block_bytes / 2**20:.1f} MiB: use more"
            + (", which what comes from disk passes through" if disk else ", or 0 for none"),
            "swap_space",
        )
    if disk and disk < 2 * block_bytes:
        raise InvalidRequest(
            f"kv_disk_gib {disk_gib:g} holds no two KV blocks of {block_bytes / 2**20:.1f} MiB",
            "kv_disk_gib",
        )
    return host // block_bytes, disk
