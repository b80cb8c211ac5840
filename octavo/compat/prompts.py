"""The types of prompts and of KV events under vLLM's names.

LLM accepts plain dictionaries with these keys.
"""

from __future__ import annotations

from typing import NotRequired, TypeAlias, TypedDict


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType: TypeAlias = str | list[int] | TextPrompt | TokensPrompt
ExternalBlockHash: TypeAlias = bytes | int  # the hash of a block in a KV event
