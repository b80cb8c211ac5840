"""Separates the reasoning of a model from its answer.

A style says which texts surround the reasoning, such as <think> and </think>. The filter works on
text, however it is split. It holds back a text that may become a tag.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from octavo.params import ReasoningMarks
from octavo.text.tokenizer import Tokenizer

PROMPT_END = 64  # An opening tag and white space have at most this many tokens.
OPEN_TAG = "<think>"
CLOSE_TAG = "</think>"


class ReasoningStyle(NamedTuple):
    """The way in which a family of models marks its reasoning."""

    name: str
    opening: str
    closing: str
    silent: tuple[str, ...] = ()  # texts around the answer, which are removed

    def marks(self, is_open: bool) -> ReasoningMarks:
        return ReasoningMarks(self.opening, self.closing, is_open)

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.opening, self.closing, *self.silent)


THINK = ReasoningStyle("think", OPEN_TAG, CLOSE_TAG)
_TABLE = (
    THINK,
    ReasoningStyle(
        "harmony",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        ("<|start|>assistant", "<|channel|>final<|message|>", "<|return|>", "<|end|>"),
    ),
    ReasoningStyle("mistral", "[THINK]", "[/THINK]"),
    ReasoningStyle("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningStyle(
        "command_r",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ReasoningStyle("gemma4", "<|channel>thought\n", "<channel|>"),
    ReasoningStyle("granite", "Here is my thought process:", "Here is my response:"),
)
STYLES = {style.name: style for style in _TABLE}
# vLLM's names of parsers. All others of vLLM's read <think> ... </think>.
VLLM_STYLES = {
    "openai_gptoss": "harmony",
    "mistral": "mistral",
    "seed_oss": "seed_oss",
    "cohere_command3": "command_r",
    "cohere_command4": "command_r",
    "gemma4": "gemma4",
    "granite": "granite",
}
VLLM_THINK_NAMES = (
    "deepseek_r1", "deepseek_v3", "deepseek_v4", "poolside_v1", "ernie45", "glm45", "glm47",
    "ling3", "holo2", "hunyuan_a13b", "hy_v3", "kimi_k2", "kimi_k3", "mimo", "minimax_m2",
    "minimax_m2_append_think", "minimax_m3", "nemotron_v3", "olmo3", "muse_glimmer", "qwen3",
    "step3", "step3p5", "inkling",
)  # fmt: skip


def detect_style(templates: Iterable[str]) -> ReasoningStyle | None:
    """Return the style of a model from its chat templates, or None if they have no reasoning."""
    for template in templates:
        for style in _TABLE:
            # A template may build a channel of harmony from parts.
            mark = "<|channel|>analysis" if style.name == "harmony" else style.closing
            if mark in template:
                return style
    return None


def opened(tokenizer: Tokenizer, style: ReasoningStyle, prompt: list[int]) -> bool:
    """Return whether a prompt ends with the opening of the reasoning."""
    end = tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False)
    return end.rstrip().endswith(style.opening.rstrip())


class ReasoningFilter:
    """`in_reasoning` is true at the start if the prompt ends with an opening tag."""

    def __init__(self, in_reasoning: bool = False, style: ReasoningStyle = THINK):
        self.in_reasoning = in_reasoning
        self.style = style
        self._held_text = ""

    def push(self, text: str) -> list[tuple[bool, str]]:
        """Return the text that is certain now as (is reasoning, text), without the tags."""
        text = self._held_text + text
        pieces = []
        while True:
            tags = self._tags()
            found_tags = [(text.find(tag), tag) for tag in tags if tag in text]
            if not found_tags:
                break
            start, tag = min(found_tags, key=lambda pair: (pair[0], -len(pair[1])))
            pieces.append((self.in_reasoning, text[:start]))
            text = text[start + len(tag) :]
            if tag == (self.style.closing if self.in_reasoning else self.style.opening):
                self.in_reasoning = not self.in_reasoning
        held_length = max(_overlap(text, tag) for tag in tags)
        self._held_text = text[len(text) - held_length :]
        pieces.append((self.in_reasoning, text[: len(text) - held_length]))
        return [piece for piece in pieces if piece[1]]

    def _tags(self) -> tuple[str, ...]:
        """Return the texts that have a meaning at this place."""
        if self.in_reasoning:
            return (self.style.closing,)
        return (self.style.opening, *self.style.silent)

    def finish(self) -> list[tuple[bool, str]]:
        """Return the text that was held back. It is not a tag."""
        held_text = self._held_text
        self._held_text = ""
        return [(self.in_reasoning, held_text)] if held_text else []


def _overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of the text begin the tag."""
    lengths = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(tag[:length])), 0)
