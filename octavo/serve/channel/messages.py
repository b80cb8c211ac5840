"""The messages between the front process and the engine process: msgspec structs, sent as msgpack.

All times are values of time.monotonic(), which is the same clock in every process of a machine.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.config import PoolerConfig
from octavo.engine_options import EngineOptions
from octavo.params import SamplingParams
from octavo.serve.kv_events_config import KVEventsConfig
from octavo.types import Output

# ---- to the engine -------------------------------------------------------------------------------


class Start(msgspec.Struct, tag=True, array_like=True):
    """The first message to the engine: the model to load, and the options."""

    model: str | None
    options: EngineOptions
    # Seconds between two checks of the scheduler's invariants. 0 turns the checks off.
    check_interval: float = 0.0
    kv_events: KVEventsConfig | None = None
    log_level: str = "warning"


class Add(msgspec.Struct, tag=True, array_like=True):
    id: str
    prompt: list[int]
    params: SamplingParams
    arrival: float
    cache_salt: str
    priority: int = 0
    deadline: float | None = None
    tenant: str = ""
    submitted: float = 0.0  # The time at which the front process sent the request.
    # If the reply is not streamed, the engine sends the first token, and the others at the end.
    send_at_end: bool = False
    traced: bool = False  # The engine sends RequestSpans for the request.
    pooling: str | None = None  # Request.pooling


class Abort(msgspec.Struct, tag=True, array_like=True):
    ids: list[str]


class Stop(msgspec.Struct, tag=True, array_like=True):
    """End a sequence, because its text contains a stop string or a complete tool call."""

    id: str
    index: int


class ClearCache(msgspec.Struct, tag=True, array_like=True):
    """Empty the prefix cache on the device and in host memory. KV on disk stays."""


class WatchEvents(msgspec.Struct, tag=True, array_like=True):
    """Start or stop sending EventLines, because live pages were opened or the last was closed."""

    on: bool


class ReportRefusal(msgspec.Struct, tag=True, array_like=True):
    """The front process has refused a request. The event stream shows it."""

    id: str
    reason: str


class ChangeSettings(msgspec.Struct, tag=True, array_like=True):
    """Change settings of the scheduler (octavo/core/live_settings.py). SettingsReply answers it."""

    changes: dict[str, Any]


class Shutdown(msgspec.Struct, tag=True, array_like=True):
    pass


ToEngine = (
    Start
    | Add
    | Abort
    | Stop
    | ClearCache
    | WatchEvents
    | ReportRefusal
    | ChangeSettings
    | Shutdown
)

# ---- to the front --------------------------------------------------------------------------------


class Phase(msgspec.Struct, tag=True, array_like=True):
    """The phase of the start: importing, loading, compiling, allocating or warming."""

    name: str
    fraction: float | None = None


class Loaded(msgspec.Struct, tag=True, array_like=True):
    """The properties of the model that the front process needs."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    block_size: int
    num_blocks: int
    prefix_caching: bool
    dtype: str
    device: str
    architecture: str
    memory: dict[str, int]
    tokenizer_directory: str | None
    tokenizer_gguf: dict[str, Any] | None
    kv_dtype: str = ""
    # With bounded KV, the number of positions that a sequence keeps. A reply may then be longer
    # than the context. 0 means that KV is not bounded.
    kv_budget: int = 0
    # Defaults of sampling parameters that a request does not set (generation_config.json).
    sampling: dict[str, int | float] = {}
    eos_ids: list[int] = []  # The tokens that end a text, unless a request sets ignore_eos.
    speculative: str = ""  # The method of speculative decoding and its settings, or "".
    weights: str = ""  # The format of the weights in words, such as "4-bit weights (GGUF)".
    hidden_size: int = 0
    pooler: PoolerConfig = PoolerConfig()

    @property
    def longest_sequence(self) -> int:
        """The largest number of tokens of a prompt and its reply together.

        This is the size of the context, or one token more than the KV pool holds if that is less.
        """
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)


