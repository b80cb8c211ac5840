"""The one place where a request is judged, whatever transport brought it: what comes out can run.

Order: cheap checks first, text last; everything that can be refused without the tokenizer is. The engine checks again.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from octavo.collect import Until
from octavo.errors import ContextLengthExceeded, KVCapacityExceeded
from octavo.params import RepetitionDetectionParams, SamplingParams
from octavo.serve import structure
from octavo.serve.errors import ApiError, bad, prompt_too_long, unsupported
from octavo.serve.jobs import Encode, EncodeChat, Tokens
from octavo.serve.limits import Limits
from octavo.serve.messages import Loaded
from octavo.serve.protocol import (
    UNSUPPORTED,
    ChatRequest,
    Common,
    CompletionRequest,
    RepetitionDetection,
)
from octavo.text.chat import check_options, select_template
from octavo.text.tokenizer import Tokenizer
from octavo.types import Request

if TYPE_CHECKING:
    from octavo.serve.front import Caller, Front
    from octavo.serve.tools import ToolUse

LENGTHS = ("max_tokens", "max_new_tokens", "max_completion_tokens")  # as APIs call it
# What other routes take: the value that asks for nothing, and where to go.
ELSEWHERE: dict[str, tuple[Any, str]] = {
    "messages": (None, "/v1/chat/completions takes messages"),
    "prompt": (
        None,
        "/v1/completions and /generate take a prompt, /v1/chat/completions messages, /batch_generate prompts",
    ),
    "stream": (
        False,
        "this route replies at once; /v1/completions, /v1/chat/completions and /ws/generate stream",
    ),
    "n": (1, "this route gives one text for a prompt; /v1/completions gives several"),
}
DRAWING = ("temperature", "top_p", "top_k", "min_p", "seed")  # of no effect where nothing is drawn
LABEL = re.compile(r"[A-Za-z0-9._-]+")
# Fields whose names and meanings are SamplingParams' own.
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids", "skip_special_tokens",
    "use_beam_search", "length_penalty", "early_stopping",
)  # fmt: skip
_sampling = attrgetter(*SAMPLING)


@dataclass
class Prepared:
    """A request that can run."""

    requests: list[Request]
    texts: list[str | None]
    timeout: float | None
    # what the client should know of how it was read
    headers: dict[str, str] = field(default_factory=dict)
    structure: str | None = None  # the field that says what the text must match
    until: Until | None = None  # what else ends a text


# ---- before the prompt ----------------------------------------------------------------------------------


def check_model(front: Front, name: str | None) -> None:
    if name is not None and name != front.config.name:
        raise ApiError(404, f"there is no model {name[:100]!r} here: this server has {front.config.name!r}", "model_not_found",
                       "model")  # fmt: skip


def check_fields(
    front: Front, unknown: Mapping[str, Any], body: Any = None, length: str = ""
) -> dict[str, str]:
    """Fields that are not in the schema: refused if they would change the reply, else named in a header. `length`: where text is
    generated, the field of the body that bounds it."""
    if length:
        if getattr(body, length) is None and (
            other := next((name for name in LENGTHS if name in unknown), None)
        ):
            raise unsupported(other, f"it is called {length} here")
        for name, (nothing, instead) in ELSEWHERE.items():
            if unknown.get(name, nothing) != nothing:
                raise unsupported(name, instead)
    for name, given in unknown.items():
        if name in UNSUPPORTED and given not in UNSUPPORTED[name]:
            raise unsupported(name, "leave it out")
    ignored = [name for name in unknown if name not in UNSUPPORTED]
    if ignored and front.config.strict_params:
        raise unsupported(
            ignored[0][:64], "this server refuses what it does not know (--strict-params)"
        )
    if not ignored:
        return {}
    front.metrics.ignored.inc()
    shown = [name for name in ignored if LABEL.fullmatch(name)][:20]
    return {"x-ignored-params": ", ".join(n[:64] for n in shown) or "(not shown)"}


def sampling(front: Front, body: Common) -> SamplingParams:
    """The parameters of a request, all but the length. The model's recommendation (generation_config.json) applies to fields
    that the request leaves out. Ranges are SamplingParams' own where the API has no narrower ones."""
    limits = front.config.limits
    given = {
        name: value
        for name, value in zip(SAMPLING, _sampling(body), strict=True)
        if value is not None
    }
    if body.use_beam_search and (name := structure.field(body)) is not None:
        raise unsupported(name, "beam search follows no structure")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > limits.stops:
        raise bad(
            "stop",
            f"stop may have at most {limits.stops} strings, got {len(stops)}",
            "param_out_of_range",
        )
    if isinstance(body.stop, list) and not body.stop:
        given.pop("stop")
    for stop in stops:
        if not stop or len(stop) > limits.stop_chars or "\0" in stop:
            raise bad("stop", f"a stop string has 1 to {limits.stop_chars} characters, and no NUL")
    if not 0 <= (temperature := given.get("temperature", 1.0)) <= 2:
        raise bad(
            "temperature", f"temperature must be in [0, 2], got {temperature}", "param_out_of_range"
        )
    if given.get("top_p") == 0:
        given["top_p"] = 1e-9  # the likeliest alone
    for name in ("stop_token_ids", "allowed_token_ids"):
        if len(given.get(name, ())) > (most := limits.token_ids):
            raise bad(name, f"{name} may have at most {most} entries", "param_out_of_range")
    if body.logit_bias is not None:
        if len(body.logit_bias) > limits.logit_bias:
            raise bad(
                "logit_bias",
                f"logit_bias may have at most {limits.logit_bias} entries",
                "param_out_of_range",
            )
        given["logit_bias"] = body.logit_bias
    if body.repetition_detection is not None:
        given["repetition_detection"] = repetition_detection(body.repetition_detection)
    # a beam search draws nothing
    defaults = {} if body.use_beam_search else front.client.model.sampling
    return SamplingParams(
        **{**defaults, **given, "max_tokens": None},
        structured_outputs=structure.read(body, limits),
    )


