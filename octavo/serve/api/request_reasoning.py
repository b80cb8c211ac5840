"""Decides whether the reply of a chat has reasoning that is sent separately from the answer."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from octavo.params import SamplingParams
from octavo.serve.api.protocol import ChatRequest
from octavo.serve.api.reply_writer import ReasoningStart
from octavo.serve.api.validate import CheckedRequest, ignore
from octavo.text.reasoning import STYLES, ReasoningStyle, detect_style, opened
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.serve.front.front import Front


def reasoning_style(front: Front, body: ChatRequest) -> ReasoningStyle | None:
    """Return how the model marks reasoning, or None if it is not separated."""
    setting = front.config.reasoning_parser
    if setting == "none" or body.separate_reasoning is False:
        return None
    if setting != "auto":
        return STYLES[setting]
    if body.chat_template is not None:
        return detect_style([body.chat_template])
    return model_style(front.tokenizer)


@lru_cache(maxsize=4)
def model_style(tokenizer: Tokenizer) -> ReasoningStyle | None:
    return detect_style(tokenizer.chat_templates.values())


def show_tags(
    tokenizer: Tokenizer, style: ReasoningStyle, params: SamplingParams
) -> SamplingParams:
    """Return parameters with which the text contains the tags of a style."""
    specials = {tokenizer.token_str(id) for id in tokenizer.special_ids}
    if any(token in text for text in style.texts for token in specials):
        return replace(params, skip_special_tokens=False)
    return params


def reasoning_start(
    front: Front, body: ChatRequest, prompt: list[int], checked: CheckedRequest
) -> ReasoningStart | None:
    """Return how the reply to a prompt begins, and adapt the parameters of the request to it.

    Structured output applies to the answer that follows the reasoning.
    """
    budget = body.thinking_token_budget
    style = reasoning_style(front, body)
    if style is None:
        ignore(checked.headers, *(["thinking_token_budget"] if budget is not None else []))
        return None
    if budget is None:
        budget = front.config.thinking_token_budget
    is_open = opened(front.tokenizer, style, prompt)
    checked.params = replace(
        checked.params,
        reasoning=style.marks(is_open),
        thinking_token_budget=None if budget == -1 else budget,
    )
    return ReasoningStart(style, is_open)
