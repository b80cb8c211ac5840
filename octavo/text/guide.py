"""Structured output with llguidance. A spec is compiled into a guide, which masks the next token.

    guides = Guides(tokenizer, vocab_size, end_ids)
    guide = guides.compile(StructuredOutputs(json=schema))       waits
    compilation = guides.start(StructuredOutputs(json=schema))   does not wait
    guide = compilation.poll()                                   returns None until it is compiled

Both `compile` and `poll` raise InvalidRequest. Specs are compiled in threads, each spec once. A
compiled guide is at the beginning of a text; each sequence follows a copy of it. This module works
on vocabularies and grammars, not on requests or scheduling. llguidance is imported when the first
guide is compiled.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from octavo.errors import GuideError, InvalidRequest
from octavo.params import SamplingParams, StructuredOutputs
from octavo.text.digit_limit import DigitLimit
from octavo.text.ebnf import literal
from octavo.text.grammar import prepare_grammar
from octavo.text.reasoning_guide import ReasoningGuide
from octavo.text.schema import close_objects, has_open_names, read_schema
from octavo.text.spec_errors import SpecError, compilation_timed_out, shorten, unusable_spec
from octavo.text.tokenizer import Tokenizer
from octavo.text.vocabulary import Vocabulary, make_vocabulary
from octavo.types import Guide

COMPILE_TIMEOUT = 5.0  # seconds that one compilation may take
MAX_THREADS = 2
# llguidance recurses on the native stack. The deepest specs that schema.MAX_DEPTH allows take 16
# MB. Only virtual memory is reserved.
STACK_BYTES = 256 * 2**20
MAX_ABANDONED_THREADS = 6  # replaced after a timeout; beyond this number, new specs wait
CACHE_BYTES = 256 * 2**20
# llguidance does not report the memory of a compiled grammar. Measurements showed up to 155 bytes
# for each character of its text. The memory also grows: all copies share a lexer, which keeps every
# state that a text reaches, about 700 bytes each. Most grammars have a few hundred states. Others
# reach new states with each token until the lexer is full and all their texts fail. So a guide is
# replaced after MAX_GUIDE_TOKENS tokens, and at once after one of its texts has failed.
GUIDE_BYTES = 64 * 2**10
BYTES_PER_CHARACTER = 160
BYTES_PER_TOKEN = 16 * 2**10
MAX_GUIDE_TOKENS = 4096
# A guide runs in the main thread of the engine, so a slow guide fails. JSON takes 0.01 to 5 ms for
# a token. Ambiguous grammars take longer with each token, up to seconds with the default limits of
# llguidance.
MAX_TOKEN_SECONDS = 0.03  # CPU time
PARSER_LIMITS = dict(
    step_max_items=5_000,
    max_items_in_row=20_000,
    max_lexer_states=100_000,
    initial_lexer_fuel=200_000,  # a{1000}{1000} compiles in 0.1 s, with the default in 1 s
    verbose_errors=False,
)
JSON_OPTIONS = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
PLAIN_ESCAPES = 'nrbtf\\"'  # Every character has one spelling, so \uXXXX is not allowed.
ANY_OBJECT = '{"type": "object"}'


class Guides:
    """Compiles and caches guides for one model.

    `end_ids` are the tokens that end a text. `vocab_size` is that of the model, which may be larger
    than the vocabulary of the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, end_ids: tuple[int, ...]):
        self.compiled = 0
        self.hits = 0
        self.seconds = 0.0
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        # The most recently used entry is the last one.
        self._cached: OrderedDict[tuple[str, ...], Compilation] = OrderedDict()
        self._lock = threading.Lock()  # protects the attributes below and the counters
        self._pending: deque[Compilation] = deque()
        self._running: set[Compilation] = set()
        self._thread_count = 0
        self._abandoned_threads = 0

    def around_reasoning(self, params: SamplingParams, answer: Guide | None) -> Guide | None:
        """Return the guide of a text that may begin with reasoning. `answer` guides the text after
        the reasoning."""
        if not params.guides_reasoning:
            return answer
        assert self._tokenizer is not None and params.reasoning is not None
        return ReasoningGuide(
            tokenizer=self._tokenizer,
            marks=params.reasoning,
            vocab_size=self._vocab_size,
            end_ids=self._end_ids,
            budget=params.thinking_token_budget,
            answer=None if answer is None else answer.copy(),
        )

    def compile(self, spec: StructuredOutputs) -> Guide:
        compilation = self.start(spec)
        while (guide := compilation.poll()) is None:
            compilation.finished.wait(0.1)
        return guide

    def start(self, spec: StructuredOutputs) -> Compilation:
        """Start to compile a spec, or return the compilation that is cached or under way."""
        spec_key = spec.key
        compilation = self._cached.pop(spec_key, None)
        if compilation is not None and not compilation.is_worn:
            self.hits += 1
            self._cached[spec_key] = compilation
            return compilation
        base_bytes = GUIDE_BYTES + BYTES_PER_CHARACTER * len(spec_key[1])
        compilation = self._cached[spec_key] = Compilation(spec, base_bytes, self._replace_late)
        cached_bytes = sum(known.estimated_bytes for known in self._cached.values())
        while cached_bytes > CACHE_BYTES and len(self._cached) > 1:
            cached_bytes -= self._cached.popitem(last=False)[1].estimated_bytes
        with self._lock:
            self._pending.append(compilation)
            self._add_thread()
        return compilation

    def _add_thread(self) -> None:
        """Start one more thread, if there is work for it."""
        if self._pending and self._thread_count < MAX_THREADS:
            self._thread_count += 1
            start_thread(self._compile_pending, STACK_BYTES)

    def _replace_late(self) -> None:
        """Replace threads that exceeded the timeout.

        A thread cannot be stopped from outside. An abandoned thread ends with its compilation.
        """
        with self._lock:
            late_compilations = [
                compilation
                for compilation in self._running
                if compilation.is_late and not compilation.is_abandoned
            ]
            replaceable = MAX_ABANDONED_THREADS - self._abandoned_threads
            for compilation in late_compilations[:replaceable]:
                compilation.is_abandoned = True
                self._abandoned_threads += 1
                self._thread_count -= 1
            self._add_thread()

    def _compile_pending(self) -> None:
        """Compile until no spec is pending or this thread is replaced. This runs in a thread."""
        while True:
            with self._lock:
                if not self._pending:
                    self._thread_count -= 1
                    return
                compilation = self._pending.popleft()
                self._running.add(compilation)
            try:
                vocabulary = self._get_vocabulary()
                compilation.started = time.monotonic()
                compilation.guide = build_guide(vocabulary, compilation.spec)
            except InvalidRequest as error:
                compilation.error = error
            except BaseException as error:  # a panic in native code is not an Exception
                compilation.error = unusable_spec(compilation.spec, str(error))
            with self._lock:
                self.compiled += 1
                self.seconds += time.monotonic() - (compilation.started or time.monotonic())
                self._running.discard(compilation)
                self._abandoned_threads -= compilation.is_abandoned
                compilation.finished.set()
            if compilation.is_abandoned:
                return

    def prepare(self) -> threading.Thread:
        """Start to make the vocabulary, for which the first guide would have to wait."""

        def make() -> None:
            with suppress(InvalidRequest):  # A guide raises the error again.
                self._get_vocabulary()

        return start_thread(make, STACK_BYTES)

    def _get_vocabulary(self) -> Vocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = make_vocabulary(self._tokenizer, self._vocab_size, self._end_ids)
            return self._vocabulary


