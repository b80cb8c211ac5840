"""The data that every part shares: what is asked, what a step does, what comes back. Data only, no torch.

StructuredOutputs, SamplingParams, BeamSearchParams, Request   what the client asked
Guide                           follows a text that must match something
Sequence                        one token stream, as the scheduler knows it
Item, NewRow, Save, Fetch, Plan what one step computes and moves: goes down to the runner
DiskNews, StepResult            what it produced, and what the disk has done meanwhile: comes up from the runner
Output                          what the engine hands to whoever asked
"""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from octavo.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_BEAMS = 64


# ---- asked -------------------------------------------------------------------------------------


def check_real(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    """Refuse what is not a finite number within [low, high] (or (low, high])."""
    ok = type(value) in (int, float) or (
        isinstance(value, (int, float)) and not isinstance(value, bool)
    )
    # which no NaN and no infinity passes
    if not ok or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidRequest(
            f"{name} must be a number in {bracket}{low:g}, {high:g}], got {value!r}",
            name,
            "param_out_of_range",
        )


def check_whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    ok = type(value) is int or (isinstance(value, int) and not isinstance(value, bool))
    if not ok or value < low or (high is not None and value > high):
        most = "" if high is None else f" and at most {high}"
        raise InvalidRequest(
            f"{name} must be an integer of at least {low}{most}, got {value!r}",
            name,
            "param_out_of_range",
        )


@dataclass(slots=True)
class StructuredOutputs:
    """What the text must match: exactly one of these. Names are those of vLLM's StructuredOutputsParams."""

    # a JSON schema; its text once validated, in the client's order
    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # in llguidance's dialect of Lark
    json_object: bool | None = None  # any JSON object

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """One kind, of the right type. Whether it can be followed is known once it has been compiled."""
        if self.json_object not in (None, True, False):
            raise InvalidRequest(
                f"json_object must be true or false, got {self.json_object!r:.100}",
                "structured_outputs",
            )
        self.json_object = self.json_object or None
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise InvalidRequest(
                f"structured_outputs takes exactly one of {', '.join(KINDS)}, got {' and '.join(given) or 'none'}",
                "structured_outputs",
            )
        if isinstance(self.json, dict):
            try:
                self.json = json.dumps(self.json, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidRequest(
                    f"json must be a JSON schema: {error}", "structured_outputs"
                ) from None
        for kind in ("json", "regex", "grammar"):
            value = getattr(self, kind)
            if value is not None and (not isinstance(value, str) or not value):
                allowed = (
                    "a JSON schema: an object, or its text"
                    if kind == "json"
                    else "a non-empty string"
                )
                raise InvalidRequest(
                    f"{kind} must be {allowed}, got {value!r:.100}", "structured_outputs"
                )
        if self.choice is not None:
            self.choice = list(self.choice) if isinstance(self.choice, (list, tuple)) else []
            if not self.choice or any(not isinstance(c, str) or not c for c in self.choice):
                raise InvalidRequest(
                    "choice must be a list of non-empty strings, at least one", "structured_outputs"
                )

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)


KINDS = ("json", "regex", "choice", "grammar", "json_object")
StructuredOutputsParams = StructuredOutputs  # vLLM's name


@dataclass(slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and defaults are those of vLLM's class of this name."""

    n: int = 1
    # compute this many and give back the n best; of beams: how many live
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    seed: int | None = None  # None: derived from the engine's seed and the order of arrival
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to the context's end
    min_tokens: int = 0
    logprobs: int | None = None  # the chosen token's, and this many of the likeliest
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None
    # the likeliest texts instead of drawn ones: octavo/core/groups.py
    use_beam_search: bool = False
    # of beams: a text ranks by the sum of its logprobs / its length ** this
    length_penalty: float = 1.0
    early_stopping: bool | str = False  # of beams, as in transformers: True, False or "never"

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        check_whole("n", self.n, 1, 128)
        if self.best_of is not None:
            check_whole("best_of", self.best_of, self.n, 128)
        self._validate_beams()
        check_real("presence_penalty", self.presence_penalty, -2, 2)
        check_real("frequency_penalty", self.frequency_penalty, -2, 2)
        check_real("repetition_penalty", self.repetition_penalty, 0, 100, open_low=True)
        check_real("temperature", self.temperature, 0, 100)
        check_real("top_p", self.top_p, 0, 1, open_low=True)
        check_whole("top_k", self.top_k, -1)
        check_real("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            check_whole("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1)
        check_whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                "min_tokens",
                "param_out_of_range",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, 0, MAX_LOGPROBS)
        listed: Any = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not isinstance(listed, (list, tuple, set, frozenset)) or any(
            not isinstance(s, str) or not s for s in listed
        ):
            raise InvalidRequest(
                "stop must be a non-empty string or a list of non-empty strings", "stop"
            )
        self.stop = list(listed)
        if self.stop and not self.detokenize:
            raise InvalidRequest(
                "stop strings need text: set detokenize=True or use stop_token_ids", "stop"
            )
        if self.stop_token_ids is not None and not isinstance(
            self.stop_token_ids, (list, tuple, set, frozenset)
        ):
            raise InvalidRequest(
                f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}",
                "stop_token_ids",
            )
        self.stop_token_ids = list(self.stop_token_ids or [])
        for t in self.stop_token_ids:
            check_whole("stop_token_ids", t, 0)
        if self.logit_bias is not None:
            try:
                self.logit_bias = {int(t): float(b) for t, b in self.logit_bias.items()}
            except (TypeError, ValueError, AttributeError):
                raise InvalidRequest(
                    "logit_bias must map token ids to numbers", "logit_bias"
                ) from None
            for b in self.logit_bias.values():
                check_real("logit_bias", b, -100, 100)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids must not be empty", "allowed_token_ids")
            for t in self.allowed_token_ids:
                check_whole("allowed_token_ids", t, 0)
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputs):
                raise InvalidRequest(
                    "structured_outputs must be a StructuredOutputsParams", "structured_outputs"
                )
            if self.allowed_token_ids is not None:
                raise InvalidRequest(
                    "allowed_token_ids and structured_outputs exclude each other: both say which tokens may come",
                    "allowed_token_ids",
                )

    def _validate_beams(self) -> None:
        """A beam search goes by the model's own logprobs: what would change them is refused, what draws from them is unused."""
        check_real("length_penalty", self.length_penalty, -10, 10)
        if self.early_stopping not in (True, False, "never"):
            raise InvalidRequest(
                f'early_stopping must be true, false or "never", got {self.early_stopping!r:.100}',
                "early_stopping",
            )
        self.early_stopping = (
            self.early_stopping if self.early_stopping == "never" else bool(self.early_stopping)
        )
        if not self.use_beam_search:
            for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != default:
                    raise InvalidRequest(
                        f"{name} is for beam search: set use_beam_search or leave it out", name
                    )
            return
        check_whole("n" if self.best_of is None else "best_of", self.width, 1, MAX_BEAMS)
        changed = {
            "presence_penalty": self.presence_penalty != 0,
            "frequency_penalty": self.frequency_penalty != 0,
            "repetition_penalty": self.repetition_penalty != 1,
            "logit_bias": bool(self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids is not None,
            "structured_outputs": self.structured_outputs is not None,
            "stop": bool(self.stop),
        }
        for name in (name for name, given in changed.items() if given):
            hint = ": use stop_token_ids" if name == "stop" else ": leave it out"
            raise InvalidRequest(
                f"{name} is not supported with beam search{hint}", name, "unsupported_parameter"
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Token ids are checked once the model is known."""
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for t in getattr(self, name) or ():
                if not 0 <= t < vocab_size:
                    raise InvalidRequest(
                        f"{name} names token {t}, but the vocabulary has ids 0..{vocab_size - 1}",
                        name,
                    )

    @property
    def width(self) -> int:
        """Sequences that are computed."""
        return self.best_of or self.n

    @property
    def completions(self) -> int:
        """Sequences that the engine tells of: all that were drawn, of a beam search the best."""
        return self.n if self.use_beam_search else self.width

    @property
    def ranked(self) -> bool:
        """Which are given back is known at the end, from their logprobs."""
        return self.use_beam_search or self.width > self.n

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5 or self.use_beam_search

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )


@dataclass(slots=True)
class BeamSearchParams:
    """How LLM.beam_search searches. Names and defaults are those of vLLM's class of this name, and early_stopping."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # taken, and without effect: nothing is drawn
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False  # the token that ends a text is among its tokens
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        check_whole("beam_width", self.beam_width, 1, MAX_BEAMS)
        self.sampling()

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=0,
            detokenize=False,
        )


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
    # tokens that left its cache (octavo/core/eviction.py): they are gone from `tokens`, too, and
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