def repetition_detection(asked: RepetitionDetection) -> RepetitionDetectionParams:
    return RepetitionDetectionParams(
        max_pattern_size=asked.max_pattern_size or 0,
        min_pattern_size=asked.min_pattern_size or 0,
        min_count=asked.min_count or 0,
    )


def check_common(front: Front, caller: Caller, body: Common) -> float | None:
    """What has nothing to do with sampling. Returns the seconds that the request may take."""
    limits = front.config.limits
    check_model(front, body.model)
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= limits.salt_chars:
        raise bad(
            "cache_salt",
            f"cache_salt has 1 to {limits.salt_chars} characters",
            "param_out_of_range",
        )
    if body.priority is not None and not -(2**31) <= body.priority < 2**31:
        raise bad("priority", "priority must be a 32-bit integer", "param_out_of_range")
    if caller.key is not None and (body.priority or 0) < 0:
        raise bad("priority", "with an API key, priority may only be 0 or more, which comes later: who comes sooner is the key's "
                  "priority, which the server's operator sets", "param_out_of_range")  # fmt: skip
    if body.request_id is not None and not (
        len(body.request_id) <= limits.label_chars and LABEL.fullmatch(body.request_id)
    ):
        raise bad(
            "request_id",
            f"request_id has 1 to {limits.label_chars} characters of A-Z a-z 0-9 . _ -",
        )
    timeout = caller.timeout if body.timeout is None else body.timeout
    if timeout is not None and not (
        math.isfinite(timeout) and 0 < timeout <= limits.timeout_seconds
    ):
        raise bad(
            "timeout",
            f"timeout must be in (0, {limits.timeout_seconds:g}] seconds",
            "param_out_of_range",
        )
    return timeout


def check_count(name: str, value: int, least: int, most: int = 2**63 - 1) -> int:
    """Where nothing else bounds it: what 64 bits hold, which nobody wants to read when it is not the question."""
    if not least <= value <= most:
        wanted = (
            f"at least {least}" if most == 2**63 - 1 and value < least else f"in [{least}, {most}]"
        )
        raise bad(name, f"{name} must be {wanted}, got {value}", "param_out_of_range")
    return value


