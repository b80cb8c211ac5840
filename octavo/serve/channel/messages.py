"""What the front and the engine say to each other: msgspec structs as msgpack. Data only, no
sockets."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.engine_options import EngineOptions
from octavo.params import SamplingParams
from octavo.types import Output

# ---- to the engine -------------------------------------------------------------------------------


class Start(msgspec.Struct, tag=True, array_like=True):
    """The first message: what to load."""

    model: str | None
    options: EngineOptions
    check_interval: float = 0.0  # seconds between two checks of the scheduler's invariants; 0: none


class Add(msgspec.Struct, tag=True, array_like=True):
    id: str
    prompt: list[int]
    params: SamplingParams
    arrival: float  # time.monotonic(), the same clock in every process of a machine
    salt: str
    priority: int = 0
    deadline: float | None = None  # on the same clock
    key: str = ""
    submitted: float = 0.0  # when it left the front, on the same clock
    # not streamed: send the first token, then the rest at the end
    send_at_end: bool = False


class Abort(msgspec.Struct, tag=True, array_like=True):
    ids: list[str]


class Stop(msgspec.Struct, tag=True, array_like=True):
    """The text of one sequence is over: it met a stop string, or the one call of a tool that was
    wanted."""

    id: str
    index: int


class ViewRequest(msgspec.Struct, tag=True, array_like=True):
    """A live page is open: the engine answers with a Heartbeat and a View, before its next step."""


class Shutdown(msgspec.Struct, tag=True, array_like=True):
    pass


ToEngine = Start | Add | Abort | Stop | ViewRequest | Shutdown

# ---- to the front --------------------------------------------------------------------------------


class Phase(msgspec.Struct, tag=True, array_like=True):
    """How far the start is: importing, loading, allocating, warming."""

    name: str
    fraction: float | None = None


class Loaded(msgspec.Struct, tag=True, array_like=True):
    """What the front needs to know of the model."""

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
    # tokens that a sequence keeps, where its KV is bounded: replies may then go on beyond the
    # context
    kv_budget: int = 0
    # sampling parameters of requests that leave them out (generation_config.json)
    sampling: dict[str, int | float] = {}

    @property
    def longest(self) -> int:
        """Tokens, prompt and reply, that one sequence can have: the context's, or what the pool
        holds and one more."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)


class Ready(msgspec.Struct, tag=True, array_like=True):
    pass


class StepOutputs(msgspec.Struct, tag=True, array_like=True):
    """What a step brought, and the requests that have begun."""

    outputs: list[Output]
    begun: list[tuple[str, float]]  # and when, by time.monotonic(), which all processes share
    steps: list[int] = []  # tokens computed in each, since the last message
    unsent_tokens: int = 0  # tokens that were generated but never sent: their request was aborted
    # Seconds that the longest step in flight or about to start may take, if it is long; else 0.
    step_seconds: float = 0.0
    full: bool = False  # waiting requests lack slots, blocks or a batch


class Refused(msgspec.Struct, tag=True, array_like=True):
    """A request that can never run."""

    id: str
    message: str
    param: str | None = None
    code: str | None = None


class Accepted(msgspec.Struct, tag=True, array_like=True):
    """Its structured output is compiled, and the request queued: nothing in it will be refused any
    more."""

    id: str


class Heartbeat(msgspec.Struct, tag=True, array_like=True):
    """The engine process is alive, and this is its state. Counters count from its start."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    copies: int = 0
    prefill_tokens: int = 0  # planned so far, by kind
    decode_tokens: int = 0
    seconds: dict[str, float] = {}  # of plan, launch, wait and commit
    recomputed_tokens: int = 0
    # Counters and state of the tiers below the device; empty: there are none.
    tiers: dict[str, float] = {}
    tier_misses: dict[str, int] = {}  # by reason
    guides_compiled: int = 0
    guides_cached: int = 0  # requested when they were compiled already, or being compiled
    guide_seconds: float = 0.0  # of compiling
    checks: int = 0  # of the scheduler's invariants
    check_failures: int = 0
    shrunk: int = 0  # steps that were too large for the device's memory


class Shown(msgspec.Struct, array_like=True):
    """A sequence as the live page shows it: ids, lengths and states, no tokens."""

    id: int  # Sequence.id; 0: the scheduler does not have it yet
    request: str
    index: int
    state: str  # waiting, prefill or decode
    prompt: int  # tokens
    generated: int  # tokens
    limit: int  # of prompt and generated tokens
    computed: int  # positions
    cached: int  # positions found in the prefix cache when it was admitted
    blocks: int
    preemptions: int
    reason: str  # why it waits


class Step(msgspec.Struct, array_like=True):
    """A planned step. Lists hold the first few entries; `more` counts those that were left out."""

    step: int
    decode: int  # decoding sequences
    prefill: int  # tokens
    chunks: list[tuple[int, int, int]]  # Sequence.id, first position, tokens
    preempted: list[tuple[int, str, str]]  # Sequence.id, request, reason
    # Blocks: stores, loads, copies, shifts, saves, fetches. Zeros are left out.
    moves: dict[str, int]
    urgent: bool = False
    more: int = 0
    seconds: float = 0.0  # 0: it has not landed


class ShownEvent(msgspec.Struct, array_like=True):
    """An event of the engine (octavo/events.py) as the live page shows it."""

    number: int
    step: int
    kind: str  # arrived, forked, admitted, waiting, preempted, done, failed or blocks
    request: str = ""
    index: int = 0
    tokens: int = 0
    cached: int = 0  # tokens found in the prefix cache
    reason: str = ""
    moves: dict[str, int] = {}  # as in Step


class View(msgspec.Struct, tag=True, array_like=True):
    """What the live page shows of the engine between two steps. Its size is bounded, whatever the
    engine's is."""

    sequences: list[Shown]  # the first few: decoding, prefilling, waiting
    decoding: int
    prefilling: int
    waiting: int
    # A picture of the block pool. The lists have an entry for each cell.
    blocks: int  # blocks in each cell but the last
    used: list[int]  # blocks that a sequence holds
    shared: list[int]  # blocks that several sequences hold
    cached: list[int]  # blocks that no sequence holds and whose content is known
    owner: list[int]  # Sequence.id of a sequence that holds a block of the cell; 0: none
    steps: list[Step]  # since the last view
    steps_missed: int  # steps before those that were left out
    ended: list[tuple[str, int, str]]  # since the last view: request, index, reason
    ended_missed: int
    events: list[ShownEvent]  # since the last view, in the order in which they happened
    events_missed: int
    seconds: float = 0.0  # time to build this view and the heartbeat before it


class EngineFailed(msgspec.Struct, tag=True, array_like=True):
    """The model cannot be served, and why; the engine ends."""

    message: str


ToFront = (
    Phase | Loaded | Ready | StepOutputs | Refused | Accepted | Heartbeat | View | EngineFailed
)

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_front = msgspec.msgpack.Decoder(ToFront).decode