class Ready(msgspec.Struct, tag=True, array_like=True):
    pass


class StepOutputs(msgspec.Struct, tag=True, array_like=True):
    """The outputs of a step, and the requests that were admitted."""

    outputs: list[Output]
    admitted: list[tuple[str, float]]  # The ids of the admitted requests, and the times.
    steps: list[int] = []  # The number of tokens of each step since the last message.
    discarded_tokens: int = 0  # Tokens of aborted requests that were generated but never sent.
    # Seconds that the longest step in flight or about to start may take, or 0 if it is not long.
    step_seconds: float = 0.0
    saturated: bool = False  # Requests wait for batch slots, blocks or a batch.


class Refused(msgspec.Struct, tag=True, array_like=True):
    """The engine has refused a request, because it can never run."""

    id: str
    message: str
    param: str | None = None
    code: str | None = None


class Accepted(msgspec.Struct, tag=True, array_like=True):
    """The structured output of a request is compiled, and the request is in the queue.

    The engine does not refuse the request after this message.
    """

    id: str


class RequestSpans(msgspec.Struct, tag=True, array_like=True):
    """The spans of a sequence of a traced request. They are sent before its last output."""

    id: str
    index: int
    # (name, start, end, tokens, steps, when each step landed), as in octavo/core/spans.py.
    spans: list[tuple[str, float, float, int, list[int], list[float]]]


class Heartbeat(msgspec.Struct, tag=True, array_like=True):
    """The state of the engine process, sent regularly. Counters count from its start."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0  # Empty blocks. Available blocks are those that are cached or free.
    queried_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    copies: int = 0
    prefill_tokens: int = 0  # Both count planned tokens.
    decode_tokens: int = 0
    seconds: dict[str, float] = {}  # The time spent in plan, launch, wait and commit.
    recomputed_tokens: int = 0
    # Counters and state of the tiers below the device. It is empty if there are none.
    tiers: dict[str, float] = {}
    tier_misses: dict[str, int] = {}  # The misses by reason.
    guides_compiled: int = 0
    guides_cached: int = 0  # Requests whose guide was compiled already, or being compiled.
    guide_seconds: float = 0.0  # The time spent on compiling guides.
    checks: int = 0  # Checks of the scheduler's invariants.
    check_failures: int = 0
    oom_steps: int = 0  # Steps that were too large for the memory of the device.
    # Speculative decoding. Without it, these are 0 and an empty list.
    verifications: int = 0  # Verifications of at least one draft of one sequence.
    drafted_tokens: int = 0  # Drafts that were verified.
    accepted_tokens: int = 0  # Drafts that became tokens.
    accepted_at: list[int] = []  # The same by their place among the drafts of a step.
    prefill_steps: int = 0  # Steps that computed at least one prompt token.
    full_steps: int = 0  # Prefill steps that used all of the token budget.
    prefill_seconds: float = 0.0  # The time of prefill steps.
    decode_seconds: float = 0.0  # The time of the other steps.
    rss_bytes: int = 0  # The memory of the engine process.
    # The memory of the engine process on its GPU: allocated, reserved and peak. Empty on a CPU.
    gpu_bytes: dict[str, int] = {}


class EventLines(msgspec.Struct, tag=True, array_like=True):
    """Lines of the event stream (octavo/core/event_stream.py)."""

    lines: bytes
    is_start: bool  # The first line is a snapshot.


class SettingsReply(msgspec.Struct, tag=True, array_like=True):
    """The answer to ChangeSettings: the error, or an empty text if the changes are applied."""

    error: str


class EngineFailed(msgspec.Struct, tag=True, array_like=True):
    """The engine cannot serve the model for this reason, and ends."""

    message: str


ToFront = (
    Phase
    | Loaded
    | Ready
    | StepOutputs
    | Refused
    | Accepted
    | RequestSpans
    | Heartbeat
    | EventLines
    | SettingsReply
    | EngineFailed
)

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_front = msgspec.msgpack.Decoder(ToFront).decode
