"""The configuration of a model, its KV cache and its schedule, as frozen values. No torch.

The file of an architecture (octavo/model/) turns config.json into a ModelConfig; nothing else reads
Hugging Face's field names. octavo/assemble.py turns EngineOptions into the other two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

EMBEDDED = "smollm2"  # the name of the embedded model (octavo/model/embedded.py)
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# A KV cache holds numbers of one of these types, or codes of one byte with a float32 scale for each
# vector of a head.
KV_CODES = ("int8", "fp8")
KV_SCALE_BYTES = 4


@dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding of one kind of layer.

    `scaling` is the dictionary of Hugging Face, which includes `rope_type`."""

    theta: float = 10000.0
    scaling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Share:
    """The part of one dimension of a weight that a rank of tensor parallelism holds."""

    ranges: tuple[range, ...]
    total: int  # the size of the whole dimension

    @classmethod
    def whole(cls, total: int) -> Share:
        return cls((range(total),), total)

    @classmethod
    def joined(cls, *shares: Share) -> Share:
        """Return the share of a dimension that consists of these dimensions, one after another."""
        ranges: list[range] = []
        total = 0
        for share in shares:
            ranges += [range(part.start + total, part.stop + total) for part in share.ranges]
            total += share.total
        return cls(tuple(ranges), total)

    @property
    def count(self) -> int:
        return sum(map(len, self.ranges))

    @property
    def is_part(self) -> bool:
        return self.count < self.total


@dataclass(frozen=True)
class Shares:
    """The dimensions that tensor parallelism divides (octavo/model/tensor_parallel.py)."""

    query: Share  # query heads times head dimension
    key: Share  # KV heads times head dimension
    intermediate: Share
    vocabulary: Share


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model, or of the part of it that one rank of tensor parallelism holds."""

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
    dtype: str = "float32"  # the checkpoint's data type; the option "auto" means this on a GPU
    activation: str = "silu"  # or "gelu_tanh"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # Gemma 3: norms after attention and MLP, before the residual add
    norm_offset: float = 0.0  # Gemma 3: the checkpoint holds weight - 1
    embed_scale: float = 1.0
    attention_scale: float | None = None  # None: head_dim ** -0.5
    # for each layer, the number of latest positions that it sees; 0 or an empty tuple: all
    windows: tuple[int, ...] = ()
    rope: RopeConfig = RopeConfig()
    local_rope: RopeConfig | None = None  # for layers with a window, if they differ
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    # Set if this is the config of one rank; the numbers of heads and the intermediate size are
    # then those of the rank.
    part: Shares | None = None

    @property
    def shares(self) -> Shares:
        """The rows and columns of the weights that belong to this config: all, without a part."""
        if self.part is not None:
            return self.part
        return Shares(
            query=Share.whole(self.num_heads * self.head_dim),
            key=Share.whole(self.num_kv_heads * self.head_dim),
            intermediate=Share.whole(self.intermediate_size),
            vocabulary=Share.whole(self.vocab_size),
        )

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
    block_size: int = 16  # positions per block
    num_blocks: int = 0  # usable device blocks; one more is allocated for padding
    prefix_caching: bool = True
    host_blocks: int = 0  # blocks of the host tier; 0: there is no host tier
    has_disk: bool = False  # the host tier is backed by a disk tier
    block_bytes: int = 0
    # "none", "sinks" or "heavy": which block leaves a sequence that has reached its KV budget
    # (octavo/core/bounded_kv.py)
    kv_eviction: str = "none"
    kv_budget: int = 0  # positions that one sequence may keep, unless kv_eviction is "none"
    kv_sinks: int = 1  # leading blocks that never leave
    # False: nothing is kept between steps, and each token is computed from its whole sequence
    keeps_kv: bool = True
    # True: a sequence reserves blocks for all tokens it may grow to when it is admitted
    contiguous: bool = False


@dataclass(frozen=True)
class SpeculativeConfig:
    """Settings of speculative decoding (octavo/core/speculation.py)."""

    method: str  # octavo/core/draft_methods.py lists them
    num_tokens: int = 4  # drafts that one step verifies for a sequence, at most
    adaptive: bool = True  # verify only as many as measurements show to pay
    ngram_min: int = 2  # fewest tokens that must occur earlier, for "ngram" and "suffix"
    ngram_max: int = 5  # most tokens that are looked for
    exit_layer: int = 0  # layers of the model that draft, for "early_exit"
    # Directory or name of the draft head or draft model, for "head" and "draft_model". None: the
    # draft head of the embedded model.
    model: str | None = None
    # For a method on the device: text that occurs earlier in the sequence is drafted instead.
    lookup: bool = False

    @property
    def is_auto(self) -> bool:
        """Whether the method depends on the model and the device (settle_speculation())."""
        return self.method == "auto"

    @property
    def drafts_on_device(self) -> bool:
        """Whether the runner drafts. Otherwise the scheduler does (octavo/core/drafters.py)."""
        return self.method not in ("ngram", "suffix")


AUTO = SpeculativeConfig("auto")


@dataclass(frozen=True)
class ScheduleConfig:
    max_num_seqs: int = 256  # batch slots
    max_num_batched_tokens: int = 2048  # token budget of one step
    max_model_len: int = 2048
    depth: int = 1  # steps in flight: 1..3
    policy: str = "fcfs"  # order of the queue (octavo/core/policy.py)
    batching: str = "continuous"  # when requests may start (octavo/core/batching.py)
    max_batch: int = 8  # requests per batch, for batching "window" and "static"
    batch_window: float = 0.02  # seconds a batch collects requests, for batching "window"
    latency_target: float = 0.05  # seconds between tokens, for batching "adaptive"
    # Fraction of the budget left after decoding that short prompts may take before longer prompts
    # that started earlier.
    short_prompt_share: float = 0.25
    # False: a prompt is computed in one step if the token budget allows it
    chunked_prefill: bool = True
    # Offline prompts fill steps that decode up to this many tokens; 0: off. Up to this size a
    # prompt token costs less in such a step than in a step of its own (docs/scheduling.md).
    piggyback_tokens: int = 0
    speculative: SpeculativeConfig | None = None  # None: every token is decoded in its own step


@dataclass(frozen=True)
class VllmConfig:
    """The configuration that a logits processor receives, under vLLM's names."""

    model_config: ModelConfig
    scheduler_config: ScheduleConfig
    cache_config: CacheConfig


@dataclass(frozen=True)
class ProfilerConfig:
    """The file that LLM.start_profile writes, and the steps that it covers."""

    torch_profiler_dir: str = ""
    delay_iterations: int = 0  # steps before the trace begins, if max_iterations is not 0
    max_iterations: int = 0  # steps that the trace has; 0: all until LLM.stop_profile
    profiler: str = "torch"  # vLLM's name of the only kind


# The poolings of the hidden states of a prompt: the state of the last token, the mean of all, or
# all states.
POOLINGS = ("last", "mean", "all")


@dataclass(frozen=True)
class PoolerConfig:
    """The pooling of hidden states to an embedding. The names are vLLM's."""

    pooling_type: str = "LAST"  # LAST or MEAN
    use_activation: bool = True  # Embeddings have length 1, unless a request says otherwise.

    @property
    def pooling(self) -> str:
        """The kind of pooling, as one of POOLINGS."""
        return self.pooling_type.lower()
