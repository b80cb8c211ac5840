"""Structured output by llguidance: a spec is compiled into a guide, which says what a text may go on with.

    guides = Guides(tokenizer, vocab_size, end_ids)
    guide = guides.compile(StructuredOutputs(json=schema))     waits; raises InvalidRequest
    work = guides.start(StructuredOutputs(json=schema))        does not wait
    guide = work.poll()                                        None until it is compiled; raises InvalidRequest

Specs are compiled in threads, each spec once. A compiled guide stands at the beginning of a text; each sequence follows a copy.
Knows vocabularies and grammars; knows nothing of requests or scheduling. llguidance is imported when the first guide is compiled.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.errors import GuideError, InvalidRequest
from octavo.params import StructuredOutputs
from octavo.text.digits import DigitLimit
from octavo.text.ebnf import literal
from octavo.text.grammar import prepare_grammar
from octavo.text.schema import close_objects, has_open_names, read_schema
from octavo.text.spec_errors import SpecError, refused, shorten, timed_out
from octavo.text.tokenizer import Tokenizer
from octavo.text.vocabulary import Vocabulary, make_vocabulary
from octavo.types import Guide

DEADLINE = 5.0  # seconds that one compilation may take
THREADS = 2
# llguidance recurses on the native stack, up to 16 MB for the deepest specs that are let in (schema.py, MAX_DEPTH). Only virtual
# memory is reserved.
STACK_BYTES = 256 * 2**20
MOST_LOST = 6  # threads that exceeded the deadline and were replaced; beyond that, new specs wait
CACHE_BYTES = 256 * 2**20
# llguidance does not tell how much memory a compiled grammar takes: up to 155 bytes for each character of its text were measured.
# And it grows: all copies share a lexer, which keeps every state that a text has met, some 700 bytes each. Most grammars have a
# few hundred states; others meet new ones with each token, until the lexer is full and none of their texts can go on. So a guide
# is replaced after so many tokens, and at once when one of its texts has failed.
COST = 64 * 2**10
COST_PER_CHAR = 160
COST_PER_TOKEN = 16 * 2**10
WORN = 4096
# Following a text takes time of the engine's main thread, so a slow guide fails instead. JSON takes 0.01 to 5 ms a token;
# ambiguous grammars take longer with each token, up to seconds with llguidance's own limits.
SLOW = 0.03  # seconds of CPU time for one token
LIMITS = dict(
    step_max_items=5_000, max_items_in_row=20_000, max_lexer_states=100_000, verbose_errors=False
)
JSON_OPTIONS = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
PLAIN_ESCAPES = 'nrbtf\\"'  # every character has one spelling: no \uXXXX
ANY_OBJECT = '{"type": "object"}'


class Guides:
    """Compiles for one model. `end_ids` end its texts; `vocab_size` is the model's: there may be more ids than tokens."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, end_ids: tuple[int, ...]):
        self.compiled = 0
        self.hits = 0
        self.seconds = 0.0
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._vocabulary: Vocabulary | None = None
        self._building = threading.Lock()
        # the most recently used last
        self._known: OrderedDict[tuple[str, ...], Compilation] = OrderedDict()
        self._lock = threading.Lock()  # of everything below, and of the counts
        self._jobs: deque[Compilation] = deque()
        self._running: set[Compilation] = set()
        self._threads = 0
        self._lost = 0

    def compile(self, spec: StructuredOutputs) -> Guide:
        work = self.start(spec)
        while (guide := work.poll()) is None:
            work.done.wait(0.1)
        return guide

    def start(self, spec: StructuredOutputs) -> Compilation:
        """The compilation of a spec. A spec that is compiled or being compiled is not compiled again."""
        key = spec.key
        work = self._known.pop(key, None)
        if work is not None and not work.worn:
            self.hits += 1
            self._known[key] = work
            return work
        cost = COST + COST_PER_CHAR * len(key[1])
        work = self._known[key] = Compilation(spec, cost, self._replace_late)
        size = sum(one.size for one in self._known.values())
        while size > CACHE_BYTES and len(self._known) > 1:
            size -= self._known.popitem(last=False)[1].size
        with self._lock:
            self._jobs.append(work)
            self._add_thread()
        return work

    def _add_thread(self) -> None:
        """Start one more thread, if there is work for it."""
        if self._jobs and self._threads < THREADS:
            self._threads += 1
            start_thread(self._work, STACK_BYTES)

    def _replace_late(self) -> None:
        """Replace threads that exceeded the deadline. A thread cannot be ended from outside; it ends with its compilation."""
        with self._lock:
            late = [work for work in self._running if work.late and not work.lost]
            for work in late[: MOST_LOST - self._lost]:
                work.lost = True
                self._lost += 1
                self._threads -= 1
            self._add_thread()

    def _work(self) -> None:
        """Run in a thread: compile until no work is left, or until the thread is replaced."""
        while True:
            with self._lock:
                if not self._jobs:
                    self._threads -= 1
                    return
                work = self._jobs.popleft()
                self._running.add(work)
            try:
                vocabulary = self._get_vocabulary()
                work.started = time.monotonic()
                work.guide = build(vocabulary, work.spec)
            except InvalidRequest as error:
                work.error = error
            except BaseException as error:  # a panic in native code is not an Exception
                work.error = refused(work.spec, str(error))
            with self._lock:
                self.compiled += 1
                self.seconds += time.monotonic() - (work.started or time.monotonic())
                self._running.discard(work)
                self._lost -= work.lost
                work.done.set()
            if work.lost:
                return

    def _get_vocabulary(self) -> Vocabulary:
        with self._building:
            if self._vocabulary is None:
                self._vocabulary = make_vocabulary(self._tokenizer, self._vocab_size, self._end_ids)
            return self._vocabulary


