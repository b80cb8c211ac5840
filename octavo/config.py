"""What a run is made of, as frozen values: the model's shape, the cache, the schedule. No torch.

A model's config.json is turned into a ModelConfig by the architecture's own file (octavo/model/); nothing else reads
Hugging Face's field names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# What a KV cache may hold: those, or codes of one byte with a float32 scale for each vector of a head.
KV_CODES = ("int8", "fp8")
KV_SCALE_BYTES = 4


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer. `scaling` is Hugging Face's dictionary, `rope_type` in it."""

    theta: float = 10000.0
    scaling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    norm_eps: float = 1e-6
    tied: bool = False  # the LM head is the embedding
    dtype: str = "float32"  # what the checkpoint says; "auto" resolves to it
    activation: str = "silu"  # or "gelu_tanh"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # Gemma 3: norms after attention and MLP, before the residual add
    norm_offset: float = 0.0  # Gemma 3: the checkpoint holds weight - 1
    embed_scale: float = 1.0
    attention_scale: float | None = None  # None: head_dim ** -0.5
    # per layer: how many latest positions it sees; 0: all. Empty: all layers see all
    windows: tuple[int, ...] = ()
    rope: RopeConfig = RopeConfig()
    local_rope: RopeConfig | None = None  # for layers with a window, where they have their own
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def kv_bytes_per_token(self, dtype: str) -> int:
        vector = (
            self.head_dim + KV_SCALE_BYTES
            if dtype in KV_CODES
            else self.head_dim * DTYPE_BYTES[dtype]
        )
        return 2 * self.num_layers * self.num_kv_heads * vector


@dataclass(frozen=True)
class CacheConfig:
    block_size: int = 16
    num_blocks: int = 0  # usable blocks (one more is kept for padding)
    prefix_caching: bool = True
    host_slots: int = 0  # blocks that fit in the host tier; 0: there is none
    disk: bool = False  # and whether there is a disk behind it
    block_bytes: int = 0
    # what leaves the cache of a sequence that has grown to its budget: octavo/core/bounded_kv.py
    eviction: str = "none"
    budget: int = 0  # positions of one sequence, where something leaves
    sinks: int = 1  # its first blocks, which stay


@dataclass(frozen=True)
class ScheduleConfig:
    max_num_seqs: int = 256  # rows on the device
    max_num_batched_tokens: int = 2048  # token budget of one step
    max_model_len: int = 2048
    depth: int = 1  # steps in flight: 1..3
    policy: str = "fcfs"  # who comes first: octavo/core/policy.py
    batching: str = "continuous"  # when requests may begin: octavo/core/batching.py
    max_batch: int = 8  # requests of a batch, where batches form
    window: float = 0.02  # seconds that a batch forms, in mode "window"
    target: float = 0.05  # seconds from token to token, in mode "adaptive"
    # of a step: short prompts take it before longer ones that are being computed
    short_share: float = 0.25
    # tokens of a step up to which prompts cost less beside rows that decode than in steps of
    # their own; 0: none
    ride: int = 0
