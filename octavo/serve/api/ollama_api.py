"""Ollama's API: requests become chat requests, and replies become lines of JSON.

The sampling parameters are in `options`, under Ollama's names. Ollama streams by default. Calls of
tools have arguments that are objects, so a stream sends each call when it is complete.
"""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from typing import Any

import msgspec

from octavo.collect import Collector
from octavo.outputs import CompletionOutput
from octavo.serve.api.api_errors import ApiError, invalid_field, unsupported
from octavo.serve.api.parse import convert
from octavo.serve.api.prompt import check_messages
from octavo.serve.api.protocol import (
    ChatRequest,
    CompletionRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaRequest,
)
from octavo.serve.api.replies import Shape
from octavo.serve.api.reply_writer import (
    Delta,
    Part,
    ReasoningDelta,
    ReplyParser,
    arguments_object,
)
from octavo.serve.api.request_fields import FIELDS, REFUSED
from octavo.serve.api.translation import FieldNames, Translation, common_fields, member
from octavo.serve.channel.messages import Loaded
from octavo.serve.limits import Limits
from octavo.text.tokenizer import Tokenizer
from octavo.text.tool_calls import CallDelta

SECOND = 1_000_000_000  # Ollama counts nanoseconds.
# The options with an effect -> the fields of a chat request.
OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
NAMES = {
    rf"{ours}(?= (?:must|can|has|is)\b|$)": f"options.{name}" for name, ours in OPTIONS.items()
}
NAMES |= {
    r"chat_template_kwargs\.enable_thinking": "think",
    "reasoning_effort": "think",
    "response_format": "format",
    "json_schema": "format",
}

# ---- requests ------------------------------------------------------------------------------------


def chat_to_chat(body: OllamaChatRequest, names: tuple[str, ...], limits: Limits) -> Translation:
    listed = check_messages(body.messages, limits) if body.messages else []
    messages = [message(given, f"messages.{i}") for i, given in enumerate(listed)]
    places = [f"messages.{i}" for i in range(len(messages))]
    given, ignored = shared_fields(body, names)
    chat = ChatRequest(
        **given,
        **thinking(body.think),
        messages=messages,
        tools=body.tools or None,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
    )
    return Translation(chat, FieldNames(NAMES, places, ignored))


def generate_to_chat(body: OllamaGenerateRequest, names: tuple[str, ...]) -> Translation:
    messages: list[dict[str, Any]] = [{"role": "user", "content": body.prompt or ""}]
    places = ["prompt"]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
        places.insert(0, "system")
    given, ignored = shared_fields(body, names)
    chat = ChatRequest(
        **given,
        **thinking(body.think),
        messages=messages,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
    )
    return Translation(chat, FieldNames({**NAMES, "messages": "prompt"}, places, ignored))


def generate_to_completion(
    body: OllamaGenerateRequest, names: tuple[str, ...]
) -> tuple[CompletionRequest, FieldNames]:
    """Return the request with a raw prompt, without a chat template."""
    given, ignored = shared_fields(body, names)
    if given["max_tokens"] is None:
        given["max_tokens"] = -1
    for name in ("system", "think"):
        if getattr(body, name) not in (None, ""):
            ignored.append(name)
    if body.top_logprobs and not body.logprobs:
        raise invalid_field(
            "top_logprobs", "top_logprobs needs logprobs: set logprobs to true as well"
        )
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    completion = CompletionRequest(**given, prompt=body.prompt, logprobs=logprobs)
    return completion, FieldNames(NAMES, ignored=ignored)


