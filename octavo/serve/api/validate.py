"""Validates all fields of a request except the prompt, which prompt.py validates.

A request that passes can run. Cheap checks come first, so that most invalid requests are refused
before their text is tokenised. The engine validates requests again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from octavo.core.policy import ignores_priority
from octavo.errors import ContextLengthExceeded, KVCapacityExceeded
from octavo.params import RepetitionDetectionParams, SamplingParams
from octavo.serve.api import structured_output
from octavo.serve.api.api_errors import ApiError, invalid_field, prompt_too_long, unsupported
from octavo.serve.api.protocol import (
    Common,
    RepetitionDetection,
)
from octavo.serve.api.request_fields import FIELDS, IGNORED, REFUSED, Field
from octavo.serve.channel.messages import Loaded
from octavo.serve.limits import Limits
from octavo.text.detokenize import EndCheck
from octavo.types import Request

if TYPE_CHECKING:
    from octavo.serve.front.front import Caller, Front

MAX_INTEGER = 2**63 - 1  # The largest integer that a client can send.
# This stands for as many tokens as fit.
UNBOUNDED = MAX_INTEGER + 1
# These fields have no effect in a beam search.
RANDOM_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed")
LABEL = re.compile(r"[A-Za-z0-9._-]+")
# Fields with the same name and meaning as in SamplingParams.
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "skip_special_tokens",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
)
_sampling = attrgetter(*SAMPLING_FIELDS)


@dataclass
class CheckedRequest:
    """A request that is validated except for its prompt."""

    params: SamplingParams
    max_tokens: int | None  # The largest number of tokens in the reply, or None.
    timeout: float | None  # seconds
    headers: dict[str, str]  # The headers of the reply.


@dataclass
class Prepared:
    """A request that can run."""

    requests: list[Request]
    texts: list[str | None]  # The texts of the prompts, or None for token ids.
    timeout: float | None  # seconds
    headers: dict[str, str] = field(default_factory=dict)  # The headers of the reply.
    structure_field: str | None = None  # The field that contains the spec of structured output.
    make_end_check: Callable[[], EndCheck] | None = None  # It ends a reply by its content.


# ---- checks before the prompt --------------------------------------------------------------------


def check_model(front: Front, name: str | None) -> None:
    names = front.config.names
    if name is not None and name not in names:
        served = " or ".join(map(repr, names))
        raise ApiError(
            404,
            f"this server does not serve the model {name[:100]!r}: use {served}",
            "model_not_found",
            "model",
        )


def check_fields(
    front: Front,
    unknown: Mapping[str, Any],
    chat: bool | None = None,
    table: Mapping[str, Field] = FIELDS,
) -> dict[str, str]:
    """Handle fields that the route does not have. Returns a header that names ignored fields.

    Raises ApiError for a field that would change the reply. `chat` is true on routes for chats,
    false on routes for prompts, and None on routes that generate nothing. `table` has the fields
    of the API.
    """
    ignored: list[str] = []
    for name, value in unknown.items():
        field = table.get(name)
        if field is None and front.config.strict_params:
            raise unsupported(name[:64], "this server refuses unknown parameters (--strict-params)")
        if field is not None and chat is not None:
            if value in field.neutral:
                continue
            status = field.chat if chat else field.completion
            if status != IGNORED:
                raise unsupported(name, _refusal_reason(field))
        ignored.append(name)
    if not ignored:
        return {}
    front.metrics.ignored.inc()
    header_names = [name for name in ignored if LABEL.fullmatch(name)][:20]
    return {"x-ignored-params": ", ".join(name[:64] for name in header_names) or "(not shown)"}


def _refusal_reason(field: Field) -> str:
    """Explain why a route refuses a field."""
    if field.chat == field.completion == REFUSED:
        return field.note
    chat_route, completion_route = field.routes
    if field.chat == REFUSED or field.completion == REFUSED:
        other_route = completion_route if field.chat == REFUSED else chat_route
        return f"this route does not accept it, but {other_route} does ({field.note})"
    return f"this route does not accept it, but {completion_route} does"


def sampling(front: Front, body: Common) -> SamplingParams:
    """Return the sampling parameters of a request, except the length of the reply.

    The model's recommendation (generation_config.json) applies to fields that the request does not
    set. SamplingParams checks the ranges of all fields that the API does not restrict further.
    """
    limits = front.config.limits
    values = {
        name: value
        for name, value in zip(SAMPLING_FIELDS, _sampling(body), strict=True)
        if value is not None
    }
    structure_field = structured_output.field(body)
    if body.use_beam_search and structure_field is not None:
        raise unsupported(structure_field, "beam search does not support structured output")
    stop_strings = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stop_strings) > limits.stops:
        raise invalid_field(
            "stop",
            f"stop can have at most {limits.stops} strings, got {len(stop_strings)}",
            "param_out_of_range",
        )
    if isinstance(body.stop, list) and not body.stop:
        values.pop("stop")
    for stop_string in stop_strings:
        if not stop_string or len(stop_string) > limits.stop_chars or "\0" in stop_string:
            raise invalid_field(
                "stop", f"a stop string must have 1 to {limits.stop_chars} characters and no NUL"
            )
    if not 0 <= (temperature := values.get("temperature", 1.0)) <= 2:
        raise invalid_field(
            "temperature", f"temperature must be in [0, 2], got {temperature}", "param_out_of_range"
        )
    if values.get("top_p") == 0:
        values["top_p"] = 1e-9  # This keeps only the most likely token.
    for name in ("stop_token_ids", "allowed_token_ids"):
        if len(values.get(name, ())) > limits.token_ids:
            raise invalid_field(
                name, f"{name} can have at most {limits.token_ids} items", "param_out_of_range"
            )
    if body.logit_bias is not None:
        if len(body.logit_bias) > limits.logit_bias:
            raise invalid_field(
                "logit_bias",
                f"logit_bias can have at most {limits.logit_bias} entries",
                "param_out_of_range",
            )
        values["logit_bias"] = body.logit_bias
    if body.repetition_detection is not None:
        values["repetition_detection"] = repetition_detection(body.repetition_detection)
    # A beam search does not sample, so the recommended parameters do not apply.
    defaults = {} if body.use_beam_search else front.engine_client.model.sampling
    return SamplingParams(
        **{**defaults, **values, "max_tokens": None},
        structured_outputs=structured_output.read(body, limits),
    )


def repetition_detection(fields: RepetitionDetection) -> RepetitionDetectionParams:
    return RepetitionDetectionParams(
        max_pattern_size=fields.max_pattern_size or 0,
        min_pattern_size=fields.min_pattern_size or 0,
        min_count=fields.min_count or 0,
    )


def check_common(front: Front, caller: Caller, body: Common) -> float | None:
    """Check the fields that do not concern sampling. Returns the timeout in seconds, or None."""
    limits = front.config.limits
    check_model(front, body.model)
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= limits.salt_chars:
        raise invalid_field(
            "cache_salt",
            f"cache_salt must have 1 to {limits.salt_chars} characters",
            "param_out_of_range",
        )
    if body.priority is not None and not -(2**31) <= body.priority < 2**31:
        raise invalid_field("priority", "priority must be a 32-bit integer", "param_out_of_range")
    if caller.key is not None and (body.priority or 0) < 0:
        raise invalid_field(
            "priority",
            "with an API key, priority must be 0 or more, because only the operator of the server "
            "may raise the priority of a key",
            "param_out_of_range",
        )
    if body.request_id is not None and not (
        len(body.request_id) <= limits.label_chars and LABEL.fullmatch(body.request_id)
    ):
        raise invalid_field(
            "request_id",
            f"request_id must have 1 to {limits.label_chars} characters of A-Z a-z 0-9 . _ -",
        )
    timeout = caller.timeout if body.timeout is None else body.timeout
    if timeout is not None and not (
        math.isfinite(timeout) and 0 < timeout <= limits.timeout_seconds
    ):
        raise invalid_field(
            "timeout",
            f"timeout must be in (0, {limits.timeout_seconds:g}] seconds",
            "param_out_of_range",
        )
    return timeout


def check_count(name: str, value: int, minimum: int, maximum: int = MAX_INTEGER) -> int:
    """Return the value if it is in [minimum, maximum].

    The error mentions the default maximum only if the value exceeds it.
    """
    if not minimum <= value <= maximum:
        requirement = f"in [{minimum}, {maximum}]"
        if maximum == MAX_INTEGER and value < minimum:
            requirement = f"at least {minimum}"
        raise invalid_field(
            name, f"{name} must be {requirement}, got {value}", "param_out_of_range"
        )
    return value


def reply_length(body: Common, names: tuple[str, ...], minimum: int = 1) -> int | None:
    """Return the smallest limit on the length of the reply that the request sets.

    Returns UNBOUNDED if the only value is -1, and None if the request sets no limit.
    """
    values = {name: getattr(body, name) for name in names}
    limits = {name: value for name, value in values.items() if value is not None}
    if not limits:
        return None
    bounds = [check_count(name, value, minimum) for name, value in limits.items() if value != -1]
    return min(bounds, default=UNBOUNDED)


def choices(
    body: Common,
    params: SamplingParams,
    n: int,
    prompts: int,
    stream: bool,
    limits: Limits,
    headers: dict[str, str],
) -> SamplingParams:
    """Check the numbers of computed sequences and of returned choices. Returns the parameters."""
    check_count("n", n, 1, limits.n)
    best_of = body.best_of or None  # The value 0 is valid in the OpenAI API.
    if best_of is not None:
        maximum = limits.beams if params.use_beam_search else max(limits.best_of, n)
        check_count("best_of", best_of, minimum=n, maximum=maximum)
    if n != 1 or best_of is not None:  # A copy is validated again, which is slow.
        params = replace(params, n=n, best_of=best_of)
    name = "use_beam_search" if params.use_beam_search else "best_of"
    if params.ranked and stream:
        raise unsupported(
            name, "it cannot be streamed, because the best text is known only at the end"
        )
    if params.use_beam_search:
        unused = [name for name in RANDOM_SAMPLING_FIELDS if getattr(body, name) is not None]
        ignore(headers, *unused)
    elif params.width > 1 and params.greedy:
        name = "n" if n > 1 else "best_of"
        raise invalid_field(
            name,
            f"{name} must be 1 at temperature 0: all choices would be the same",
            "param_out_of_range",
        )
    if params.width * prompts > limits.sequences:
        number = params.width * prompts
        message = f"n (or best_of) x prompts can be at most {limits.sequences}, got {number}"
        raise invalid_field("n", message, "param_out_of_range")
    return params


def ignore(headers: dict[str, str], *names: str) -> None:
    """Add fields without effect to the header x-ignored-params of the reply."""
    if names:
        headers["x-ignored-params"] = ", ".join(
            filter(None, (headers.get("x-ignored-params"), *names))
        )


# ---- room for the reply --------------------------------------------------------------------------


def fit(
    prompt: list[int], max_tokens: int | None, model: Loaded, param: str, headers: dict[str, str]
) -> int:
    """Return how many tokens may be generated.

    This is the requested number, limited by the free space in the context and in the KV pool. A
    request for an embedding asks for 0, and its prompt may fill the context.
    """
    count = len(prompt)
    min_reply = 0 if max_tokens == 0 else 1
    if count + min_reply > model.max_model_len:
        raise prompt_too_long(count, model.max_model_len, param)
    if count + min_reply > model.longest_sequence:
        pool = model.num_blocks * model.block_size
        message = f"the prompt has {count} tokens, but the KV pool holds {pool}: shorten it"
        raise invalid_field(param, str(KVCapacityExceeded(message)), "kv_capacity_exceeded")
    if model.kv_budget and count > model.kv_budget:
        error = ContextLengthExceeded(
            f"the prompt has {count} tokens, but a sequence keeps {model.kv_budget}: shorten it"
        )
        raise invalid_field(param, str(error), error.code)
    room = model.longest_sequence - count
    is_limited_by_pool = model.longest_sequence < model.max_model_len and not model.kv_budget
    if is_limited_by_pool and (max_tokens is None or max_tokens > room):
        headers["x-max-tokens"] = str(room)
        headers["x-max-tokens-limit"] = "kv_pool"
    if model.kv_budget and max_tokens is not None and max_tokens < UNBOUNDED:
        return max_tokens
    if max_tokens is not None and room < max_tokens < UNBOUNDED:
        headers["x-max-tokens"] = str(room)
    return min(max_tokens, room) if max_tokens is not None else room


def build(
    front: Front,
    caller: Caller,
    body: Common,
    prompts: list[tuple[str | None, list[int]]],
    checked: CheckedRequest,
    param: str = "prompt",
) -> Prepared:
    """Return the requests for the engine. Each may generate as many tokens as its prompt leaves.

    `param` is the field that contains the prompt.
    """
    model = front.engine_client.model
    params = checked.params
    headers = checked.headers
    params.check_vocabulary(model.vocab_size)
    eos_ids = () if params.ignore_eos else model.eos_ids
    params.check_min_tokens(frozenset([*(params.stop_token_ids or ()), *eos_ids]))
    if body.priority is not None and ignores_priority(front.config.engine.scheduling_policy):
        ignore(headers, "priority")
    salt = f"{caller.salt}/{body.cache_salt or ''}" if caller.salt or body.cache_salt else ""
    # A key with a higher number is served first. A request with a lower number is served first, as
    # in vLLM.
    priority = min(max((body.priority or 0) - caller.key_priority, -(2**31)), 2**31 - 1)
    deadline = None if checked.timeout is None else caller.arrival + checked.timeout
    requests: list[Request] = []
    for _, ids in prompts:
        room = fit(ids, checked.max_tokens, model, param, headers)
        if params.min_tokens > room:
            raise invalid_field(
                "min_tokens",
                f"min_tokens ({params.min_tokens}) must not exceed max_tokens ({room})",
                "param_out_of_range",
            )
        max_tokens = max(room, 1)
        if requests and max_tokens != params.max_tokens:
            # Prompts of different lengths leave different room, so they cannot share parameters.
            params = replace(params, max_tokens=max_tokens)
        params.max_tokens = max_tokens
        requests.append(
            Request(
                id="",
                prompt=ids,
                params=params,
                arrival=caller.arrival,
                cache_salt=salt,
                priority=priority,
                deadline=deadline,
                tenant=caller.owner,
            )
        )
    _check_prompt_logprobs(front, params, requests)
    texts = [text for text, _ in prompts]
    return Prepared(requests, texts, checked.timeout, headers, structured_output.field(body))


def _check_prompt_logprobs(front: Front, params: SamplingParams, requests: list[Request]) -> None:
    if params.prompt_logprobs is None:
        return
    prompt_tokens = sum(len(request.prompt) for request in requests)
    entries = prompt_tokens * (params.prompt_logprobs + 1)
    max_entries = front.config.limits.logprob_entries
    if entries > max_entries:
        raise invalid_field(
            "prompt_logprobs",
            f"the reply would have {entries} prompt logprobs, but at most {max_entries} are "
            "allowed: request fewer, or send a shorter prompt",
            "param_out_of_range",
        )