def start_thread(target: Callable[[], None], stack_bytes: int) -> threading.Thread:
    """Start a thread with a stack of this size."""
    thread = threading.Thread(target=target, name="guides", daemon=True)
    before = threading.stack_size(stack_bytes)
    try:
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


class Compilation:
    """A guide that is being compiled. Only its thread changes it."""

    def __init__(self, spec: StructuredOutputs, cost: int, replace_late: Callable[[], None]):
        self.spec = spec
        self.cost = cost
        self.started: float | None = None  # None: it waits for a thread
        self.lost = False  # its thread was replaced
        self._replace_late = replace_late
        self.done = threading.Event()
        self.guide: LLGuide | None = None
        self.error: InvalidRequest | None = None

    @property
    def size(self) -> int:
        """An estimate of its bytes."""
        return self.cost + COST_PER_TOKEN * (self.guide.use.tokens if self.guide is not None else 0)

    @property
    def worn(self) -> bool:
        return self.guide is not None and (self.guide.use.failed or self.guide.use.tokens > WORN)

    @property
    def late(self) -> bool:
        return self.started is not None and time.monotonic() - self.started > DEADLINE

    def poll(self) -> Guide | None:
        """The guide, or None until it is compiled. A late compilation goes on: its guide may be there the next time."""
        if self.done.is_set():
            if self.error is not None:
                raise InvalidRequest(str(self.error), self.error.param, self.error.code)
            return self.guide
        self._replace_late()
        if self.late:
            raise timed_out(self.spec, DEADLINE)
        return None


@dataclass(slots=True)
class Use:
    """What all copies of a guide have done together."""

    tokens: int = 0
    failed: bool = False