def choices(
    body: Common,
    params: SamplingParams,
    n: int,
    prompts: int,
    stream: bool,
    limits: Limits,
    headers: dict[str, str],
) -> SamplingParams:
    """How many sequences a prompt takes, and how many of them are the reply."""
    check_count("n", n, 1, limits.n)
    best_of = body.best_of or None  # OpenAI's may be 0
    if best_of is not None:
        check_count(
            "best_of",
            best_of,
            n,
            limits.beams if params.use_beam_search else max(limits.best_of, n),
        )
    if n != 1 or best_of is not None:  # making them anew takes a while, for all is checked again
        params = replace(params, n=n, best_of=best_of)
    name = "use_beam_search" if params.use_beam_search else "best_of"
    if params.ranked and stream:
        raise unsupported(name, "it cannot be streamed, for which is best is known at the end")
    if params.use_beam_search:
        ignore(headers, *(name for name in DRAWING if getattr(body, name) is not None))
    elif params.width > 1 and params.greedy:
        name = "n" if n > 1 else "best_of"
        raise bad(
            name,
            f"{name} must be 1 at temperature 0: all choices would be the same",
            "param_out_of_range",
        )
    if params.width * prompts > limits.sequences:
        what = f"n (or best_of) x prompts may be at most {limits.sequences}, got {params.width * prompts}"
        raise bad("n", what, "param_out_of_range")
    return params


def ignore(headers: dict[str, str], *names: str) -> None:
    """Tell the client of fields without effect."""
    if names:
        headers["x-ignored-params"] = ", ".join(
            filter(None, (headers.get("x-ignored-params"), *names))
        )


def check_messages(messages: list[dict[str, Any]] | None, limits: Limits) -> list[dict[str, Any]]:
    """Counts alone: what a message must be is the template's business (octavo.text.chat)."""
    if not messages:
        raise bad("messages", "messages must have at least one message")
    if len(messages) > limits.messages:
        raise bad(
            "messages",
            f"there may be at most {limits.messages} messages, got {len(messages)}",
            "param_out_of_range",
        )
    parts = sum(len(m["content"]) for m in messages if isinstance(m.get("content"), list))
    if parts > limits.parts:
        raise bad(
            "messages",
            f"there may be at most {limits.parts} parts in all messages, got {parts}",
            "param_out_of_range",
        )
    return messages


# ---- the prompt -----------------------------------------------------------------------------------------


def check_template(front: Front, body: ChatRequest) -> None:
    if body.chat_template is not None and not front.config.request_templates:
        raise ApiError(
            403,
            "this server takes no chat templates from requests: start it with --trust-request-chat-template",
            "template_not_allowed",
            "chat_template",
        )
    if len(body.chat_template or "") > (most := front.config.limits.template_chars):
        raise bad(
            "chat_template",
            f"chat_template may have at most {most} characters, got {len(body.chat_template or '')}",
            "param_out_of_range",
        )
    if body.chat_template is None and not front.tokenizer.chat_templates:
        raise bad(
            "messages",
            "this model has no chat template: use /v1/completions, which takes a plain prompt, or start the server with "
            "--chat-template FILE",
        )


def longest(front: Front, truncated: int | None) -> int:
    """Tokens that a prompt may have before it is looked at: of one that is to be truncated any number."""
    return front.client.model.max_model_len if truncated is None else sys.maxsize


def check_template_options(front: Front, body: ChatRequest, headers: dict[str, str]) -> None:
    """Refuse chat_template_kwargs that would replace what the request sets, and name in a header
    those that the server's template does not use. A template that came with the request is not
    looked at: it runs in a worker process alone."""
    options = body.chat_template_kwargs
    if not options:
        return
    check_options(options, front.tokenizer.specials)
    if body.chat_template is not None or not front.tokenizer.chat_templates:
        return
    unused = select_template(front.tokenizer, tools=bool(body.tools)).unused(options)
    names = [f"chat_template_kwargs.{name[:64]}" for name in unused if LABEL.fullmatch(name)]
    if unused and front.config.strict_params:
        raise unsupported(
            names[0] if names else "chat_template_kwargs",
            "the chat template does not use it, and this server refuses what it does not know "
            "(--strict-params)",
        )
    ignore(headers, *names[:20])