def start_thread(target: Callable[[], None], stack_bytes: int) -> threading.Thread:
    """Start a thread with a stack of this size."""
    thread = threading.Thread(target=target, name="guides", daemon=True)
    previous_size = threading.stack_size(stack_bytes)
    try:
        thread.start()
    finally:
        threading.stack_size(previous_size)
    return thread


class Compilation:
    """The compilation of one spec. Only its thread changes it."""

    def __init__(self, spec: StructuredOutputs, base_bytes: int, replace_late: Callable[[], None]):
        self.spec = spec
        self.base_bytes = base_bytes
        self.started: float | None = None  # None while it waits for a thread
        self.is_abandoned = False  # its thread was replaced
        self._replace_late = replace_late
        self.finished = threading.Event()
        self.guide: LLGuide | None = None
        self.error: InvalidRequest | None = None

    @property
    def estimated_bytes(self) -> int:
        """Return an estimate of the memory of this compilation."""
        tokens = 0 if self.guide is None else self.guide.usage.tokens
        return self.base_bytes + BYTES_PER_TOKEN * tokens

    @property
    def is_worn(self) -> bool:
        """Return whether the guide must be compiled again because its lexer may be full."""
        if self.guide is None:
            return False
        usage = self.guide.usage
        return usage.failed or usage.tokens > MAX_GUIDE_TOKENS

    @property
    def is_late(self) -> bool:
        return self.started is not None and time.monotonic() - self.started > COMPILE_TIMEOUT

    def poll(self) -> Guide | None:
        """Return the guide, or None until it is compiled.

        A compilation that exceeded the timeout continues. A later poll may return its guide.
        """
        if self.finished.is_set():
            if self.error is not None:
                raise InvalidRequest(str(self.error), self.error.param, self.error.code)
            return self.guide
        self._replace_late()
        if self.is_late:
            raise compilation_timed_out(self.spec, COMPILE_TIMEOUT)
        return None


@dataclass(slots=True)
class GuideUsage:
    """Counters that all copies of a guide share."""

    tokens: int = 0
    failed: bool = False