class LLGuide:
    """A Guide by llguidance's matcher."""

    __slots__ = ("_digits", "_matcher", "_vocabulary", "mask", "use")

    def __init__(
        self,
        matcher: Any,
        vocabulary: Vocabulary,
        use: Use,
        digits: DigitLimit | None,
        mask: bytes | None = None,
    ):
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._digits = digits
        self.use = use
        self.mask = self._compute() if mask is None else mask

    def _compute(self) -> bytes:
        size = self._vocabulary.mask_bytes
        mask: bytes = self._matcher.compute_bitmask()[:size]
        if self._matcher.is_error() or mask.count(0) == size:
            raise self._error()
        return mask if self._digits is None else self._digits.restrict(mask)

    def accept(self, token: int) -> None:
        begun = time.thread_time()
        self.use.tokens += 1
        if not self._matcher.consume_token(token):
            raise self._error()
        if self._digits is not None:
            self._digits.push(self._vocabulary.tokens[token])
        self.mask = self._compute()
        if time.thread_time() - begun > SLOW:
            self.use.failed = True
            raise GuideError(
                "structured_outputs take too long to follow: the grammar can be read in too many ways, simplify it"
            )

    def copy(self) -> LLGuide:
        digits = None if self._digits is None else self._digits.copy()
        return LLGuide(self._matcher.deep_copy(), self._vocabulary, self.use, digits, self.mask)

    def _error(self) -> GuideError:
        self.use.failed = True
        return GuideError(
            f"the text cannot go on as structured_outputs demand: {shorten(self._matcher.get_error())}"
        )


# ---- compiling ----------------------------------------------------------------------------------------


def build(vocabulary: Vocabulary, spec: StructuredOutputs) -> LLGuide:
    """The guide of a spec, its first mask computed. Raises InvalidRequest."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        source = compile_source(spec)
    except SpecError as error:
        raise refused(spec, str(error), error.pointer) from None
    limits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
    matcher = LLMatcher(vocabulary.native, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise refused(spec, matcher.get_error())
    try:
        return LLGuide(matcher, vocabulary, Use(), digit_limit(vocabulary, spec))
    except GuideError:
        why = matcher.get_error()
        raise refused(
            spec, "nothing can match it" if not why or "NoExtension" in why else why
        ) from None


def digit_limit(vocabulary: Vocabulary, spec: StructuredOutputs) -> DigitLimit | None:
    """JSON is followed from its first value on; a grammar with schemas from wherever it looks like JSON."""
    if spec.json is not None or spec.json_object:
        return DigitLimit(vocabulary.digits)
    if spec.grammar is not None and "%json" in spec.grammar:
        return DigitLimit(vocabulary.digits, "other")
    return None


def compile_source(spec: StructuredOutputs) -> str:
    """The spec in llguidance's own form. Raises SpecError where its structure is too deep, or no schema or EBNF at all."""
    from llguidance import LLMatcher, regex_to_lark

    closed = spec.disable_additional_properties is not False
    if spec.json is not None or spec.json_object:
        schema = read_schema(str(spec.json or ANY_OBJECT))
        options = {**JSON_OPTIONS, **_prepare(schema, closed)}
        if spec.whitespace_pattern is not None:
            options["whitespace_pattern"] = spec.whitespace_pattern
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        return LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
    if spec.regex is not None:
        # \d is 0-9, not any script's digit
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(spec.regex, 'dws')}/")
    if spec.choice is not None:  # a terminal, in capitals: thousands of choices are one automaton
        choices = " | ".join(map(literal, spec.choice))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")

    def prepare(text: str) -> str:
        """A schema within a grammar. Where it says nothing of whitespace it allows none."""
        schema = read_schema(text)
        style = schema.get("x-guidance", {})
        if isinstance(style, dict):
            style = {"whitespace_flexible": False, **_prepare(schema, closed), **style}
        return json.dumps({**schema, "x-guidance": style}, ensure_ascii=False)

    return LLMatcher.grammar_from_lark(prepare_grammar(str(spec.grammar), prepare))


def _prepare(schema: dict[str, Any], closed: bool) -> dict[str, Any]:
    """Close the objects of a schema, unless they are to stay open. Returns llguidance's options for it."""
    if closed:
        close_objects(schema)
    return {"json_allowed_escapes": PLAIN_ESCAPES} if has_open_names(schema) else {}