def check_size(tokenizer: Tokenizer, size: int, context: int, param: str) -> None:
    """Refuse a text of so many characters that it must have more tokens than the context."""
    least = size // (4 * tokenizer.longest_token)
    if least >= context:
        raise prompt_too_long(f"at least {least}", context, param)


def chat_size(messages: list[dict[str, Any]]) -> int:
    """Characters in the contents of messages."""
    size = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            size += len(content)
        elif isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, dict)]
            size += sum(len(text) for text in parts if isinstance(text, str))
    return size


def chat_job(front: Front, body: ChatRequest, tools: ToolUse | None, context: int) -> EncodeChat:
    """The conversation, ready to be tokenised. `context`: tokens that it may have."""
    check_truncation(body.truncate_prompt_tokens)
    messages = check_messages(body.messages, front.config.limits)
    check_template(front, body)
    most = longest(front, body.truncate_prompt_tokens)
    check_size(front.tokenizer, chat_size(messages), most, "messages")
    own = {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": bool(body.continue_final_message),
    }
    return EncodeChat(
        messages=messages,
        tools=tools.tools if tools else None,
        template=body.chat_template,
        options={**(body.chat_template_kwargs or {}), **own},
        context=context,
        keep=body.truncate_prompt_tokens,
    )


def parse_special(front: Front, asked: bool | None) -> bool:
    """Whether control tokens that a text prompt spells out are tokens, or else characters."""
    if asked and not front.config.parse_special:
        raise ApiError(
            403,
            "this server reads control tokens in prompts as plain characters (--no-parse-special): leave parse_special out",
            "parse_special_not_allowed",
            "parse_special",
        )
    return front.config.parse_special if asked is None else asked


async def completion_prompts(
    front: Front, body: CompletionRequest, headers: dict[str, str]
) -> list[tuple[str | None, list[int]]]:
    """(text, tokens) of each prompt, in any of the four forms. No text where the prompt was truncated."""
    most = body.truncate_prompt_tokens
    check_truncation(most)
    many = prompt_list(body.prompt, front.config.limits)
    texts = [one for one in many if isinstance(one, str)]
    for text in texts:
        check_size(front.tokenizer, len(text), longest(front, most), "prompt")
    job = Encode(
        texts,
        context=longest(front, most),
        keep=most,
        add_special_tokens=body.add_special_tokens is not False,
        parse_special=parse_special(front, body.parse_special),
    )
    encoded = iter(await front.text.encode(front.tokenizer, job) if texts else ())
    found: list[tuple[str | None, list[int]]] = []
    for one in many:
        if isinstance(one, str):
            tokens = next(encoded)
            kept = truncate(tokens, most, headers)
            whole = len(kept) == tokens.total
            found.append((one if whole else None, front.tokenizer.as_prompt(kept)))
            continue
        if isinstance(one, bytes):  # a worker process has checked them
            ids = await front.text.unpack(one)
        elif isinstance(one, list):
            ids = check_ids(one, front.client.model.vocab_size, "prompt")
        else:
            raise bad("prompt", "prompts must be texts or lists of token ids")
        found.append((None, truncate(Tokens(ids, len(ids)), most, headers)))
    return found


def prompt_list(prompt: str | list[Any] | None, limits: Limits) -> list[Any]:
    """The prompts, one or many."""
    if prompt is None or prompt == []:
        raise bad(
            "prompt",
            "prompt must be a text, a list of texts, token ids, or a list of lists of token ids",
        )
    many = [prompt] if isinstance(prompt, str) or type(prompt[0]) in (int, float, bool) else prompt
    if len(many) > limits.prompts:
        raise bad(
            "prompt",
            f"there may be at most {limits.prompts} prompts, got {len(many)}",
            "param_out_of_range",
        )
    return many


