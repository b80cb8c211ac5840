"""Turns chat messages into a prompt, by the model's own template.

A template runs in a sandbox (octavo.text.sandbox), bounded in time and output. Whatever goes wrong
in it is a ChatTemplateError. What a user wrote can never become a control token: see `encode_chat`.
Templates differ in what they take; a `ChatTemplate` finds out by rendering short conversations.
Knows nothing of HTTP or of any model's format.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, lru_cache
from typing import Any

import jinja2
from jinja2.sandbox import SecurityError

from octavo.errors import ChatTemplateError, InvalidRequest
from octavo.text.conversation import argument_forms, check_messages, to_plain
from octavo.text.sandbox import (
    MAX_CHARS,
    Refused,
    counted_range,
    make_environment,
    undeclared_variables,
)
from octavo.text.tokenizer import Tokenizer
from octavo.text.tool_prompt import mentions_tools, spell_out

MAX_SECONDS = 2.0  # looked at between pieces of output, so that a template cannot go on for ever
MAX_MESSAGE = 500  # characters of a template's own error message
# Variables that a request or the server sets itself; options may not replace them.
RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}
    | {"tokenize", "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"}
    | {"mask_token", "additional_special_tokens"}
    | set(make_environment().globals)
)
# Unicode keeps these characters out of interchange. They mark places in a text, and those that the
# text has are not used.
_NONCHARACTERS = [chr(c) for c in range(0xFDD0, 0xFDF0)]
_PROBE = "probe7"  # a text that no template contains
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"p": {"type": "string", "description": "d"}},
            "required": ["p"],
        },
    },
}


class ChatTemplate:
    """A compiled template. `specials` are the tokenizer's named special tokens, which templates
    write by name."""

    def __init__(self, source: str, specials: dict[str, str] | None = None):
        environment = make_environment()
        try:
            self._template = environment.from_string(source)
            variables = undeclared_variables(environment, source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template has a syntax error in line {error.lineno}: {_short(error)}",
                "chat_template",
            ) from None
        except Exception as error:  # the compiler can fail on a template that is nested too deeply
            raise ChatTemplateError(
                f"the chat template cannot be compiled: {_short(error)}", "chat_template"
            ) from None
        self.source = source
        self._specials = specials or {}
        self._variables = variables
        self.options = frozenset(variables - RESERVED - set(self._specials))

    def unused(self, options: Iterable[str]) -> list[str]:
        """Those options that the template does not use."""
        return [name for name in options if name not in self.options]

    # ---- what the template takes -----------------------------------------------------------------

    @cached_property
    def knows_tools(self) -> bool:
        """The template shows the model the tools it is given, perhaps only where there is a system
        message."""
        if "tools" not in self._variables:
            return False
        user = {"role": "user", "content": "u"}
        return any(
            self._shows(self._in_parts(messages), [_PROBE_TOOL])
            for messages in ([user], [{"role": "system", "content": "s"}, user])
        )

    @cached_property
    def takes_system(self) -> bool:
        """The template shows a system message."""
        system = {"role": "system", "content": _PROBE}
        return self._shows(self._in_parts([system, {"role": "user", "content": "u"}]))

    @cached_property
    def takes_text(self) -> bool:
        """The template shows content that is a string. Templates of models for images may need a
        list of parts."""
        text = {"role": "user", "content": _PROBE}
        parts = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        return self._shows([text]) or not self._shows([parts])

    def _in_parts(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with their content as a list of parts, if that is what the template needs."""
        if self.takes_text:
            return messages
        return [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            for message in messages
        ]

    def _shows(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> bool:
        """Whether the rendered messages contain the probe."""
        try:
            return _PROBE in self._run(messages, tools, True, {})
        except ChatTemplateError:
            return False

    # ---- rendering -------------------------------------------------------------------------------

    def render(
        self,
        messages: list[dict[str, Any]],
        /,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        *,
        continue_final_message: bool = False,
        **options: Any,
    ) -> str:
        """The prompt. It ends with the opening of the assistant's turn, unless
        `add_generation_prompt` is false. `continue_final_message` leaves the last message open
        instead, for the model to continue. `options` are further variables for the template; those
        that it does not use have no effect."""
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other: the model "
                "either continues the last message or begins a new one. Set one of them",
                "continue_final_message",
            )
        opened = not continue_final_message and add_generation_prompt is not False
        check_options(options, self._specials)
        messages = check_messages(messages)
        tools = None if tools is None else to_plain(tools, "tools")
        options = to_plain(options, "chat_template_kwargs")
        if mentions_tools(messages, tools) and not self.knows_tools:
            messages = spell_out(messages, tools, self.takes_system)
            tools = None
        messages = self._system_for_developer(messages)
        if continue_final_message:
            return self._render_open(messages, tools, options)
        return self._render(messages, tools, opened, options)

    def _render_open(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
    ) -> str:
        """The prompt up to the end of the last message's content.

        A tag after the content shows where it ends in the prompt. The space after the tag shows
        whether the template trims the content: then white space before the tag, which the tag kept
        from being trimmed, is trimmed here.
        """
        last = messages[-1]
        if not last["content"] and "tool_calls" in last:
            raise InvalidRequest(
                "continue_final_message needs a last message with content", "continue_final_message"
            )
        end = unused_character(messages) * 2
        messages = [*messages[:-1], {**last, "content": last["content"] + end + " "}]
        before, found, after = self._render(messages, tools, False, options).rpartition(end)
        if not found:
            raise InvalidRequest(
                "the chat template does not write the last message as it is, so it cannot be "
                "continued: leave continue_final_message out",
                "continue_final_message",
            )
        return before if after.startswith(" ") else before.rstrip()

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        opened: bool,
        options: dict[str, Any],
    ) -> str:
        """The prompt from messages in the form that this template takes: the first that it can
        render."""
        first: ChatTemplateError | None = None
        for form in argument_forms(self._in_parts(messages)):
            try:
                return self._run(form, tools, opened, options)
            except ChatTemplateError as error:
                first = first or error
        assert first is not None
        raise first

    def _system_for_developer(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`developer` is OpenAI's newer name for `system`. For a template that does not know it, it
        becomes `system`, and all system messages become one: templates want one, and at the start.
        """
        known = "'developer'" in self.source or '"developer"' in self.source
        if known or all(message["role"] != "developer" for message in messages):
            return messages
        system = [m["content"] for m in messages if m["role"] in ("system", "developer")]
        others = [m for m in messages if m["role"] not in ("system", "developer")]
        return [{"role": "system", "content": "\n\n".join(filter(None, system))}, *others]

    def _run(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        opened: bool,
        options: dict[str, Any],
    ) -> str:
        variables = {
            "documents": None,  # templates ask whether it is none, and an undefined value is not
            **options,
            **self._specials,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": opened,
            "range": counted_range(),
        }
        try:
            return "".join(self._pieces(variables))
        except Refused as error:
            raise ChatTemplateError(
                f"the chat template refuses these messages: {_short(error)}"
            ) from None
        except SecurityError as error:
            raise ChatTemplateError(
                f"the chat template does something that a template may not do: {_short(error)}"
            ) from None
        except Exception as error:  # a template can raise anything that its expressions can
            raise ChatTemplateError(
                f"the chat template cannot render these messages: {_short(error)}"
            ) from error

    def _pieces(self, variables: dict[str, Any]) -> Iterator[str]:
        deadline = time.monotonic() + MAX_SECONDS
        size = 0
        for piece in self._template.generate(variables):
            size += len(piece)
            if size > MAX_CHARS:
                raise OverflowError(f"the prompt is longer than {MAX_CHARS} characters")
            if time.monotonic() > deadline:
                raise TimeoutError(f"it takes longer than {MAX_SECONDS:g} s")
            yield piece


def _short(error: Exception) -> str:
    """An error's message without what would spoil a line, and not longer than a line should be."""
    message = " ".join(str(error).split()) or type(error).__name__
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."


def check_options(options: dict[str, Any], specials: dict[str, str] | None = None) -> None:
    """Refuse options by the name of a variable that the request or the server sets."""
    for name in options:
        if name in RESERVED or name in (specials or {}):
            raise InvalidRequest(
                f"chat_template_kwargs may not set {name[:64]!r}, which the request or the model "
                "sets itself: leave it out",
                "chat_template_kwargs",
            )


def select_template(
    tokenizer: Tokenizer, source: str | None = None, tools: bool = False
) -> ChatTemplate:
    """The given template, or the model's own: the one for tools where tools are used and the model
    has one."""
    if source is None and tools:
        source = tokenizer.chat_templates.get("tool_use")
    if source is None:
        source = tokenizer.chat_template
    if source is None:
        raise InvalidRequest(
            "this model has no chat template: pass chat_template=..., or use completions, which "
            "take a plain prompt",
            "messages",
        )
    return _compiled(source, tuple(tokenizer.specials.items()))


@lru_cache(maxsize=16)
def _compiled(source: str, specials: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(specials))  # takes 8 ms, which every request would pay


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    /,
    tools: list[dict[str, Any]] | None = None,
    **options: Any,
) -> list[int]:
    """The prompt's tokens. Special tokens that the template wrote are special tokens; the same
    characters in a message, a tool or an option are only characters. `options` are those of
    `ChatTemplate.render`."""
    text, mark = render_marked(tokenizer, template, messages, tools, **options)
    if mark is None:
        return tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    return tokenizer.encode_marked(text, mark)


