"""From what a text must match to a guide that follows it, by llguidance: compiled in threads of its own, each thing once.

    guides = Guides(tokenizer, vocab_size, end_ids)
    guide = guides.compile(StructuredOutputs(json=schema))     waits; raises InvalidRequest
    work = guides.start(StructuredOutputs(json=schema))        does not wait ...
    guide = work.poll()                                        ... None while it is not done; raises InvalidRequest

A compiled guide stands at the beginning of a text; who follows a text takes a copy. Knows vocabularies and grammars;
knows nothing of requests or scheduling. llguidance is imported when the first guide is asked for.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from octavo.errors import GuideError, InvalidRequest
from octavo.params import StructuredOutputs
from octavo.text.tokenizer import Tokenizer
from octavo.types import Guide

DEADLINE = 5.0  # seconds that one compilation may take
THREADS = 2
# threads that took longer and were replaced; beyond that, what comes waits for one of them
MOST_LOST = 6
CACHE_BYTES = 256 * 2**20
# What a compiled grammar takes cannot be asked. Seen: up to 155 bytes for each character of its text, most far less. And it
# grows: all copies share one lexer, which remembers every state that a text of theirs has met, some 700 bytes each. Most grammars
# have few hundred; others meet new ones with each token, until the lexer is full and leads nobody any more. So it is replaced
# after so many tokens, and at once when one of its texts has failed.
COST = 64 * 2**10
COST_PER_CHAR = 160
COST_PER_TOKEN = 16 * 2**10
WORN = 4096
# Following a text takes the engine's own time, so it holds up everybody: what would take long fails instead. JSON takes 0.01
# to 5 ms a token; grammars that can be read in very many ways take longer with each, seconds with the library's own limits.
SLOW = 0.03  # seconds of CPU time for one token
LIMITS = dict(
    step_max_items=5_000, max_items_in_row=20_000, max_lexer_states=100_000, verbose_errors=False
)
JSON_OPTIONS = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
NAMES = {
    "json": "the JSON schema",
    "regex": "the regex",
    "choice": "the choice",
    "grammar": "the grammar",
    "json_object": "JSON",
}
# bytes that a vocabulary must have as tokens; some lack a few control characters
PRINTABLE = set(range(0x20, 0x7F))
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
        self._vocabulary: Any = None  # llguidance's, once there is one
        self._building = threading.Lock()
        # the latest used last
        self._known: OrderedDict[tuple[str, str], Compilation] = OrderedDict()
        self._lock = threading.Lock()  # of what threads write: the counts, and these
        self._jobs: deque[Compilation] = deque()
        self._running: set[Compilation] = set()
        self._threads = self._lost = 0

    def compile(self, spec: StructuredOutputs) -> Guide:
        work = self.start(spec)
        while (guide := work.poll()) is None:
            work.done.wait(0.1)
        return guide

    def start(self, spec: StructuredOutputs) -> Compilation:
        """The same spec is compiled once, also when it is asked for again before it is there."""
        value = getattr(spec, spec.kind)
        key = spec.kind, json.dumps(value) if spec.kind == "choice" else str(value)
        work = self._known.pop(key, None)
        if work is not None and not work.worn:
            self.hits += 1
            self._known[key] = work
            return work
        work = self._known[key] = Compilation(
            spec, COST + COST_PER_CHAR * len(key[1]), self._relieve
        )
        size = sum(one.size for one in self._known.values())
        while size > CACHE_BYTES and len(self._known) > 1:
            size -= self._known.popitem(last=False)[1].size
        with self._lock:
            self._jobs.append(work)
            self._hire()
        return work

    def _hire(self) -> None:
        """One more thread, if there is work for it."""
        if self._jobs and self._threads < THREADS:
            self._threads += 1
            threading.Thread(target=self._work, name="guides", daemon=True).start()

    def _relieve(self) -> None:
        """What takes too long, though a thread cannot be ended, gives its place to another, so that others' work goes on."""
        with self._lock:
            for work in [work for work in self._running if work.late and not work.lost][
                : MOST_LOST - self._lost
            ]:
                work.lost = True
                self._lost = self._lost + 1
                self._threads = self._threads - 1
            self._hire()

    def _work(self) -> None:
        """A thread's life: until there is nothing left to do, or it was given up."""
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
                work.guide = build(vocabulary, work.spec, -(-self._vocab_size // 32) * 4)
            except InvalidRequest as error:
                work.error = error
            except (
                BaseException
            ) as error:  # of the library, panics too: whatever it is, somebody waits for an answer
                work.error = refused(work.spec, str(error))
            with self._lock:
                self.compiled += 1
                self.seconds += time.monotonic() - (work.started or time.monotonic())
                self._running.discard(work)
                self._lost -= work.lost
                work.done.set()
            if work.lost:
                return

    def _get_vocabulary(self) -> Any:
        with self._building:
            if self._vocabulary is None:
                self._vocabulary = make_vocabulary(self._tokenizer, self._vocab_size, self._end_ids)
            return self._vocabulary


class Compilation:
    """A guide on its way. Others than its thread only read it."""

    def __init__(self, spec: StructuredOutputs, cost: int, relieve: Callable[[], None]):
        self.spec = spec
        self.cost = cost
        self.started: float | None = None  # None: it waits for a thread
        self.lost = False  # its thread was given up
        self._relieve = relieve
        self.done = threading.Event()
        self.guide: LLGuide | None = None
        self.error: InvalidRequest | None = None

    @property
    def size(self) -> int:
        """Bytes it takes, by estimate."""
        return self.cost + COST_PER_TOKEN * (self.guide.use.tokens if self.guide is not None else 0)

    @property
    def worn(self) -> bool:
        return self.guide is not None and (self.guide.use.failed or self.guide.use.tokens > WORN)

    @property
    def late(self) -> bool:
        return self.started is not None and time.monotonic() - self.started > DEADLINE

    def poll(self) -> Guide | None:
        """None: not yet. One that is late goes on, and may be there when it is asked for again."""
        if self.done.is_set():
            if self.error is not None:
                raise InvalidRequest(str(self.error), self.error.param, self.error.code)
            return self.guide
        self._relieve()
        if self.late:
            raise InvalidRequest(
                f"{NAMES[self.spec.kind]} was not compiled within {DEADLINE:g} s: simplify it",
                "structured_outputs",
                "structured_output_timeout",
            )
        return None


@dataclass(slots=True)
class Use:
    """What all copies of a guide have done together."""

    tokens: int = 0
    failed: bool = False


class LLGuide:
    """Guide, by llguidance's matcher. `size`: bytes of a mask."""

    __slots__ = ("_matcher", "_size", "mask", "use")

    def __init__(self, matcher: Any, size: int, use: Use, mask: bytes | None = None):
        self._matcher = matcher
        self._size = size
        self.use = use
        self.mask = self._compute() if mask is None else mask

    def _compute(self) -> bytes:
        mask: bytes = self._matcher.compute_bitmask()[: self._size]
        if self._matcher.is_error() or mask.count(0) == self._size:
            raise self._error()
        return mask

    def accept(self, token: int) -> None:
        begun = time.thread_time()
        self.use.tokens += 1
        if not self._matcher.consume_token(token):
            raise self._error()
        self.mask = self._compute()
        if time.thread_time() - begun > SLOW:
            self.use.failed = True
            raise GuideError(
                "structured_outputs take too long to follow: the grammar can be read in too many ways, simplify it"
            )

    def copy(self) -> LLGuide:
        return LLGuide(self._matcher.deep_copy(), self._size, self.use, self.mask)

    def _error(self) -> GuideError:
        self.use.failed = True
        return GuideError(
            f"the text can no longer be led along structured_outputs: {shorten(self._matcher.get_error())}"
        )


# ---- compiling ----------------------------------------------------------------------------------------


def make_vocabulary(tokenizer: Tokenizer | None, vocab_size: int, end_ids: tuple[int, ...]) -> Any:
    """Every token's bytes. Ids without a token have none, and are never allowed."""
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise InvalidRequest(
            "structured_outputs need llguidance, which is not installed: pip install llguidance",
            "structured_outputs",
            "unsupported_parameter",
        ) from None
    why = ""
    if tokenizer is None:
        why = "this engine runs without one"
    elif not end_ids:
        why = "this model has no token that ends a text"
    elif tokenizer.pieces.kind == "other":
        why = "what this model's tokens stand for depends on their neighbours"
    else:
        vocabulary = _Vocabulary(tokenizer, vocab_size, end_ids[0])
        if vocabulary.bytes.keys() >= PRINTABLE:
            return LLTokenizer(vocabulary, eos_token=list(end_ids))  # type: ignore[arg-type]
        why = "this model's tokens cannot spell every character"
    raise InvalidRequest(
        f"structured_outputs need a tokenizer that can write anything: {why}",
        "structured_outputs",
        "unsupported_parameter",
    )


class _Vocabulary:
    """The attributes llguidance reads off a tokenizer of another's."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_id: int):
        special = tokenizer.special_ids
        self.tokens = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        self.special_token_ids = sorted(id for id in special if id < vocab_size)
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = end_id
        self.bytes = {
            token[0]: id
            for id, token in enumerate(self.tokens)
            if len(token) == 1 and id not in special
        }
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        """Tokens for a text that only one continuation is left for, so that it is cut as the model learned it. Their bytes
        must be the text's, exactly, though a tokenizer may put a space before a text, or normalise it."""
        data = text.encode()
        for before in ("", "\x02"):  # a character that nothing merges with
            ids = self._encode(before + text, add_special_tokens=False)
            extra = sum(len(self.tokens[id]) for id in ids) - len(data)
            first = 0
            while extra > 0:
                extra = extra - len(self.tokens[ids[first]])
                first = first + 1
            if b"".join(self.tokens[id] for id in ids[first:]) == data:
                return ids[first:]
        return [self.bytes[byte] for byte in data if byte in self.bytes]


def build(vocabulary: Any, spec: StructuredOutputs, size: int) -> LLGuide:
    """The guide of a spec, its first mask computed. Raises InvalidRequest."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(vocabulary, grammar_of(spec), log_level=0, limits=LLParserLimits(**LIMITS))  # type: ignore[arg-type]
    if matcher.is_error():
        raise refused(spec, matcher.get_error())
    try:
        return LLGuide(matcher, size, Use())
    except GuideError:
        why = matcher.get_error()
        raise refused(
            spec, "nothing can match it" if not why or "NoExtension" in why else why
        ) from None


def grammar_of(spec: StructuredOutputs) -> str:
    """llguidance's own form. Does not look at the contents."""
    from llguidance import LLMatcher, regex_to_lark

    if spec.json is not None or spec.json_object:
        return LLMatcher.grammar_from_json_schema(
            str(spec.json or ANY_OBJECT),
            overrides=JSON_OPTIONS,  # type: ignore[arg-type]
        )
    if spec.regex is not None:
        # \d is 0-9, not any script's digit
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(spec.regex, 'dws')}/")
    if spec.choice is not None:  # a terminal, in capitals: thousands of choices are one automaton
        choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in spec.choice)
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    return LLMatcher.grammar_from_lark(compact(spec.grammar or ""))


