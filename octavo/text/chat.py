"""Turns chat messages into a prompt with the chat template of the model.

A template runs in a sandbox (octavo.text.sandbox) with limits on time and output. Every failure in
it is a ChatTemplateError. Text of a user can never become a control token: see `encode_chat`.
Templates differ in the messages that they accept. A `ChatTemplate` finds out by rendering short
conversations. This module does not depend on HTTP or on the format of any model.
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
    TemplateRefusal,
    counted_range,
    make_environment,
    undeclared_variables,
)
from octavo.text.tokenizer import Tokenizer
from octavo.text.tool_prompt import mentions_tools, spell_out

MAX_SECONDS = 2.0  # limit of one rendering; checked between pieces of output
MAX_MESSAGE = 500  # characters of a template's own error message
# Variables that a request or the server sets itself; options may not replace them.
RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}
    | {"tokenize", "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"}
    | {"mask_token", "additional_special_tokens"}
    | set(make_environment().globals)
)
# Unicode reserves these characters for internal use. One that does not occur in the input marks
# positions in a text.
_NONCHARACTERS = [chr(code_point) for code_point in range(0xFDD0, 0xFDF0)]
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
    """A compiled template. `specials` are the named special tokens of the tokenizer."""

    def __init__(self, source: str, specials: dict[str, str] | None = None):
        environment = make_environment()
        try:
            tree = environment.parse(source)
            variables = undeclared_variables(environment, tree)
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template has a syntax error in line {error.lineno}: {_one_line(error)}",
                "chat_template",
            ) from None
        except Exception as error:  # the compiler can fail on a template that is nested too deeply
            raise ChatTemplateError(
                f"the chat template cannot be compiled: {_one_line(error)}", "chat_template"
            ) from None
        self.source = source
        self._specials = specials or {}
        self._variables = variables
        self.options = frozenset(variables - RESERVED - set(self._specials))

    def unused(self, options: Iterable[str]) -> list[str]:
        """Return the options that the template does not use."""
        return [name for name in options if name not in self.options]

    # ---- inputs of the template ------------------------------------------------------------------

    @cached_property
    def knows_tools(self) -> bool:
        """Return whether the template shows the tools to the model.

        Some templates show them only if there is a system message.
        """
        if "tools" not in self._variables:
            return False
        user_message = {"role": "user", "content": "u"}
        return any(
            self._renders_probe(self._in_parts(messages), [_PROBE_TOOL])
            for messages in ([user_message], [{"role": "system", "content": "s"}, user_message])
        )

    @cached_property
    def takes_system(self) -> bool:
        """Return whether the template shows a system message."""
        system_message = {"role": "system", "content": _PROBE}
        return self._renders_probe(
            self._in_parts([system_message, {"role": "user", "content": "u"}])
        )

    @cached_property
    def takes_text(self) -> bool:
        """Return whether the template shows content that is a string.

        Templates of models for images may need a list of parts.
        """
        text_message = {"role": "user", "content": _PROBE}
        parts_message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        return self._renders_probe([text_message]) or not self._renders_probe([parts_message])

    def _in_parts(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with their content as a list of parts, if the template needs that."""
        if self.takes_text:
            return messages
        return [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            for message in messages
        ]

    def _renders_probe(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> bool:
        """Return whether the rendered messages contain the probe."""
        try:
            return _PROBE in self._render_checked(messages, tools, True, {})
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
        """Return the prompt.

        The prompt ends with the opening of the assistant's turn, unless `add_generation_prompt` is
        false. `continue_final_message` leaves the last message open instead, and the model
        continues it. `options` are further variables for the template. Options that it does not use
        have no effect.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other: the model "
                "either continues the last message or begins a new one. Set one of them",
                "continue_final_message",
            )
        opens_reply = not continue_final_message and add_generation_prompt is not False
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
        return self._render(messages, tools, opens_reply, options)

    def _render_open(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
    ) -> str:
        """Return the prompt up to the end of the content of the last message.

        A tag after the content marks its end in the prompt. A space after the tag shows whether the
        template trims the content. If it does, whitespace before the tag, which the tag protected,
        is trimmed here.
        """
        last_message = messages[-1]
        if not last_message["content"] and "tool_calls" in last_message:
            raise InvalidRequest(
                "continue_final_message needs a last message with content", "continue_final_message"
            )
        end_tag = unused_character(messages) * 2
        messages = [
            *messages[:-1],
            {**last_message, "content": last_message["content"] + end_tag + " "},
        ]
        prompt, found, remainder = self._render(messages, tools, False, options).rpartition(end_tag)
        if not found:
            raise InvalidRequest(
                "the chat template does not write the last message as it is, so it cannot be "
                "continued: leave continue_final_message out",
                "continue_final_message",
            )
        return prompt if remainder.startswith(" ") else prompt.rstrip()

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        opens_reply: bool,
        options: dict[str, Any],
    ) -> str:
        """Return the prompt for the first form of the messages that the template can render."""
        first_error: ChatTemplateError | None = None
        for message_form in argument_forms(self._in_parts(messages)):
            try:
                return self._render_checked(message_form, tools, opens_reply, options)
            except ChatTemplateError as error:
                first_error = first_error or error
        assert first_error is not None
        raise first_error

    def _system_for_developer(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rename `developer` messages to `system` if the template does not support `developer`.

        `developer` is OpenAI's newer name for `system`. All system messages become one at the
        start, because templates expect that.
        """
        knows_developer = "'developer'" in self.source or '"developer"' in self.source
        if knows_developer or all(message["role"] != "developer" for message in messages):
            return messages
        system_contents = [
            message["content"] for message in messages if message["role"] in ("system", "developer")
        ]
        other_messages = [
            message for message in messages if message["role"] not in ("system", "developer")
        ]
        return [
            {"role": "system", "content": "\n\n".join(filter(None, system_contents))},
            *other_messages,
        ]

    def _render_checked(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        opens_reply: bool,
        options: dict[str, Any],
    ) -> str:
        variables = {
            "documents": None,  # templates ask whether it is none, and an undefined value is not
            **options,
            **self._specials,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": opens_reply,
            "range": counted_range(),
        }
        try:
            return "".join(self._render_pieces(variables))
        except TemplateRefusal as error:
            raise ChatTemplateError(
                f"the chat template refuses these messages: {_one_line(error)}"
            ) from None
        except SecurityError as error:
            raise ChatTemplateError(
                f"the chat template does something that a template may not do: {_one_line(error)}"
            ) from None
        except Exception as error:  # a template can raise anything that its expressions can
            raise ChatTemplateError(
                f"the chat template cannot render these messages: {_one_line(error)}"
            ) from error

    def _render_pieces(self, variables: dict[str, Any]) -> Iterator[str]:
        deadline = time.monotonic() + MAX_SECONDS
        rendered_chars = 0
        for piece in self._template.generate(variables):
            rendered_chars += len(piece)
            if rendered_chars > MAX_CHARS:
                raise OverflowError(f"the prompt is longer than {MAX_CHARS} characters")
            if time.monotonic() > deadline:
                raise TimeoutError(f"it takes longer than {MAX_SECONDS:g} s")
            yield piece


def _one_line(error: Exception) -> str:
    """Return the message of an error as one line of limited length."""
    message = " ".join(str(error).split()) or type(error).__name__
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."


def check_options(options: dict[str, Any], specials: dict[str, str] | None = None) -> None:
    """Reject options with the name of a variable that the request or the server sets."""
    for option_name in options:
        if option_name in RESERVED or option_name in (specials or {}):
            raise InvalidRequest(
                f"chat_template_kwargs may not set {option_name[:64]!r}, which the request or the "
                "model sets itself: leave it out",
                "chat_template_kwargs",
            )


def select_template(
    tokenizer: Tokenizer, source: str | None = None, tools: bool = False
) -> ChatTemplate:
    """Return the given template, or that of the model.

    A model may have a separate template for chats with tools, which is used if there are tools.
    """
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
    return _compile_cached(source, tuple(tokenizer.specials.items()))


@lru_cache(maxsize=16)
def _compile_cached(source: str, specials: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(specials))  # takes 8 ms, which every request would pay


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    /,
    tools: list[dict[str, Any]] | None = None,
    **options: Any,
) -> list[int]:
    """Return the tokens of the prompt.

    Special tokens that the template writes are special tokens. The same characters in a message, a
    tool or an option are only characters. `options` are those of `ChatTemplate.render`.
    """
    rendered, mark = render_marked(tokenizer, template, messages, tools, **options)
    if mark is None:
        return tokenizer.encode(rendered, add_special_tokens=False, parse_special=True)
    return tokenizer.encode_marked(rendered, mark)


