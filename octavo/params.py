"""Request parameters and their validation. Data only, no torch.

StructuredOutputs   what the text must match
SamplingParams      how tokens are chosen and when a text ends
BeamSearchParams    how LLM.beam_search searches
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from octavo.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_LOGPROB_IDS = 128
MAX_BEAMS = 64
MAX_PATTERN_SIZE = 256
MAX_PATTERN_COUNT = 65536
MAX_BIAS = 100.0
DIGITS = re.compile(r"[0-9]{1,9}")


def check_real(name: str, value: Any, low: float, high: float, open_low: bool = False) -> float:
    """Return the value as a Python number. Raise if it is not a finite number within [low, high],
    or (low, high] with `open_low`. NumPy and PyTorch scalars are numbers too."""
    number = _python_number(value)
    # NaN and infinity do not pass the comparison.
    if number is None or not low <= number <= high or (open_low and number == low):
        bracket = "(" if open_low else "["
        raise InvalidRequest(
            f"{name} must be a number in {bracket}{low:g}, {high:g}], got {value!r:.100}",
            name,
            "param_out_of_range",
        )
    return number


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return the value as a Python integer. Raise if it is not one of at least `low` and at most
    `high`."""
    number = _python_number(value)
    if not isinstance(number, int) or number < low or (high is not None and number > high):
        upper_bound = "" if high is None else f" and at most {high}"
        raise InvalidRequest(
            f"{name} must be an integer of at least {low}{upper_bound}, got {value!r:.100}",
            name,
            "param_out_of_range",
        )
    return number


def _python_number(value: Any) -> int | float | None:
    """Return the number as a Python int or float, or None if the value is no number."""
    if type(value) is int or type(value) is float:  # the common case first
        return value
    if getattr(value, "ndim", None) == 0:  # a NumPy or PyTorch scalar
        value = value.item()
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def check_token_ids(name: str, given: Any) -> list[int]:
    """Return the token ids as a list of Python integers. Lists, tuples, sets, NumPy arrays and
    PyTorch tensors are accepted."""
    ids = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(ids, (list, tuple, set, frozenset, range)):
        raise InvalidRequest(f"{name} must be a list of token ids, got {given!r:.100}", name)
    return [check_integer(name, token, 0) for token in ids]


def check_logit_bias(given: Any) -> dict[int, float]:
    """Return the biases by token id. Keys are integers or their ASCII decimal digits, as JSON needs
    them."""
    if not hasattr(given, "items"):
        raise InvalidRequest(
            f"logit_bias must map token ids to numbers, got {given!r:.100}", "logit_bias"
        )
    biases: dict[int, float] = {}
    wrong = [key for key in given if _bias_token(key) < 0]
    if wrong:
        shown = ", ".join(f"{key!r:.100}" for key in wrong[:8]) + (", ..." if wrong[8:] else "")
        raise InvalidRequest(
            f"logit_bias has keys that are not token ids: {shown}. Keys must be integers of at "
            "least 0 in decimal digits",
            "logit_bias",
        )
    for key, value in given.items():
        token = _bias_token(key)
        if token in biases:
            raise InvalidRequest(
                f"logit_bias has two keys for token {token}, one of them {key!r:.100}: give one",
                "logit_bias",
            )
        biases[token] = check_real("logit_bias", value, -MAX_BIAS, MAX_BIAS)
    return biases


def _bias_token(key: Any) -> int:
    """Return the token id of a key of logit_bias, or -1 if it is none."""
    if isinstance(key, str):
        return int(key) if DIGITS.fullmatch(key) else -1
    number = _python_number(key)
    return number if isinstance(number, int) else -1


Params = TypeVar("Params")