class LLGuide:
    """A Guide that uses the matcher of llguidance."""

    __slots__ = ("_digits", "_matcher", "_vocabulary", "mask", "usage")

    def __init__(
        self,
        matcher: Any,
        vocabulary: Vocabulary,
        usage: GuideUsage,
        digit_limit: DigitLimit | None,
        mask: bytes | None = None,
    ):
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._digits = digit_limit
        self.usage = usage
        self.mask = self._compute_mask() if mask is None else mask

    def _compute_mask(self) -> bytes:
        mask_bytes = self._vocabulary.mask_bytes
        mask: bytes = self._matcher.compute_bitmask()[:mask_bytes]
        if self._matcher.is_error() or mask.count(0) == mask_bytes:
            raise self._error()
        return mask if self._digits is None else self._digits.restrict(mask)

    def accept(self, token_id: int) -> None:
        started = time.thread_time()
        self.usage.tokens += 1
        if not self._matcher.consume_token(token_id):
            raise self._error()
        if self._digits is not None:
            self._digits.push(self._vocabulary.tokens[token_id])
        self.mask = self._compute_mask()
        if time.thread_time() - started > MAX_TOKEN_SECONDS:
            self.usage.failed = True
            raise GuideError(
                "structured_outputs take too long to follow, because the grammar is too ambiguous: "
                "simplify it"
            )

    def copy(self) -> LLGuide:
        digit_limit = None if self._digits is None else self._digits.copy()
        return LLGuide(
            self._matcher.deep_copy(), self._vocabulary, self.usage, digit_limit, self.mask
        )

    def _error(self) -> GuideError:
        self.usage.failed = True
        return GuideError(
            f"no token can continue the text under structured_outputs: "
            f"{shorten(self._matcher.get_error())}"
        )


# ---- compiling -----------------------------------------------------------------------------------


def build_guide(vocabulary: Vocabulary, spec: StructuredOutputs) -> LLGuide:
    """Compile a spec and compute its first mask. Raises InvalidRequest."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        grammar = compile_source(spec)
    except SpecError as error:
        raise unusable_spec(spec, str(error), error.pointer) from None
    limits = LLParserLimits(**PARSER_LIMITS)  # type: ignore[arg-type]
    matcher = LLMatcher(vocabulary.native, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise unusable_spec(spec, matcher.get_error())
    try:
        return LLGuide(matcher, vocabulary, GuideUsage(), digit_limit(vocabulary, spec))
    except GuideError:
        reason = matcher.get_error()
        if not reason or "NoExtension" in reason:
            reason = "nothing can match it"
        raise unusable_spec(spec, reason) from None


def digit_limit(vocabulary: Vocabulary, spec: StructuredOutputs) -> DigitLimit | None:
    """Return the limit on digits for a spec that produces JSON, or None.

    JSON begins with a value. In a grammar with schemas, a value begins after a character that
    precedes values in JSON.
    """
    if spec.json is not None or spec.json_object:
        return DigitLimit(vocabulary.digits)
    if spec.grammar is not None and "%json" in spec.grammar:
        return DigitLimit(vocabulary.digits, "other")
    return None


def compile_source(spec: StructuredOutputs) -> str:
    """Return the spec in the grammar format of llguidance.

    Raises SpecError if the spec is nested too deeply or is not a valid schema or EBNF grammar.
    """
    from llguidance import LLMatcher, regex_to_lark

    close_schema = spec.disable_additional_properties is not False
    if spec.json is not None or spec.json_object:
        schema = read_schema(str(spec.json or ANY_OBJECT))
        options = {**JSON_OPTIONS, **_prepare_schema(schema, close_schema)}
        if spec.whitespace_pattern is not None:
            options["whitespace_pattern"] = spec.whitespace_pattern
        schema_text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        overrides: Any = options
        return LLMatcher.grammar_from_json_schema(schema_text, overrides=overrides)
    if spec.regex is not None:
        # The classes \d, \w and \s match ASCII characters only.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(spec.regex, 'dws')}/")
    if spec.choice is not None:
        # A terminal (in capitals) is one automaton, even with thousands of choices.
        choices = " | ".join(map(literal, spec.choice))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")

    def prepare(schema_text: str) -> str:
        """Prepare a schema inside a grammar. Unless it sets the option, whitespace is fixed."""
        schema = read_schema(schema_text)
        guidance_options = schema.get("x-guidance", {})
        if isinstance(guidance_options, dict):
            guidance_options = {
                "whitespace_flexible": False,
                **_prepare_schema(schema, close_schema),
                **guidance_options,
            }
        return json.dumps({**schema, "x-guidance": guidance_options}, ensure_ascii=False)

    return LLMatcher.grammar_from_lark(prepare_grammar(str(spec.grammar), prepare))


def _prepare_schema(schema: dict[str, Any], close_schema: bool) -> dict[str, Any]:
    """Close the objects of a schema if `close_schema`. Return the llguidance options for it."""
    if close_schema:
        close_objects(schema)
    return {"json_allowed_escapes": PLAIN_ESCAPES} if has_open_names(schema) else {}