def render_marked(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    /,
    tools: list[dict[str, Any]] | None = None,
    **options: Any,
) -> tuple[str, str | None]:
    """The rendered text, and the mark before each special token in it that the template did not
    write. The mark is None if there is no such token.

    To tell the tokens apart after rendering, a mark goes before each special token in what the
    caller sent. A mark is not white space and stands before the first character of a token, so a
    template that trims, splits or compares still works.
    """
    given = [
        check_messages(messages),
        None if tools is None else to_plain(tools, "tools"),
        to_plain(options, "chat_template_kwargs"),
    ]
    mark = unused_character(given)

    def protect(text: str) -> str:
        return tokenizer.protect(text, mark)

    safe_messages, safe_tools, safe_options = map_text(given, protect)
    for message, safe_message in zip(given[0], safe_messages, strict=True):
        safe_message["role"] = message["role"]  # a name, which templates compare
    text = template.render(safe_messages, safe_tools, **safe_options)
    text = text.replace(f"\\u{ord(mark):04x}", mark)  # a template may write JSON in ASCII
    return text, mark if mark in text else None


# ---- texts inside a structure --------------------------------------------------------------------


def map_text(value: Any, change: Callable[[str], str]) -> Any:
    """The same structure with every string in it changed, names of members included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_text(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): map_text(item, change) for key, item in value.items()}
    return value


def _texts(value: Any) -> Iterator[str]:
    """Every string in a structure, names of members included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _texts(item)


def unused_character(value: Any) -> str:
    """A noncharacter that occurs in no string of `value`, nor does its escape sequence."""
    text = "\n".join(_texts(value)).lower()
    for character in _NONCHARACTERS:
        if character not in text and f"{ord(character):04x}" not in text:
            return character
    raise InvalidRequest(
        "messages use every noncharacter from U+FDD0 to U+FDEF: leave one of them out", "messages"
    )
