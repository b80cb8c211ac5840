"""Reads prompts in every form that LLM accepts, and returns their token ids."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from octavo.errors import InvalidRequest
from octavo.text.chat import check_options, encode_chat, select_template
from octavo.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Message: TypeAlias = dict[str, Any]
# text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}
Prompt: TypeAlias = str | list[int] | dict[str, Any]
PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt", "parse_special"}  # keys of a dictionary


class ReadPrompt(NamedTuple):
    text: str | None  # None if the prompt was token ids
    token_ids: list[int]
    cache_salt: str = ""


class PromptReader:
    def __init__(self, tokenizer: Tokenizer | None, parse_special: bool):
        self.tokenizer = tokenizer
        self.parse_special = parse_special  # the default for prompts that do not say

    def read(self, prompt: Prompt) -> ReadPrompt:
        if isinstance(prompt, dict):
            return self._read_dictionary(prompt)
        if isinstance(prompt, str):
            return ReadPrompt(prompt, self._encode(prompt, self.parse_special))
        return ReadPrompt(None, token_ids(prompt))

    def _read_dictionary(self, prompt: dict[str, Any]) -> ReadPrompt:
        fields = {name: value for name, value in prompt.items() if value is not None}
        if unknown := sorted(fields.keys() - PROMPT_KEYS):
            raise InvalidRequest(
                f"a prompt cannot have {', '.join(unknown)}: this engine would ignore it", "prompt"
            )
        if not fields.keys() & {"prompt", "prompt_token_ids"}:
            raise InvalidRequest(
                'a prompt dictionary needs "prompt" or "prompt_token_ids"', "prompt"
            )
        salt = str(fields.get("cache_salt", ""))
        text = fields.get("prompt")
        if "prompt_token_ids" in fields:
            return ReadPrompt(text, token_ids(fields["prompt_token_ids"]), salt)
        parse_special = fields.get("parse_special", self.parse_special)
        return ReadPrompt(text, self._encode(fields["prompt"], parse_special), salt)

    def read_chat(
        self,
        messages: list[Message],
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> ReadPrompt:
        """Render a conversation with a chat template."""
        tokenizer = self.need_tokenizer()
        template = select_template(tokenizer, chat_template, bool(tools))
        options = chat_template_kwargs or {}
        check_options(options)
        unused = template.unused(options)
        if unused:
            log.warning("options without effect on this chat template: %s", ", ".join(unused))
        ids = encode_chat(
            tokenizer,
            template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **options,
        )
        return ReadPrompt(None, ids)

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(
                "text needs a tokenizer: drop skip_tokenizer_init, or pass token ids", "prompt"
            )
        return self.tokenizer

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        tokenizer = self.need_tokenizer()
        return tokenizer.as_prompt(tokenizer.encode(text, parse_special=parse_special))


def as_list(prompts: Any) -> list[Prompt]:
    """Return a list of prompts. A string, a dictionary and a flat list or array of token ids are
    one prompt."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidRequest(
            f"give prompts: text, token ids, or a list of either, got {prompts!r:.100}", "prompts"
        )
    items = list(prompts)
    is_list = (
        not items or isinstance(items[0], (str, dict, list, tuple)) or dimensions(items[0]) == 1
    )
    return items if is_list else [items]


def token_ids(prompt: Any) -> list[int]:
    """Return the ids of a list, a tuple, a NumPy array or a PyTorch tensor as Python integers."""
    try:
        ids = prompt.tolist() if dimensions(prompt) == 1 else prompt
        return [id if type(id) is int else id.__index__() for id in ids]
    except (TypeError, AttributeError):
        raise InvalidRequest(
            f"a prompt is text or a list of token ids, got {prompt!r:.80}", "prompt"
        ) from None


def dimensions(value: Any) -> int:
    """Return the dimensions of a NumPy array or a PyTorch tensor, and 0 for any other value."""
    return getattr(value, "ndim", 0)