def render_marked(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    /,
    tools: list[dict[str, Any]] | None = None,
    **options: Any,
) -> tuple[str, str | None]:
    """Return the rendered text and the mark before special tokens that the template did not write.

    The mark is None if there is no such token. To distinguish the tokens after rendering, a mark is
    put before each special token in the input of the caller. A mark is not whitespace and precedes
    the first character of a token, so templates that trim, split or compare text still work.
    """
    plain_inputs = [
        check_messages(messages),
        None if tools is None else to_plain(tools, "tools"),
        to_plain(options, "chat_template_kwargs"),
    ]
    mark = unused_character(plain_inputs)

    def protect(rendered: str) -> str:
        return tokenizer.protect(rendered, mark)

    safe_messages, safe_tools, safe_options = map_text(plain_inputs, protect)
    for message, safe_message in zip(plain_inputs[0], safe_messages, strict=True):
        safe_message["role"] = message["role"]  # a name, which templates compare
    rendered = template.render(safe_messages, safe_tools, **safe_options)
    rendered = rendered.replace(f"\\u{ord(mark):04x}", mark)  # a template may write JSON in ASCII
    return rendered, mark if mark in rendered else None


# ---- texts inside a structure --------------------------------------------------------------------


def map_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a structure with every string changed, including the keys of objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_text(item, change) for item in value]
    if isinstance(value, dict):
        return {change(member): map_text(item, change) for member, item in value.items()}
    return value


def _strings_in(value: Any) -> Iterator[str]:
    """Yield every string in a structure, including the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings_in(item)
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _strings_in(item)


def unused_character(value: Any) -> str:
    """Return a noncharacter that occurs in no string of `value`, not even as an escape sequence."""
    all_text = "\n".join(_strings_in(value)).lower()
    for character in _NONCHARACTERS:
        if character not in all_text and f"{ord(character):04x}" not in all_text:
            return character
    raise InvalidRequest(
        "messages use every noncharacter from U+FDD0 to U+FDEF: leave one of them out", "messages"
    )
