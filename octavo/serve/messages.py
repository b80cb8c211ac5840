"""What the front and the engine say to each other: msgspec structs as msgpack. Data only, no sockets."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.engine_options import EngineOptions
from octavo.params import SamplingParams
from octavo.types import Output

# ---- to the engine ----------------------------------------------------------------------------------


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
    # nobody follows it: after its first token the front wants to hear of it when it has ended
    whole: bool = False


class Abort(msgspec.Struct, tag=True, array_like=True):
    ids: list[str]


class Stop(msgspec.Struct, tag=True, array_like=True):
    """The text of one sequence is over: it met a stop string, or the one call of a tool that was wanted."""

    id: str
    index: int


class Look(msgspec.Struct, tag=True, array_like=True):
    """Somebody watches: the engine answers with a Beat and a View, before its next step."""


class Shutdown(msgspec.Struct, tag=True, array_like=True):
    pass


ToEngine = Start | Add | Abort | Stop | Look | Shutdown

# ---- to the front -----------------------------------------------------------------------------------


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
        """Tokens, prompt and reply, that one sequence can have: the context's, or what the pool holds and one more."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)


class Ready(msgspec.Struct, tag=True, array_like=True):
    pass


class News(msgspec.Struct, tag=True, array_like=True):
    """What a step brought, and the requests that have begun."""

    outputs: list[Output]
    begun: list[tuple[str, float]]  # and when, by time.monotonic(), which all processes share
    steps: list[int] = []  # tokens computed in each, since the last news
    untold: int = 0  # tokens of requests that ended before anybody heard of them
    patience: float = 0.0  # seconds that the step that begins now may take, where that is long
    full: bool = False  # who waits does so for rows, blocks or a batch, not just for the next step


class Refused(msgspec.Struct, tag=True, array_like=True):
    """A request that can never run."""

    id: str
    message: str
    param: str | None = None
    code: str | None = None


class Taken(msgspec.Struct, tag=True, array_like=True):
    """Its structured output is compiled, and the request queued: nothing in it will be refused any more."""

    id: str


class Beat(msgspec.Struct, tag=True, array_like=True):
    """The engine's pulse: where it stands. Counters count from its start."""

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
    # what happened in the tiers below the device, and where they stand; empty: there are none
    tiers: dict[str, float] = {}
    tier_misses: dict[str, int] = {}  # by reason
    guides_compiled: int = 0
    guides_cached: int = 0  # asked for and there already, or on the way
    guide_seconds: float = 0.0  # of compiling
    checks: int = 0  # of the scheduler's invariants
    check_failures: int = 0
    shrunk: int = 0  # steps that were too large for the device's memory


class Shown(msgspec.Struct, array_like=True):
    """A sequence as the live page shows it: ids, lengths and states, nothing of what is said."""

    id: int  # Sequence.id; 0: the scheduler does not have it yet
    request: str
    index: int
    state: str  # waiting, prefill or decode
    prompt: int  # tokens
    said: int  # tokens generated
    limit: int  # of both
    computed: int  # positions
    cached: int  # of those, found in the prefix cache when it began
    blocks: int
    preemptions: int
    why: str  # it waits


class Step(msgspec.Struct, array_like=True):
    """What a plan decided. Lists hold the first few; `more` says how many were left out."""

    step: int
    decode: int  # rows
    prefill: int  # tokens
    chunks: list[tuple[int, int, int]]  # Sequence.id, first position, tokens
    # Sequence.id, request, tokens that are known, of those cached
    begun: list[tuple[int, str, int, int]]
    preempted: list[tuple[int, str, str]]  # Sequence.id, request, why
    # blocks: stores, loads, copies, shifts, saves, fetches; only those that are not 0
    moves: dict[str, int]
    urgent: bool = False
    more: int = 0
    seconds: float = 0.0  # 0: it has not landed


class View(msgspec.Struct, tag=True, array_like=True):
    """What the live page shows of the engine between two steps. Its size is bounded, whatever the engine's is."""

    sequences: list[Shown]  # the first few: decoding, prefilling, waiting
    decoding: int
    prefilling: int
    waiting: int
    blocks: int  # in each cell below, but for the last
    used: list[int]  # of each cell, the blocks that some sequence holds,
    shared: list[int]  # of those, by several,
    cached: list[int]  # and blocks that nobody holds whose content is known
    owner: list[int]  # of each cell, Sequence.id of one that holds a block of it; 0: nobody
    steps: list[Step]  # since the last view
    steps_missed: int  # before those, too many to tell
    ended: list[tuple[str, int, str]]  # since the last view: request, index, reason
    ended_missed: int
    seconds: float = 0.0  # that it took to make this, and the Beat before it


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The model cannot be served, and why; the engine ends."""

    message: str


ToFront = Phase | Loaded | Ready | News | Refused | Taken | Beat | View | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_front = msgspec.msgpack.Decoder(ToFront).decode