def shared_fields(body: OllamaRequest, names: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a chat or a completion, and the options without effect."""
    sampling, ignored = read_options(body.options or {})
    given = {**common_fields(body), "max_tokens": None, **sampling}
    given["model"] = served_name(body.model, names)
    given["stream"] = body.stream is not False
    if body.format == "json":
        given["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        schema = {"schema": body.format}
        given["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif body.format:
        raise invalid_field("format", 'format must be "json" or a JSON schema')
    return given, ignored


def read_options(options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options as fields of a chat request, and the names of those without effect."""
    try:
        known, others = convert(options, OllamaOptions)
    except ApiError as error:
        raise invalid_field(f"options.{error.param}", f"options.{error.message}") from None
    given = {OPTIONS[name]: getattr(known, name) for name in OPTIONS}
    ignored: list[str] = []
    for name, value in others.items():
        field = FIELDS.get(name)
        if field is None or field.chat != REFUSED:
            ignored.append(f"options.{name[:64]}")
        elif value not in field.neutral:
            raise unsupported(f"options.{name}", field.note)
    if given["max_tokens"] == -2:
        given["max_tokens"] = -1  # Both values stand for as many tokens as fit.
    return {name: value for name, value in given.items() if value is not None}, ignored


def served_name(name: str | None, names: tuple[str, ...]) -> str | None:
    """Return the name without the tag :latest, which Ollama's clients may add."""
    return name if name is None or name in names else name.removesuffix(":latest")


def thinking(given: bool | str | None) -> dict[str, Any]:
    if isinstance(given, str):
        return {"reasoning_effort": given}
    return {} if given is None else {"chat_template_kwargs": {"enable_thinking": given}}


def message(given: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a message in the form of a chat request."""
    if given.get("images") not in (None, []):
        raise unsupported(f"{place}.images", "the input must be text")
    found = {name: value for name, value in given.items() if name not in ("images", "tool_name")}
    name = member(given, "tool_name", str, place)
    if name is not None:
        found["name"] = name
    return found


# ---- replies -------------------------------------------------------------------------------------


def error_body(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


def timestamp(seconds: float | None = None) -> str:
    time = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return time.isoformat().replace("+00:00", "Z")


def loaded_reply(model: str, is_chat: bool) -> dict[str, Any]:
    """Return the reply to a request without a prompt, which asks Ollama to load the model."""
    text = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    head = {"model": model, "created_at": timestamp()}
    return {**head, **text, "done": True, "done_reason": "load"}


class LineWriter:
    """Builds a reply, whole or as lines of JSON."""

    content_type = "application/x-ndjson"
    keep_alive = b""  # Ollama's clients parse every line.

    def __init__(
        self, model: str, parser: ReplyParser, shape: Shape, tokenizer: Tokenizer, is_chat: bool
    ):
        """`is_chat` is false if the reply belongs to /api/generate."""
        self._model = model
        self._parser = parser
        self._shape = shape
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._call: Part | None = None  # The call that is not complete.

    def whole(self, collectors: list[Collector]) -> dict[str, Any]:
        (collector,) = collectors
        (completion,) = collector.best
        deltas = self._parser.push(completion.text, is_last=True)
        return {
            **self._line(deltas, completion, is_last=True),
            **final_counts(collector, completion),
        }

    def begin(self) -> bytes:
        return b""

    def piece(
        self, prompt_index: int, piece: CompletionOutput, collectors: list[Collector]
    ) -> bytes:
        is_last = piece.finish_reason is not None
        deltas = self._parser.push(piece.text, is_last)
        line = self._line(deltas, piece, is_last)
        if is_last:
            (collector,) = collectors
            line |= final_counts(collector, piece)
        text = line["message"] if self._is_chat else line
        has_text = any(not isinstance(delta, CallDelta) for delta in deltas)
        if not is_last and not has_text and "tool_calls" not in text and "logprobs" not in line:
            return b""
        return encode_line(line)

    def end(self, collectors: list[Collector], error: ApiError | None) -> bytes:
        return b"" if error is None else encode_line(error_body(error))

    def _line(self, deltas: list[Delta], piece: CompletionOutput, is_last: bool) -> dict[str, Any]:
        """Return the object for new parts of the reply."""
        content = "".join(delta for delta in deltas if isinstance(delta, str))
        reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
        calls = self._complete_calls(deltas, is_last)
        line: dict[str, Any] = {"model": self._model, "created_at": timestamp()}
        text: dict[str, Any] = {"role": "assistant", "content": content}
        if self._is_chat:
            line["message"] = text
        else:
            text = line
            line["response"] = content
        if reasoning:
            text["thinking"] = reasoning
        if calls:
            text["tool_calls"] = calls
        if self._shape.logprobs is not None and piece.logprobs:
            line["logprobs"] = self._shape.logprobs.chat(self._tokenizer, piece.logprobs)["content"]
        return {**line, "done": is_last}

    def _complete_calls(self, deltas: list[Delta], is_last: bool) -> list[dict[str, Any]]:
        """Return the calls that are complete now."""
        complete: list[Part] = []
        for delta in deltas:
            if not isinstance(delta, CallDelta):
                continue
            if delta.name is not None or self._call is None:
                complete += [self._call] if self._call is not None else []
                self._call = Part("call", "", delta.name or "")
            self._call.text += delta.arguments
        if is_last and self._call is not None:
            complete.append(self._call)
            self._call = None
        return [
            {"function": {"name": part.name, "arguments": arguments_object(part.text)}}
            for part in complete
        ]


def final_counts(collector: Collector, completion: CompletionOutput) -> dict[str, Any]:
    """Return the members of the last line. Durations are in nanoseconds."""
    times = collector.metrics
    first = times.first_token_time or times.arrival_time
    finished = times.finished_time or first
    return {
        "done_reason": "length" if completion.finish_reason == "length" else "stop",
        "total_duration": int((finished - times.arrival_time) * SECOND),
        "load_duration": 0,
        "prompt_eval_count": len(collector.request.prompt),
        "prompt_eval_duration": int((first - times.arrival_time) * SECOND),
        "eval_count": sum(len(output.token_ids) for output in collector.outputs),
        "eval_duration": int((finished - first) * SECOND),
    }


def encode_line(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"


# ---- the model -----------------------------------------------------------------------------------


def family_of(loaded: Loaded) -> str:
    """Return the architecture in Ollama's way: "llama" for LlamaForCausalLM."""
    return re.sub(r"(ForCausalLM|LMHeadModel)$", "", loaded.architecture).lower()


def model_details(loaded: Loaded) -> dict[str, Any]:
    family = family_of(loaded)
    return {
        "parent_model": "",
        "format": "safetensors" if loaded.tokenizer_gguf is None else "gguf",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": loaded.weights.partition(" weights")[0] or loaded.dtype,
    }


def model_entry(name: str, loaded: Loaded, created: int) -> dict[str, Any]:
    """Return an item of /api/tags. The digest identifies the name, not the weights."""
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(created),
        "size": loaded.memory.get("weights", 0),
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": model_details(loaded),
    }


def running_entry(name: str, loaded: Loaded, created: int) -> dict[str, Any]:
    """Return an item of /api/ps. The model stays loaded until the server stops."""
    entry = model_entry(name, loaded, created)
    del entry["modified_at"]
    on_gpu = loaded.device.startswith("cuda")
    return {
        **entry,
        "expires_at": "9999-12-31T23:59:59Z",
        "size_vram": entry["size"] if on_gpu else 0,
        "context_length": loaded.max_model_len,
    }


def model_description(
    loaded: Loaded, created: int, template: str | None, capabilities: list[str]
) -> dict[str, Any]:
    """Return the reply of /api/show."""
    family = family_of(loaded)
    settings = [f"{name} {value}" for name, value in loaded.sampling.items()]
    return {
        "modelfile": "",
        "parameters": "\n".join(settings),
        "template": template or "",
        "details": model_details(loaded),
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": loaded.max_model_len,
            f"{family}.vocab_size": loaded.vocab_size,
        },
        "capabilities": capabilities,
        "modified_at": timestamp(created),
    }
