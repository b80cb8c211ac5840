"""The engine's data: plain classes without torch. Their methods only compute from the fields.

Guide                              tracks which tokens structured output allows next
Request                            a tokenised request with its parameters (octavo/params.py)
Sequence                           one stream of tokens
Item, SlotFill, Save, Fetch, Plan  one step's work: passed from the scheduler to the runner
DiskEvent, StepResult              one step's results: passed from the runner to the scheduler
Output                             new tokens of one sequence, and how it ended
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from octavo.params import RepetitionDetectionParams, SamplingParams

# ---- requests ------------------------------------------------------------------------------------


class Guide(Protocol):
    """Follows one text and knows which tokens may continue it.

    octavo/text/guide.py compiles guides from StructuredOutputs."""

    @property
    def mask(self) -> bytes:
        """The allowed next tokens, end tokens included: one bit per token, lowest bit first, in
        whole 32-bit words. At least one bit is set."""

    def accept(self, token: int) -> None:
        """Advance by one token and update the mask. Raises GuideError, after which the guide is
        unusable."""

    def copy(self) -> Guide:
        """Return an independent guide at the same position of the text."""


@dataclass(slots=True)
class Request:
    """A client's request after tokenisation. Times are on time.monotonic()'s clock."""

    id: str
    prompt: list[int]
    params: SamplingParams
    arrival: float = 0.0
    cache_salt: str = ""  # requests with different salts never share blocks
    priority: int = 0  # the "priority" policy serves lower numbers first
    deadline: float | None = None  # the "deadline" policy serves earlier deadlines first
    tenant: str = ""  # the "fair" policy and the cache quota divide resources between tenants
    # The compiled params.structured_outputs, at the start of the text. Each sequence gets a copy.
    guide: Guide | None = None
    submitted: float = 0.0  # when the API server sent it to the engine process; 0: one process
    # Part of an offline batch: only the time until all of its replies are finished matters.
    offline: bool = False
    pooling: str | None = None  # one of POOLINGS: return hidden states of the prompt, not text


# ---- sequences -----------------------------------------------------------------------------------


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class DiskWait(Enum):
    """The state of a sequence that may wait for blocks from disk before its admission."""

    NOT_STARTED = "not started"
    WAITING = "waiting"
    DONE = "done"  # no block is fetched for the sequence before its next preemption


def child_seed(seed: int, index: int) -> int:
    """Return the seed of a request's index-th completion.

    The first completion uses the request's own seed; the others get unrelated ones."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(b"%d/%d" % (seed, index), digest_size=8).digest()
    return int.from_bytes(digest, "little")


# The sort key of sequences; the lowest comes first. Its parts: the policy rank, the number of the
# offline batch, the place in it (Queues.enqueue), the number in the order of arrival, and the index
# among the request's completions.
Rank = tuple[float, int, int, int, int]


