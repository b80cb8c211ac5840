"""The engine's data: requests, sequences, what a step computes and what it returns. Data only, no torch.

Guide                           tracks which tokens may come next in structured output
Request                         a tokenised request with its parameters (octavo/params.py)
Sequence                        one stream of tokens, as the scheduler sees it
Item, NewRow, Save, Fetch, Plan what one step computes and moves: passed from the scheduler to the runner
DiskNews, StepResult            what the step produced and what the disk has finished: passed from the runner to the scheduler
Output                          what the engine returns for one sequence
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from octavo.params import SamplingParams

# ---- requests ------------------------------------------------------------------------------------


class Guide(Protocol):
    """Follows one text and knows what it may go on with. Compiled from StructuredOutputs (octavo/text/guide.py)."""

    @property
    def mask(self) -> bytes:
        """What may come next, the end of the text included: one bit a token, the lowest first, in whole 32-bit words.
        At least one is set."""

    def accept(self, token: int) -> None:
        """Go on with a token, which renews the mask. Raises GuideError; the guide is then of no more use."""

    def copy(self) -> Guide:
        """Another one at the same place of the text."""


@dataclass(slots=True)
class Request:
    """What the client asked, tokenised."""

    id: str
    prompt: list[int]
    params: SamplingParams
    arrival: float = 0.0  # time.monotonic()
    cache_salt: str = ""  # requests of different salts never share blocks
    priority: int = 0  # lower comes sooner, under the policy of that name
    deadline: float | None = None  # time.monotonic() by which it should be done
    key: str = ""  # whose it is: what is shared fairly
    # of params.structured_outputs, at the text's beginning: each sequence follows a copy
    guide: Guide | None = None
    # time.monotonic() when it was handed to the engine, if that is another process
    submitted: float = 0.0
    # nobody waits for it before all the others that are patient have ended too
    patient: bool = False
    number: int = 0  # what its seed is drawn from, where it names none; 0: how many came before it


# ---- the scheduler's view of one stream of tokens -------------------------------------------------


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def child_seed(seed: int, index: int) -> int:
    """Seed of the index-th completion of a request: the request's own for the first, unrelated ones after it."""
    if index == 0:
        return seed
    return int.from_bytes(
        hashlib.blake2b(b"%d/%d" % (seed, index), digest_size=8).digest(), "little"
    )


# what the policy says, then the order of arrival, then which of the request's completions
Rank = tuple[float, int, int]


@dataclass(slots=True)
class Beam:
    """What a beam search knows of one of its sequences."""

    score: float = 0.0  # sum of the logprobs of what it said
    said: list[TokenLogprobs] = field(default_factory=list)
    report: TokenLogprobs | None = None  # what may come next; None: not computed yet


@dataclass(slots=True, eq=False)
class Sequence:
    id: int
    request: Request
    index: int  # which of the request's completions, or of its beams
    # prompt + committed output: host truth. An array: copied, hashed and shipped as bytes
    tokens: array[int]
    prompt_len: int
    limit: int  # it ends when len(tokens) reaches this
    seed: int
    stop_ids: frozenset[int]  # committing one of these ends it
    status: Status = Status.WAITING
    # tokens that left its cache (octavo/core/bounded_kv.py): they are gone from `tokens`, too, and
    # off
    dropped: int = 0
    # `limit` and `prompt_len`, so that all of these count positions. Of them the prompt's
    dropped_prompt: int = 0
    # attention that each logical block got, where that decides what leaves
    mass: list[float] = field(default_factory=list)
    table: list[int] = field(default_factory=list)  # logical block -> physical block
    hashes: list[bytes] = field(default_factory=list)  # content chain of its full blocks
    published: int = 0  # leading blocks already offered to the prefix cache
    computed: int = 0  # positions whose KV is committed
    planned: int = 0  # KV positions once every step in flight has landed
    inflight: int = 0  # steps launched and not yet committed
    epoch: int = 0  # bumped on preempt, finish and abort: results of older epochs are dropped
    row: int = -1  # device row while RUNNING
    forks: int = 0  # children still to fork once the prompt is computed but for one token
    cached: int = 0  # prompt positions served by the prefix cache at first admission
    rank: Rank = (0.0, 0, 0)  # its place among others: the lowest comes first
    preemptions: int = 0
    why: str = ""  # it was preempted last, in words: for people who watch
    shared: int = 0  # leading tokens that it has from the sequence it was forked from
    beam: Beam | None = None
    lost: int = 0  # positions it had when it was preempted last
    # alone it was too much for the device's memory, and is tried again in smaller steps
    shrunk: bool = False
    guide: Guide | None = None  # at the last committed token
    # whether it waits for the disk. -1: nothing was asked; 0: no longer; n: it looked after n
    # pieces of news
    asked: int = -1
    # by position; filled as the prompt is computed
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    queued: float = 0.0  # by the scheduler's clock: when it came
    first: float = 0.0  # and when its first token was there

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def prompt_kept(self) -> int:
        """Leading tokens that are the prompt's."""
        return self.prompt_len + self.dropped - self.dropped_prompt

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Asked for and not all there: every prompt position but the last must be computed, not found in the cache."""
        wanted = self.prompt_logprobs
        return wanted is not None and len(wanted) > 1 and wanted[-1] is None


# ---- one step -----------------------------------------------------------------------------------


class Item(NamedTuple):
    """One sequence's share of a step: compute `num` positions of `row`, and sample after the last if `sample`."""

    seq: int  # Sequence.id
    epoch: int
    row: int
    # first position, or None: only the device knows (a token still in flight precedes it)
    start: int | None
    num: int
    sample: bool
    end: int  # upper bound on start + num: what attention may have to read
    prompt_logprobs: int | None = None  # this many top logprobs for each position computed
    mass: bool = False  # tell how its attention is spread over the blocks of its cache