def compact(grammar: str) -> str:
    """Schemas within a grammar that say nothing of whitespace allow any amount of it, for ever: make them allow none."""
    parts = []
    at = 0
    for found in re.finditer(r"%json\s*(?=\{)", grammar):
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError):
            continue  # the library says what is wrong with it
        schema.setdefault("x-guidance", {"whitespace_flexible": False})
        parts += [grammar[at : found.end()], json.dumps(schema, ensure_ascii=False)]
        at = end
    return "".join([*parts, grammar[at:]])


# ---- saying what is wrong ------------------------------------------------------------------------------


def refused(spec: StructuredOutputs, why: str) -> InvalidRequest:
    where = ""
    if spec.json is not None:
        with suppress(ValueError, RecursionError):
            where = locate(json.loads(str(spec.json)), why.replace("Pointer '", "Pointer '#"))
    if "Enable 'coerce_one_of'" in why:
        why = "oneOf whose branches could match at the same time is not supported: use anyOf"
    elif why.startswith("panic"):
        why = "it is too large"
    elif why.startswith("Expecting object schema"):
        why = "a schema is an object"
    why = why.replace("Unimplemented keys:", "not supported:")
    at = f" (at {where})" if where else ""
    return InvalidRequest(
        f"{NAMES[spec.kind]} cannot be used: {shorten(why)}{at}",
        "structured_outputs",
        "invalid_structured_output",
    )