def accepts_vllm_fields(advice: dict[str, str]) -> Callable[[type[Params]], type[Params]]:
    """Let a dataclass accept further keyword arguments, which vLLM has and which stay unset.

    A value that would have an effect is refused with the field's advice. A field without advice has
    no effect with any value."""

    def wrap(group: type[Params]) -> type[Params]:
        original_init = group.__init__

        @functools.wraps(original_init)
        def init(self: Any, *args: Any, **fields: Any) -> None:
            for name in fields.keys() & advice.keys():
                if fields.pop(name) and advice[name]:
                    raise InvalidRequest(
                        f"{name} is not supported: {advice[name]}", name, "unsupported_parameter"
                    )
            original_init(self, *args, **fields)

        group.__init__ = init  # type: ignore[method-assign]
        return group

    return wrap


@accepts_vllm_fields(
    {
        "backend": "",
        "backend_was_auto": "",
        "structural_tag": "describe the text with json, regex or grammar",
    }
)
@dataclass(slots=True)
class StructuredOutputs:
    """The structure that the text must match: exactly one of these fields.

    The names are those of StructuredOutputsParams in vLLM."""

    # a JSON schema; its text once validated, in the client's order
    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # in llguidance's dialect of Lark, or in EBNF
    json_object: bool | None = None  # any JSON object
    # None or True: an object of a schema has only the properties that the schema names, unless the
    # schema itself allows others. False: it may have others, as JSON Schema defines it
    disable_additional_properties: bool | None = None
    # a regex for whitespace between the tokens of JSON; None: there is none
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False  # accepted without effect
    disable_fallback: bool = False  # accepted without effect

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check that there is one kind of the right type. Only compiling shows if it is valid."""
        if not isinstance(self.json_object, bool | None):
            raise InvalidRequest(
                f"json_object must be true or false, got {self.json_object!r:.100}",
                "structured_outputs",
            )
        self.json_object = self.json_object or None
        kinds = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise InvalidRequest(
                f"structured_outputs takes exactly one of {', '.join(KINDS)}, "
                f"got {' and '.join(kinds) or 'none'}",
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

        self._validate_options()

    def _validate_options(self) -> None:
        for name in ("disable_additional_properties", "disable_any_whitespace", "disable_fallback"):
            if not isinstance(getattr(self, name), bool | None):
                raise InvalidRequest(
                    f"{name} must be true or false, got {getattr(self, name)!r:.100}",
                    "structured_outputs",
                )
        pattern = self.whitespace_pattern
        if pattern is not None and (not isinstance(pattern, str) or not pattern):
            raise InvalidRequest(
                f"whitespace_pattern must be a non-empty regex, got {pattern!r:.100}",
                "structured_outputs",
            )
        if pattern is not None and self.kind not in ("json", "json_object"):
            raise InvalidRequest(
                f"whitespace_pattern is for json and json_object: with {self.kind}, leave it out",
                "structured_outputs",
            )

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def key(self) -> tuple[str, ...]:
        """Return everything that is compiled, as text. Equal specs have equal keys."""
        value = getattr(self, self.kind)
        text = json.dumps(value) if self.kind == "choice" else str(value)
        opened = "open" if self.disable_additional_properties is False else "closed"
        return self.kind, text, opened, self.whitespace_pattern or ""


KINDS = ("json", "regex", "choice", "grammar", "json_object")
StructuredOutputsParams = StructuredOutputs  # vLLM's name
GuidedDecodingParams = StructuredOutputs  # vLLM's name up to 0.11


@dataclass(slots=True)
class RepetitionDetectionParams:
    """Ends a text that repeats a pattern of tokens at least `min_count` times in a row.

    The names and defaults are those of the same class in vLLM."""

    max_pattern_size: int = 0  # The number of tokens. 0 turns the detection off.
    min_pattern_size: int = 0  # 0 means the same as 1.
    min_count: int = 0

    def __post_init__(self) -> None:
        name = "repetition_detection"
        check_integer(f"{name}.max_pattern_size", self.max_pattern_size, 0, MAX_PATTERN_SIZE)
        if not self.enabled:
            return
        max_size = self.max_pattern_size
        check_integer(f"{name}.min_pattern_size", self.min_pattern_size, 0, max_size)
        check_integer(f"{name}.min_count", self.min_count, 2, MAX_PATTERN_COUNT)

    @property
    def enabled(self) -> bool:
        return self.max_pattern_size > 0


# The default for structured outputs, because a model that must follow a structure is more likely
# to repeat itself without end. The count is above 64, because a hash may be 64 zeros.
STRUCTURED_REPETITION = RepetitionDetectionParams(max_pattern_size=32, min_count=70)


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The texts around the reasoning that a reply may begin with."""

    opening: str
    closing: str
    is_open: bool = False  # The prompt has opened the reasoning.