@dataclass(slots=True)
class Beam:
    """Beam-search state of one sequence."""

    score: float = 0.0  # sum of the logprobs of `output`
    output: list[TokenLogprobs] = field(default_factory=list)
    # The likeliest next tokens, which the beam reports to its search; None: not computed yet.
    report: TokenLogprobs | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens. A position is an index into `tokens` and into the KV cache."""

    id: int
    request: Request
    index: int  # which of the request's completions or beams this is
    # Prompt and committed output. An array, because it is copied, hashed and uploaded as bytes.
    tokens: array[int]
    prompt_len: int  # length of the request's prompt; bounded KV may have dropped part of it
    # The sequence ends when len(tokens) reaches this limit. When bounded KV drops a block, the
    # block's tokens leave `tokens`, and the limit is lowered by their number.
    token_limit: int
    seed: int
    stop_ids: frozenset[int]  # committing one of these tokens ends the sequence
    status: Status = Status.WAITING
    rank: Rank = (0.0, 0, 0, 0, 0)
    guide: Guide | None = None  # has accepted exactly the committed output
    repetition: RepetitionDetectionParams | None = None  # ends a text that repeats itself
    beam: Beam | None = None
    # Children to fork once all but one of the prompt tokens are computed (docs/sequences.md).
    pending_forks: int = 0
    inherited_tokens: int = 0  # leading tokens computed by the sequence it was forked from

    # Device state of a running sequence.
    slot: int = -1  # batch slot
    block_table: list[int] = field(default_factory=list)  # logical block -> physical block
    # Positions whose KV is committed. Blocks found at admission count from then on, although the
    # first step may have to load them.
    computed: int = 0
    # `computed` after every step in flight, if all drafts are accepted: vLLM's num_computed_tokens.
    planned: int = 0
    steps_in_flight: int = 0  # planned steps with this sequence that are not committed yet
    epoch: int = 0  # raised when the sequence is preempted or ends: older results are dropped

    # Speculative decoding (octavo/core/speculation.py).
    drafts_in_flight: int = 0  # how many planned positions may turn out to be wrong
    draft_acceptance: float = 0.0  # running mean: the fraction of its drafts that were accepted
    lookup_acceptance: float = 0.0  # the same for drafts of the host, if the device drafts too
    # False: a step computed its tokens without a draft extend, so the device does not draft for it.
    # Cached and loaded KV is not checked: if the drafter lacks it, its drafts are worse.
    drafter_has_kv: bool = True
    accepted_drafts: int = 0  # verified drafts that became tokens
    rejected_drafts: int = 0  # verified drafts that did not

    # Prefix cache.
    block_hashes: list[bytes] = field(default_factory=list)  # hash chain of its full blocks
    published_blocks: int = 0  # leading blocks already published to the prefix cache
    cached_tokens: int = 0  # prompt positions found in the prefix cache at its first admission
    disk_wait: DiskWait = DiskWait.NOT_STARTED
    # The sequence is looked up again when TierIndex.transfers_ended differs from this.
    transfers_ended_at_lookup: int = 0

    # Bounded KV (octavo/core/bounded_kv.py). Dropped tokens have left `tokens` too.
    dropped_tokens: int = 0
    dropped_prompt_tokens: int = 0
    attention_mass: list[float] = field(default_factory=list)  # per logical block

    preemptions: int = 0
    preempt_reason: str = ""  # why it was preempted last, for people
    preempted_positions: int = 0  # positions it had when it was preempted last
    retried_after_oom: bool = False  # it exceeded device memory alone and runs in smaller steps

    # By position; filled in while the prompt is computed.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    pooled: array[float] = field(default_factory=lambda: array("f"))  # hidden states so far
    queued_at: float = 0.0  # on the scheduler's clock
    first_token_at: float | None = None  # on the same clock; None: no token yet, or a beam

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_generated(self) -> int:
        """Generated tokens, including those that bounded KV has dropped."""
        return len(self.tokens) + self.dropped_tokens - self.prompt_len

    @property
    def kept_prompt_tokens(self) -> int:
        """Leading entries of `tokens` that belong to the prompt."""
        return self.prompt_len - self.dropped_prompt_tokens

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """True while requested prompt logprobs are missing."""
        logprobs = self.prompt_logprobs
        return logprobs is not None and len(logprobs) > 1 and logprobs[-1] is None

    @property
    def needs_all_positions(self) -> bool:
        """True if the request wants a result of each position, so none may come from the cache."""
        return self.lacks_prompt_logprobs or self.request.pooling in ("mean", "all")


# ---- one step ------------------------------------------------------------------------------------


class Item(NamedTuple):
    """One sequence's part of a step: compute `num_tokens` positions of a batch slot, and sample
    after the last one if `sample` is set."""

    seq_id: int
    epoch: int
    slot: int
    # First position. None: a decode, which starts at the slot's `computed` on the device. The host
    # does not know that number while drafts are in flight.
    start: int | None
    num_tokens: int
    sample: bool
    # Upper bound of start + num_tokens: attention reads at most this much KV. It is exact if
    # Plan.drafts has this item, because the host drafts only for sequences that have no token in
    # flight.
    max_kv_len: int
    prompt_logprobs: int | None = None  # number of top logprobs for each computed position
    wants_attention_mass: bool = False  # report how its attention is spread over its blocks
    # The last `num_drafts` tokens are drafts. A token is sampled after each draft and after the
    # token before the first one. The step keeps what a decode without drafts would have sampled,
    # up to rounding.
    num_drafts: int = 0
    pooling: str | None = None  # report hidden states: the last, their sum ("mean"), or all


class SlotFill(NamedTuple):
    """Writes a whole batch slot: everything that the device must know about a sequence.

    A slot is filled when its sequence is admitted or forked, and again when the host has changed
    the sequence in a way that the device cannot follow."""

    seq_id: int
    epoch: int
    slot: int
    tokens: array[int]
    computed: int
    block_table: list[int]
    prompt_len: int  # leading tokens that belong to the prompt
    seed: int
    stop_ids: frozenset[int]
    params: SamplingParams
    num_logprobs: int | None = None  # top logprobs of each sampled token; None: no logprobs
    dropped_tokens: int = 0  # text position = cache position + dropped_tokens
    dropped_output_tokens: int = 0  # how many of the dropped tokens were generated


class Save(NamedTuple):
    """Write a host block to disk some time later, if it still holds this content then."""

    host_block: int
    hash: bytes
    tokens: array[int]


class Fetch(NamedTuple):
    """Read a content from disk into a host block. Exactly one DiskEvent answers it, whatever the
    disk does."""

    fetch_id: int
    host_block: int
    hash: bytes
    tokens: array[int]  # the record on disk must hold exactly these tokens


@dataclass(slots=True)
class Plan:
    """Everything that a runner needs for one step.

    The runner applies stores, copies, loads, shifts, slot_fills, table_updates and drafts in this
    order, and then computes the items. Saves and fetches start with the step.

    Blocks move between tiers in four ways:

        device --stores--> host --saves--> disk
        device <--loads--- host <-fetches- disk

    A plan never changes after Scheduler.plan() has returned it."""

    step: int
    # (device block, host block): runs before anything overwrites the device block
    stores: list[tuple[int, int]] = field(default_factory=list)
    # copy-on-write: (from block, to block)
    copies: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)
    # (block, number of positions by which its keys move towards the front)
    shifts: list[tuple[int, int]] = field(default_factory=list)
    slot_fills: list[SlotFill] = field(default_factory=list)
    # (batch slot, logical block, physical block)
    table_updates: list[tuple[int, int, int]] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    # item index -> the drafts that are verified; the device drafts for items that are not in it
    drafts: dict[int, array[int]] = field(default_factory=dict)
    # item index -> allowed tokens at each sampled position (Guide.mask); other items may sample any
    token_masks: dict[int, list[bytes]] = field(default_factory=dict)
    num_drafts: int = 0  # total over all items
    # The drafter on the device computes its own KV of this step's tokens, to be able to draft for
    # their sequences later. SGLang has the same name for it.
    draft_extend: bool = True
    # Disk work starts with the step and finishes whenever the disk is done.
    saves: list[Save] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    # True while disk reads are pending. The step then runs even without items, because disk events
    # come with step results.
    awaits_disk: bool = False
    urgent: bool = False  # less urgent sequences pause for the prompts in this step

    @property
    def has_work(self) -> bool:
        return bool(self.items or self.slot_fills or self.copies or self.awaits_disk)

    @property
    def touches_slots(self) -> bool:
        """True unless the plan only moves blocks between tiers, which changes no batch slot."""
        return bool(
            self.items or self.slot_fills or self.copies or self.shifts or self.table_updates
        )

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position."""

    token: int  # the token at this position
    logprob: float
    rank: int  # 1: it is the likeliest token
    top: list[tuple[int, float]]  # (token, logprob) of the likeliest tokens, best first


