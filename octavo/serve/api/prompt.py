"""Converts the messages or the text of a request to tokens, within the limits of the server."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from octavo.serve.api.api_errors import ApiError, invalid_field, prompt_too_long, unsupported
from octavo.serve.api.protocol import ChatRequest, CompletionRequest, OpenAI
from octavo.serve.api.validate import LABEL, UNBOUNDED, CheckedRequest, check_count, ignore
from octavo.serve.channel.jobs import Encode, EncodeChat, Tokens
from octavo.serve.limits import Limits
from octavo.text.chat import check_options, select_template
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.serve.api.request_tools import ToolUse
    from octavo.serve.front.front import Front


def check_messages(messages: list[dict[str, Any]] | None, limits: Limits) -> list[dict[str, Any]]:
    """Check the numbers of messages and parts. octavo.text.chat checks their contents."""
    if not messages:
        raise invalid_field("messages", "messages must have at least one message")
    if len(messages) > limits.messages:
        raise invalid_field(
            "messages",
            f"messages can have at most {limits.messages} items, got {len(messages)}",
            "param_out_of_range",
        )
    parts = sum(len(m["content"]) for m in messages if isinstance(m.get("content"), list))
    if parts > limits.parts:
        raise invalid_field(
            "messages",
            f"all messages together can have at most {limits.parts} parts, got {parts}",
            "param_out_of_range",
        )
    return messages


def check_template(front: Front, body: ChatRequest) -> None:
    if body.chat_template is not None and not front.config.request_templates:
        raise ApiError(
            403,
            "this server does not accept chat templates in requests: remove chat_template, or "
            "start the server with --trust-request-chat-template",
            "template_not_allowed",
            "chat_template",
        )
    limit = front.config.limits.template_chars
    size = len(body.chat_template or "")
    if size > limit:
        raise invalid_field(
            "chat_template",
            f"chat_template can have at most {limit} characters, got {size}",
            "param_out_of_range",
        )
    if body.chat_template is None and not front.tokenizer.chat_templates:
        raise invalid_field(
            "messages",
            "this model has no chat template: use /v1/completions, which accepts a plain prompt, "
            "or start the server with --chat-template FILE",
        )


def max_prompt_tokens(front: Front, truncated_to: int | None) -> int:
    """Return how many tokens a prompt may have. There is no limit if it will be truncated."""
    return front.engine_client.model.max_model_len if truncated_to is None else sys.maxsize


def template_options(front: Front, body: ChatRequest) -> dict[str, Any]:
    """Return the variables of the chat template.

    They come from the settings of the server, from chat_template_kwargs, and from request fields
    that are also variables.
    """
    options = {
        **(front.config.default_chat_template_kwargs or {}),
        **(body.chat_template_kwargs or {}),
    }
    if body.documents:
        options.setdefault("documents", body.documents)
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
        options.setdefault("enable_thinking", body.reasoning_effort != "none")
    return options


def check_template_options(front: Front, body: ChatRequest, headers: dict[str, str]) -> None:
    """Refuse chat_template_kwargs that would replace a field of the request.

    A header names the variables that the template of the server does not use. A template that came
    with the request is not checked here, because it may only run in a worker process.
    """
    options = template_options(front, body)
    if not options:
        return
    check_options(options, front.tokenizer.specials)
    if body.chat_template is not None or not front.tokenizer.chat_templates:
        return
    template = select_template(front.tokenizer, tools=bool(body.tools))
    unused = template.unused(body.chat_template_kwargs or {})
    names = [f"chat_template_kwargs.{name[:64]}" for name in unused if LABEL.fullmatch(name)]
    if unused and front.config.strict_params:
        raise unsupported(
            names[0] if names else "chat_template_kwargs",
            "the chat template does not use this variable, and this server refuses unknown "
            "parameters (--strict-params)",
        )
    if body.documents and template.unused(["documents"]):
        names.append("documents")
    thinking = ["reasoning_effort", "enable_thinking"]
    if body.reasoning_effort is not None and template.unused(thinking) == thinking:
        names.append("reasoning_effort")
    ignore(headers, *names[:20])


def check_size(tokenizer: Tokenizer, size: int, context: int, param: str) -> None:
    """Refuse a text of so many characters that it must have more tokens than the context."""
    min_tokens = size // (4 * tokenizer.longest_token)
    if min_tokens >= context:
        raise prompt_too_long(f"at least {min_tokens}", context, param)


def chat_size(messages: list[dict[str, Any]]) -> int:
    """Return the number of characters in the contents of the messages."""
    size = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            size += len(content)
        elif isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, dict)]
            size += sum(len(text) for text in parts if isinstance(text, str))
    return size


def chat_job(
    front: Front, body: ChatRequest, tools: ToolUse | None, keep: int | None, context: int
) -> EncodeChat:
    """Return the job that tokenises a conversation. Encode describes `keep` and `context`."""
    messages = check_messages(body.messages, front.config.limits)
    check_template(front, body)
    max_tokens = max_prompt_tokens(front, body.truncate_prompt_tokens)
    check_size(front.tokenizer, chat_size(messages), max_tokens, "messages")
    prompt_options = {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": bool(body.continue_final_message),
    }
    return EncodeChat(
        messages=messages,
        tools=tools.tools if tools else None,
        template=body.chat_template,
        options={**template_options(front, body), **prompt_options},
        context=context,
        keep=keep,
        keep_first=body.truncation_side == "right",
        add_special_tokens=bool(body.add_special_tokens),
    )


async def chat_ids(
    front: Front, body: ChatRequest, checked: CheckedRequest, tools: ToolUse | None, context: int
) -> list[int]:
    """Return the tokens of a conversation, which must have fewer than `context`."""
    keep = truncation_length(front, body, checked.max_tokens)
    job = chat_job(front, body, tools, keep, context)
    tokens = await front.text.encode_chat(front.tokenizer, job)
    return truncate(tokens, body, keep, checked.headers)


def parse_special(front: Front, requested: bool | None) -> bool:
    """Return whether the text of a control token in a prompt becomes that token."""
    if requested and not front.config.engine.parse_special:
        raise ApiError(
            403,
            "this server treats control tokens in prompts as plain text (--no-parse-special): "
            "remove parse_special",
            "parse_special_not_allowed",
            "parse_special",
        )
    return front.config.engine.parse_special if requested is None else requested


async def completion_prompts(
    front: Front, body: CompletionRequest, checked: CheckedRequest
) -> list[tuple[str | None, list[int]]]:
    """Return the text and the tokens of each prompt.

    The text is None if the prompt was truncated or given as token ids.
    """
    keep = truncation_length(front, body, checked.max_tokens)
    context = max_prompt_tokens(front, keep)
    prompts = prompt_list(body.prompt, front.config.limits)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for text in texts:
        check_size(front.tokenizer, len(text), context, "prompt")
    job = Encode(
        texts,
        context=context,
        keep=keep,
        keep_first=body.truncation_side == "right",
        add_special_tokens=body.add_special_tokens is not False,
        parse_special=parse_special(front, body.parse_special),
    )
    encoded = iter(await front.text.encode(front.tokenizer, job) if texts else ())
    results: list[tuple[str | None, list[int]]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            tokens = next(encoded)
            ids = truncate(tokens, body, keep, checked.headers)
            text_of_ids = prompt if len(ids) == tokens.total else None
            results.append((text_of_ids, front.tokenizer.as_prompt(ids)))
            continue
        if isinstance(prompt, bytes):  # A worker process has checked and packed these token ids.
            ids = await front.text.unpack(prompt)
        elif isinstance(prompt, list):
            ids = check_ids(prompt, front.engine_client.model.vocab_size, "prompt")
        else:
            raise invalid_field("prompt", "each prompt must be a string or a list of token ids")
        results.append((None, truncate(Tokens(ids, len(ids)), body, keep, checked.headers)))
    return results


def prompt_list(prompt: str | list[Any] | None, limits: Limits, param: str = "prompt") -> list[Any]:
    """Return the prompts of a request as a list."""
    if prompt is None or prompt == []:
        raise invalid_field(
            param,
            f"{param} must be a string, a list of strings, a list of token ids, or a list of lists "
            "of token ids",
        )
    prompts: list[Any] = [prompt]
    if isinstance(prompt, list) and type(prompt[0]) not in (int, float, bool):
        prompts = prompt
    if len(prompts) > limits.prompts:
        raise invalid_field(
            param,
            f"a request can have at most {limits.prompts} prompts, got {len(prompts)}",
            "param_out_of_range",
        )
    return prompts


def check_ids(ids: list[Any], vocab_size: int, param: str) -> list[int]:
    if not ids:
        raise invalid_field(param, "a list of token ids must not be empty")
    if any(type(token_id) is not int for token_id in ids):
        raise invalid_field(param, "token ids must be integers")
    if min(ids) < 0 or max(ids) >= vocab_size:
        invalid_id = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise invalid_field(
            param, f"token id {invalid_id} is out of vocabulary: ids are in [0, {vocab_size - 1}]"
        )
    return ids


def truncation_length(front: Front, body: OpenAI, max_tokens: int | None) -> int | None:
    """Return the number of tokens to which a longer prompt is truncated, or None for no truncation.

    `max_tokens` is the largest number of tokens in the reply.
    """
    requested = body.truncate_prompt_tokens
    if requested is None:
        return None
    if requested == -1:
        reply = 1 if max_tokens is None or max_tokens == UNBOUNDED else max_tokens
        return max(front.engine_client.model.longest_sequence - reply, 1)
    return check_count("truncate_prompt_tokens", requested, minimum=1)


def truncate(tokens: Tokens, body: OpenAI, keep: int | None, headers: dict[str, str]) -> list[int]:
    """Truncate a prompt to `keep` tokens, and add a header with the number of removed tokens."""
    if keep is None:
        return tokens.ids
    if tokens.total > keep:
        headers["x-truncated-tokens"] = str(tokens.total - keep)
    return cut(tokens.ids, keep, body.truncation_side == "right")


def cut(ids: list[int], keep: int, keep_first: bool) -> list[int]:
    return ids[:keep] if keep_first else ids[-keep:]