class RequestOutputKind(Enum):
    """The kind of outputs of LLMEngine.step and AsyncLLM.generate. The names are vLLM's."""

    CUMULATIVE = 0  # the whole reply so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # nothing until the reply is complete


@accepts_vllm_fields(
    {
        "spaces_between_special_tokens": "",
        "skip_clone": "",
        "stream_interval": "",
        "output_text_buffer_length": "",
        "flat_logprobs": "logprobs are lists of dictionaries",
        "bad_words": "lower the logits of single tokens with logit_bias",
        "truncate_prompt_tokens": "shorten the prompt's token ids",
        "skip_reading_prefix_cache": "give the prompt a cache_salt of its own",
        "routed_experts_prompt_start": "Octavo has no mixture-of-experts models yet",
    }
)
@dataclass(slots=True)
class SamplingParams:
    """The rules for choosing tokens and for ending the text.

    The names and defaults are those of the same class in vLLM."""

    n: int = 1
    # sample this many and return the n best; for beam search, the beam width
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0, -1 or the size of the vocabulary: all
    min_p: float = 0.0
    # None or -1: derived from the engine's seed and the order of arrival
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to the context's end
    min_tokens: int = 0
    logprobs: int | None = None  # the chosen token's, and this many of the likeliest
    prompt_logprobs: int | None = None
    # report the logprobs of these tokens instead of those of the likeliest
    logprob_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None
    # None: STRUCTURED_REPETITION where there are structured_outputs, elsewhere nothing is detected
    repetition_detection: RepetitionDetectionParams | None = None
    # maximum tokens of the reasoning before the answer; the closing tag is then forced
    thinking_token_budget: int | None = None
    # How the reasoning is marked. A structure is then that of the answer alone. None: the whole
    # text is the answer.
    reasoning: ReasoningMarks | None = None
    # search for the likeliest texts instead of sampling (octavo/core/beam_search.py)
    use_beam_search: bool = False
    # beam search ranks texts by the sum of their logprobs / length ** length_penalty
    length_penalty: float = 1.0
    early_stopping: bool | str = False  # beam search: True, False or "never", as in transformers
    # Functions (output tokens, logits) -> logits, which LLM calls before each token. They may take
    # the prompt's tokens as a first argument.
    logits_processors: list[Any] | None = None
    extra_args: dict[str, Any] | None = None  # Logits processors of the engine read them.
    # The tokens of a known reply, which are generated instead of sampled ones.
    trace_decode_token_ids: list[int] | None = None
    # Only LLMEngine and AsyncLLM return outputs before a reply is complete.
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    guided_decoding: StructuredOutputs | None = None  # vLLM's older name of structured_outputs

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """Return the parameters that are not None. The others have their defaults."""
        return cls(**{name: value for name, value in fields.items() if value is not None})

    def clone(self) -> SamplingParams:
        return copy.deepcopy(self)

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every field and turn each into Python's own types."""
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise InvalidRequest(
                    "guided_decoding and structured_outputs mean the same: give one of them",
                    "guided_decoding",
                )
            self.structured_outputs = self.guided_decoding
            self.guided_decoding = None
        self._validate_numbers()
        self._validate_lengths()
        self._validate_stops()
        self._validate_tokens()
        self._validate_beams()

    def _validate_numbers(self) -> None:
        self.n = check_integer("n", self.n, 1, 128)
        if self.best_of is not None:
            self.best_of = check_integer("best_of", self.best_of, self.n, 128)
        self.presence_penalty = check_real("presence_penalty", self.presence_penalty, -2, 2)
        self.frequency_penalty = check_real("frequency_penalty", self.frequency_penalty, -2, 2)
        self.repetition_penalty = check_real(
            "repetition_penalty", self.repetition_penalty, 0, 100, open_low=True
        )
        self.temperature = check_real("temperature", self.temperature, 0, 100)
        self.top_p = check_real("top_p", self.top_p, 0, 1, open_low=True)
        self.top_k = check_integer("top_k", self.top_k, -1)
        self.min_p = check_real("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            self.seed = check_integer("seed", self.seed, -(2**63), 2**63 - 1)
            if self.seed == -1:
                self.seed = None

    def _validate_lengths(self) -> None:
        if self.max_tokens is not None:
            self.max_tokens = check_integer("max_tokens", self.max_tokens, 1)
        self.min_tokens = check_integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                "min_tokens",
                "param_out_of_range",
            )
        if self.thinking_token_budget is not None:
            name = "thinking_token_budget"
            self.thinking_token_budget = check_integer(name, self.thinking_token_budget, 0)
        if self.logprobs is not None:
            self.logprobs = check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = check_integer(
                "prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS
            )
        if self.logprob_token_ids is not None:
            ids = check_token_ids("logprob_token_ids", self.logprob_token_ids)
            if len(ids) > MAX_LOGPROB_IDS:
                raise InvalidRequest(
                    f"logprob_token_ids can have at most {MAX_LOGPROB_IDS} token ids, "
                    f"got {len(ids)}",
                    "logprob_token_ids",
                    "param_out_of_range",
                )
            self.logprob_token_ids = list(dict.fromkeys(ids)) or None
            if ids and self.logprobs is None:
                self.logprobs = 0

    def _validate_stops(self) -> None:
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
        if self.stop_token_ids is not None:
            self.stop_token_ids = check_token_ids("stop_token_ids", self.stop_token_ids)
        else:
            self.stop_token_ids = []

    def _validate_tokens(self) -> None:
        """Check the parameters that say which tokens may come."""
        if self.logit_bias is not None:
            self.logit_bias = check_logit_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = check_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids must not be empty", "allowed_token_ids")
            bias = self.logit_bias or {}
            if all(bias.get(token) == -MAX_BIAS for token in self.allowed_token_ids):
                raise InvalidRequest(
                    "logit_bias bans every token of allowed_token_ids with -100, so no token is "
                    "left: change one of the two",
                    "logit_bias",
                )
        if self.trace_decode_token_ids is not None:
            name = "trace_decode_token_ids"
            self.trace_decode_token_ids = check_token_ids(name, self.trace_decode_token_ids)
            if not self.trace_decode_token_ids or self.structured_outputs is not None:
                raise InvalidRequest(
                    f"{name} must have at least one token, and excludes structured_outputs", name
                )
            self.max_tokens = len(self.trace_decode_token_ids)
            self.ignore_eos = True
            self.stop_token_ids = []
        if any(not callable(function) for function in self.logits_processors or ()):
            raise InvalidRequest(
                "logits_processors must be a list of functions", "logits_processors"
            )
        if not isinstance(self.repetition_detection, RepetitionDetectionParams | None):
            raise InvalidRequest(
                "repetition_detection must be a RepetitionDetectionParams", "repetition_detection"
            )
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputs):
                raise InvalidRequest(
                    "structured_outputs must be a StructuredOutputsParams", "structured_outputs"
                )
            if self.allowed_token_ids is not None:
                raise InvalidRequest(
                    "allowed_token_ids and structured_outputs exclude each other, because both "
                    "decide which tokens are allowed: remove one of them",
                    "allowed_token_ids",
                )

    @property
    def guides_reasoning(self) -> bool:
        """Whether a guide must follow the reasoning: to bound it, or to find where it ends."""
        return self.reasoning is not None and (
            self.thinking_token_budget is not None or self.structured_outputs is not None
        )

    @property
    def repetition(self) -> RepetitionDetectionParams | None:
        """The rule that ends a text that repeats itself, or None."""
        detection = self.repetition_detection
        if detection is not None:
            return detection if detection.enabled else None
        return None if self.structured_outputs is None else STRUCTURED_REPETITION

    def _validate_beams(self) -> None:
        """Check the parameters of a beam search.

        It uses the model's own logprobs, so parameters that would change them are refused, and
        parameters of sampling have no effect."""
        self.length_penalty = check_real("length_penalty", self.length_penalty, -10, 10)
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
        check_integer("n" if self.best_of is None else "best_of", self.width, 1, MAX_BEAMS)
        changed = {
            "presence_penalty": self.presence_penalty != 0,
            "frequency_penalty": self.frequency_penalty != 0,
            "repetition_penalty": self.repetition_penalty != 1,
            "logit_bias": bool(self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids is not None,
            "logprob_token_ids": self.logprob_token_ids is not None,
            "structured_outputs": self.structured_outputs is not None,
            "thinking_token_budget": self.thinking_token_budget is not None,
            "repetition_detection": self.repetition is not None,
            "stop": bool(self.stop),
        }
        for name in (name for name, is_changed in changed.items() if is_changed):
            hint = ": use stop_token_ids" if name == "stop" else ": leave it out"
            raise InvalidRequest(
                f"{name} is not supported with beam search{hint}", name, "unsupported_parameter"
            )

    def check_min_tokens(self, stop_ids: frozenset[int]) -> None:
        """Raise InvalidRequest if min_tokens forbids every token that the request allows.

        `stop_ids` are the tokens that end the text, including those of the model."""
        allowed = self.allowed_token_ids
        if self.min_tokens and allowed is not None and stop_ids.issuperset(allowed):
            raise InvalidRequest(
                "allowed_token_ids are all stop tokens, which min_tokens forbids, so no token "
                "could be generated: allow another token or set min_tokens to 0",
                "min_tokens",
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequest if a token id is outside the vocabulary of the model."""
        for name in (
            "stop_token_ids",
            "logit_bias",
            "allowed_token_ids",
            "logprob_token_ids",
            "trace_decode_token_ids",
        ):
            for t in getattr(self, name) or ():
                if not 0 <= t < vocab_size:
                    raise InvalidRequest(
                        f"{name} names token {t}, but the {vocab_size} tokens of the vocabulary "
                        f"have ids 0..{vocab_size - 1}",
                        name,
                    )

    @property
    def width(self) -> int:
        """The number of sequences that are computed."""
        return self.best_of or self.n

    @property
    def completions(self) -> int:
        """The number of sequences that the engine reports: all samples, or the n best beams."""
        return self.n if self.use_beam_search else self.width

    @property
    def ranked(self) -> bool:
        """Whether the completions to return are chosen at the end, by their logprobs."""
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


# Fields of a generation_config.json that recommend how to sample, and SamplingParams' names for
# them.
RECOMMENDED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def recommended_sampling(generation_config: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a generation_config.json recommends, by SamplingParams' names. Raises
    InvalidRequest if one of them is out of range."""
    sampling = {
        name: generation_config[field]
        for field, name in RECOMMENDED.items()
        if generation_config.get(field) is not None
    }
    SamplingParams(**sampling)
    return sampling


@dataclass(slots=True)
class BeamSearchParams:
    """The parameters of LLM.beam_search.

    The names and defaults are those of the same class in vLLM, which has no early_stopping."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # accepted without effect: beam search does not sample
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False  # the token that ends a text is among its tokens
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        check_integer("beam_width", self.beam_width, 1, MAX_BEAMS)
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