class DiskEvent(NamedTuple):
    """Something the disk has finished or given up."""

    kind: str  # "fetched" | "missed" | "saved" | "unsaved" | "listed"
    hash: bytes = b""
    fetch_id: int = 0  # set for "fetched" and "missed"
    reason: str = ""  # one word, set for "missed" and "unsaved"
    seconds: float = 0.0  # how long a fetch took while others were read beside it
    listed_hashes: frozenset[bytes] = frozenset()  # every record on disk, for "listed"


@dataclass(slots=True)
class StepResult:
    """The results of one step. Lists have one entry per item of the plan, in order."""

    # Sampled tokens: none for a prefill chunk that is not the last, several with accepted drafts.
    # The last one is negative if no logit was finite.
    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs]] | None = None  # like tokens; None: not requested
    # item index -> logprobs of the token AFTER each computed position
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    # item index -> fraction of its attention that each logical block received
    attention_mass: dict[int, list[float]] = field(default_factory=dict)
    pooled: dict[int, array[float]] = field(default_factory=dict)  # item index -> hidden states
    compute_seconds: float = 0.0  # device time of the items; 0: not measured
    load_seconds: float = 0.0  # device time of the loads; 0: not measured
    disk_events: list[DiskEvent] = field(default_factory=list)
    # host blocks read from disk whose content failed its checksum when it was loaded
    corrupt_host_blocks: set[int] = field(default_factory=set)


# ---- results -------------------------------------------------------------------------------------


class DraftCount(NamedTuple):
    """The numbers of verified drafts of a sequence."""

    accepted: int  # drafts that became tokens
    rejected: int  # drafts that did not


@dataclass(slots=True)
class Output:
    """New tokens of one sequence, and how it ended if it did."""

    request_id: str
    index: int
    tokens: list[int]  # new tokens since the previous output
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    # The stop token that ended it, or REPETITION_DETECTED. The engine never matches stop strings;
    # the API server does.
    stop_reason: int | str | None = None
    cached_tokens: int = 0  # prompt tokens found in the cache; in the first and last output only
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # set in the first output only
    error: str | None = None
    code: str | None = None  # stable error code, set if the request itself caused the error
    drafts: DraftCount | None = None  # count so far; None without speculative decoding
    pooled: bytes | None = None  # float32 values; set in the output of a request with `pooling`