class NewRow(NamedTuple):
    """A row comes into use: everything the device must know of a sequence."""

    seq: int  # Sequence.id
    epoch: int
    row: int
    tokens: array[int]
    computed: int
    table: list[int]
    prompt_len: int  # leading tokens that are the prompt's
    seed: int
    stop_ids: frozenset[int]
    params: SamplingParams
    logprobs: int | None = None  # of each token sampled, and of so many of the likeliest
    offset: int = 0  # tokens that were dropped: a position of the text is one of the cache and this
    said: int = 0  # how many of those were generated


class Save(NamedTuple):
    """Write what a host slot holds to disk, some time, if the slot still holds it then."""

    slot: int
    hash: bytes
    tokens: array[int]


class Fetch(NamedTuple):
    """Read a block's content from disk into a host slot. News of it comes exactly once, whatever the disk does."""

    ticket: int
    slot: int
    hash: bytes
    tokens: array[int]  # the record must be of these


@dataclass(slots=True)
class Plan:
    """Everything a runner needs for one step, applied in the order of the fields. Never edited after plan() returned it."""

    step: int
    # block, host slot: before anything overwrites the block
    stores: list[tuple[int, int]] = field(default_factory=list)
    # copy on write: from block, to block
    copies: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)  # host slot, block
    # block, by how many positions its keys move towards the front
    shifts: list[tuple[int, int]] = field(default_factory=list)
    rows: list[NewRow] = field(default_factory=list)
    # row, logical block, physical block
    appends: list[tuple[int, int, int]] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    # item -> what it may sample (Guide.mask); others: anything
    masks: dict[int, bytes] = field(default_factory=dict)
    # the disk's work begins with the step and ends when it ends
    saves: list[Save] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    # the disk was asked for something: its news is wanted, even if there is nothing to compute
    waits: bool = False
    urgent: bool = False  # others stand aside for the prompts in it

    @property
    def work(self) -> bool:
        return bool(self.items or self.rows or self.copies or self.waits)

    @property
    def moves(self) -> bool:
        """There is more in it than blocks from lower tiers and to them."""
        return bool(self.items or self.rows or self.copies or self.shifts or self.appends)

    @property
    def num_tokens(self) -> int:
        return sum(item.num for item in self.items)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: of the token that stands there, and of the likeliest ones."""

    token: int
    logprob: float
    rank: int  # 1: the likeliest
    top: list[tuple[int, float]]  # (token, logprob), best first


class DiskNews(NamedTuple):
    """What became of something the disk was asked for."""

    kind: str  # "fetched" | "missed" | "saved" | "unsaved" | "listed"
    hash: bytes = b""
    ticket: int = 0  # of the fetch
    why: str = ""  # it was missed or not saved, in a word
    seconds: float = 0.0  # that a fetch took while others were read beside it
    hashes: frozenset[bytes] = frozenset()  # listed: all that there is


@dataclass(slots=True)
class StepResult:
    """One entry an item of the plan, in order."""

    tokens: list[list[int]]  # what the item sampled: none for a prefill chunk that is not the last
    logprobs: list[list[TokenLogprobs]] | None = None  # like tokens; None when nobody asked
    # item -> of the token AFTER each position computed
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    # item -> part of its attention that each logical block got
    mass: dict[int, list[float]] = field(default_factory=dict)
    seconds: float = 0.0  # the device took for the items; 0: nobody measured
    load_seconds: float = 0.0  # and for the loads
    news: list[DiskNews] = field(default_factory=list)
    # host slots that came from disk: what was loaded is not what was once saved
    spoilt: set[int] = field(default_factory=set)


# ---- what comes out -------------------------------------------------------------------------------


@dataclass(slots=True)
class Output:
    """News of one sequence: tokens since the last one, and how it ended if it did."""

    request_id: str
    index: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | str | None = None  # the stop token id or string that ended it
    cached_tokens: int = 0  # with the first and the last output only
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # with the first output only
    error: str | None = None
    code: str | None = None  # of an error that is the request's own fault: stable, for programs
