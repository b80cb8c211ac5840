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
from octavo.serve.api.replies import ReplyFormat
from octavo.serve.api.reply_writer import (
    Delta,
    Part,
    ReasoningDelta,
    ReplyParser,
    arguments_object,
)
from octavo.serve.api.request_fields import IGNORED, LABEL, OLLAMA_TABLE
from octavo.serve.api.translation import FieldNames, Translation, common_fields, member
from octavo.serve.channel.messages import Loaded
from octavo.serve.limits import Limits
from octavo.text.tokenizer import Tokenizer
from octavo.text.tool_calls import CallDelta

SECOND = 1_000_000_000  # Ollama counts nanoseconds.
REQUEST_FIELDS = {
    *OllamaChatRequest.__struct_fields__,
    *OllamaGenerateRequest.__struct_fields__,
}
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
    rf"{chat_field}(?= (?:must|can|has|is)\b|$)": f"options.{option}"
    for option, chat_field in OPTIONS.items()
}
NAMES |= {
    r"chat_template_kwargs\.enable_thinking": "think",
    "reasoning_effort": "think",
    "response_format": "format",
    "json_schema": "format",
}

# ---- requests ------------------------------------------------------------------------------------


def chat_to_chat(body: OllamaChatRequest, names: tuple[str, ...], limits: Limits) -> Translation:
    client_messages = check_messages(body.messages, limits) if body.messages else []
    paths = [f"messages.{i}" for i in range(len(client_messages))]
    messages = [
        chat_message(message, path) for message, path in zip(client_messages, paths, strict=True)
    ]
    shared, ignored = shared_fields(body, names)
    chat = ChatRequest(
        **shared,
        **thinking(body.think),
        messages=messages,
        tools=body.tools or None,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
    )
    return Translation(chat, FieldNames(NAMES, paths, ignored))


def generate_to_chat(body: OllamaGenerateRequest, names: tuple[str, ...]) -> Translation:
    messages: list[dict[str, Any]] = [{"role": "user", "content": body.prompt or ""}]
    paths = ["prompt"]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
        paths.insert(0, "system")
    shared, ignored = shared_fields(body, names)
    chat = ChatRequest(
        **shared,
        **thinking(body.think),
        messages=messages,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
    )
    return Translation(chat, FieldNames({**NAMES, "messages": "prompt"}, paths, ignored))


def generate_to_completion(
    body: OllamaGenerateRequest, names: tuple[str, ...]
) -> tuple[CompletionRequest, FieldNames]:
    """Return the request with a raw prompt, without a chat template."""
    shared, ignored = shared_fields(body, names)
    if shared["max_tokens"] is None:
        shared["max_tokens"] = -1
    for name in ("system", "think"):
        if getattr(body, name) not in (None, ""):
            ignored.append(name)
    if body.top_logprobs and not body.logprobs:
        raise invalid_field(
            "top_logprobs", "top_logprobs needs logprobs: set logprobs to true as well"
        )
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    completion = CompletionRequest(**shared, prompt=body.prompt, logprobs=logprobs)
    return completion, FieldNames(NAMES, ignored=ignored)


def shared_fields(body: OllamaRequest, names: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a chat or a completion, and the options without effect."""
    sampling, ignored = read_options(body.options or {})
    fields = {**common_fields(body), "max_tokens": None, **sampling}
    fields["model"] = served_name(body.model, names)
    fields["stream"] = body.stream is not False
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        schema = {"schema": body.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif body.format:
        raise invalid_field("format", 'format must be "json" or a JSON schema')
    return fields, ignored


def read_options(options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options as fields of a chat request, and the names of those without effect."""
    try:
        known, unknown = convert(options, OllamaOptions)
    except ApiError as error:
        raise invalid_field(f"options.{error.param}", f"options.{error.message}") from None
    fields = {OPTIONS[name]: getattr(known, name) for name in OPTIONS}
    ignored: list[str] = []
    for name, value in unknown.items():
        field = OLLAMA_TABLE.get(name)
        if field is None or field.chat in (IGNORED, LABEL):
            ignored.append(f"options.{name[:64]}")
        elif value not in field.neutral:
            is_outer = name in REQUEST_FIELDS
            reason = f"send {name} as a field of the request" if is_outer else field.note
            raise unsupported(f"options.{name}", reason)
    if fields["max_tokens"] == -2:
        fields["max_tokens"] = -1  # Both values stand for as many tokens as fit.
    return {name: value for name, value in fields.items() if value is not None}, ignored


def served_name(name: str | None, names: tuple[str, ...]) -> str | None:
    """Return the name without the tag :latest, which Ollama's clients may add."""
    return name if name is None or name in names else name.removesuffix(":latest")


def thinking(think: bool | str | None) -> dict[str, Any]:
    """Return the fields of a chat request for Ollama's field think."""
    if think is None:
        return {}
    if isinstance(think, str):
        return {"reasoning_effort": think}
    return {"chat_template_kwargs": {"enable_thinking": think}}


def chat_message(message: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a message in the form of a chat request."""
    if message.get("images") not in (None, []):
        raise unsupported(f"{path}.images", "the input must be text")
    fields = {name: value for name, value in message.items() if name not in ("images", "tool_name")}
    tool_name = member(message, "tool_name", str, path)
    if tool_name is not None:
        fields["name"] = tool_name
    return fields


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
    """Builds a reply, as one object or as lines of JSON."""

    content_type = "application/x-ndjson"
    keep_alive = b""  # Ollama's clients parse every line.

    def __init__(
        self,
        model: str,
        parser: ReplyParser,
        reply_format: ReplyFormat,
        tokenizer: Tokenizer,
        is_chat: bool,
    ):
        """`is_chat` is false if the reply belongs to /api/generate."""
        self._model = model
        self._parser = parser
        self._reply_format = reply_format
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._call: Part | None = None  # The call that is not complete.

    def full_reply(self, collectors: list[Collector]) -> dict[str, Any]:
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
        if self._reply_format.logprobs is not None and piece.logprobs:
            logprobs = self._reply_format.logprobs.chat(self._tokenizer, piece.logprobs)
            line["logprobs"] = logprobs["content"]
        return {**line, "done": is_last}

    def _complete_calls(self, deltas: list[Delta], is_last: bool) -> list[dict[str, Any]]:
        """Return the calls that these deltas complete."""
        complete: list[Part] = []
        for delta in deltas:
            if not isinstance(delta, CallDelta):
                continue
            if delta.name is not None and self._call is not None:
                complete.append(self._call)
            if delta.name is not None or self._call is None:
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
        "eval_count": sum(len(output.token_ids) for output in collector.completions),
        "eval_duration": int((finished - first) * SECOND),
    }


def encode_line(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"


# ---- the model -----------------------------------------------------------------------------------


def family_of(loaded: Loaded) -> str:
    """Return the architecture as Ollama names it, such as "llama" for LlamaForCausalLM."""
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