def check_ids(ids: list[Any], vocab_size: int, param: str) -> list[int]:
    if not ids:
        raise bad(param, "a list of token ids must not be empty")
    if any(type(t) is not int for t in ids):
        raise bad(param, "token ids are integers")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(t for t in ids if not 0 <= t < vocab_size)
        raise bad(param, f"token ids are in 0..{vocab_size - 1}, got {wrong}")
    return ids


def check_truncation(most: int | None) -> None:
    if most is not None and most < 1:
        raise bad(
            "truncate_prompt_tokens",
            "truncate_prompt_tokens must be at least 1",
            "param_out_of_range",
        )


def truncate(tokens: Tokens, most: int | None, headers: dict[str, str]) -> list[int]:
    """The last `most` tokens, where that was asked for. A header tells how many were cut off."""
    if most is None:
        return tokens.ids
    if tokens.total > most:
        headers["x-truncated-tokens"] = str(tokens.total - most)
    return tokens.ids[-most:]


def fit(
    prompt: list[int], wanted: int | None, model: Loaded, param: str, headers: dict[str, str]
) -> int:
    """How many tokens may be generated: what was asked for, or what the context and the pool leave."""
    count = len(prompt)
    if count >= model.max_model_len:
        raise prompt_too_long(count, model.max_model_len, param)
    if count >= model.longest:
        pool = model.num_blocks * model.block_size
        raise bad(param, str(KVCapacityExceeded(f"the prompt has {count} tokens, but the KV pool holds {pool}: shorten it")),
                  "kv_capacity_exceeded")  # fmt: skip
    if model.kv_budget and count > model.kv_budget:
        error = ContextLengthExceeded(
            f"the prompt has {count} tokens, but a sequence keeps {model.kv_budget}: shorten it"
        )
        raise bad(param, str(error), error.code)
    room = model.longest - count
    by_pool = model.longest < model.max_model_len and not model.kv_budget
    if by_pool and (wanted is None or wanted > room):
        headers["x-max-tokens"] = str(room)
        headers["x-max-tokens-limit"] = "kv_pool"
    if model.kv_budget and wanted is not None:
        return wanted
    if wanted is not None and wanted > room:
        headers["x-max-tokens"] = str(room)
    return min(wanted, room) if wanted is not None else room


def build(
    front: Front,
    caller: Caller,
    body: Common,
    prompts: list[tuple[str | None, list[int]]],
    params: SamplingParams,
    max_tokens: int | None,
    timeout: float | None,
    headers: dict[str, str],
    param: str = "prompt",
) -> Prepared:
    """Requests for the engine, each with as much room as its prompt leaves."""
    model = front.client.model
    params.check_vocabulary(model.vocab_size)
    if body.priority is not None and front.config.engine.get("scheduling_policy", "fcfs") == "fcfs":
        ignore(headers, "priority")
    salt = f"{caller.salt}/{body.cache_salt or ''}" if caller.salt or body.cache_salt else ""
    # A key's is the higher the sooner; a request's the lower, as in vLLM.
    priority = min(max((body.priority or 0) - caller.priority, -(2**31)), 2**31 - 1)
    requests: list[Request] = []
    for _, ids in prompts:
        room = fit(ids, max_tokens, model, param, headers)
        if params.min_tokens > room:
            raise bad(
                "min_tokens",
                f"min_tokens ({params.min_tokens}) must not exceed max_tokens ({room})",
                "param_out_of_range",
            )
        if requests and room != params.max_tokens:  # of several prompts, each may have another
            params = replace(params, max_tokens=room)
        params.max_tokens = room
        requests.append(
            Request(
                "",
                ids,
                params,
                caller.arrival,
                salt,
                priority=priority,
                deadline=None if timeout is None else caller.arrival + timeout,
                tenant=caller.owner,
            )
        )
    if params.prompt_logprobs is not None:
        entries = sum(len(r.prompt) for r in requests) * (params.prompt_logprobs + 1)
        if entries > front.config.limits.logprob_entries:
            raise bad(
                "prompt_logprobs",
                "so many prompt logprobs are too large a reply",
                "param_out_of_range",
            )
    return Prepared(
        requests, [text for text, _ in prompts], timeout, headers, structure.field(body)
    )