def shorten(text: str) -> str:
    text = text.replace("<non-verbose/>", "").strip()
    return text if len(text) <= 600 else f"{text[:500]} ... {text[-80:]}"


# How the library's messages quote the value of a keyword.
QUOTED = {"type": "type: {}", "format": "format: {}", "pattern": "{}\n", "$ref": "'{}'"}


def locate(schema: Any, error: str, path: str = "#", names: bool = False) -> str:
    """JSON pointer to the first place in a schema that an error message speaks of, or nothing. `names`: the keys at this
    level are a client's names and no keywords."""
    if isinstance(schema, list):
        return next(
            (
                found
                for i, part in enumerate(schema)
                if (found := locate(part, error, f"{path}/{i}"))
            ),
            "",
        )
    if not isinstance(schema, dict):
        return ""
    for name, value in schema.items() if not names else ():
        if f'"{name}"' in error or (
            name in QUOTED and isinstance(value, str) and QUOTED[name].format(value) in error
        ):
            return f"{path}/{name}"
    for name, value in schema.items():
        if names or name not in ("enum", "const", "default", "examples"):
            held = not names and name in ("properties", "patternProperties", "$defs", "definitions")
            if found := locate(
                value, error, f"{path}/{name.replace('~', '~0').replace('/', '~1')}", held
            ):
                return found
    return ""
