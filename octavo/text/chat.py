"""Chat messages to a prompt, by the model's own template, in a sandbox.

A template is a program that came with the model: it runs in Jinja's immutable sandbox and can compute text, nothing else.
What a user wrote can never become a control token: see `encode_chat`. Knows nothing of HTTP or of any model's format.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from octavo.errors import InvalidRequest, ModelError
from octavo.text.tokenizer import Tokenizer
from octavo.text.tool_prompt import spell_out

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_CHARS = 4_000_000  # of a rendered prompt
MAX_SECONDS = 2.0  # looked at between pieces of output, so that a template cannot go on for ever
# of all range() loops together: those that produce no output are bounded by this
MAX_ITERATIONS = 1_000_000
MAX_DEPTH = 100  # of lists and objects within each other
_OWN = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
# Unicode keeps these out of interchange: they mark places in a text, and are chosen so that they do not occur in it.
_NONCHARACTERS = [chr(c) for c in range(0xFDD0, 0xFDF0)]


class _Refused(jinja2.TemplateError):
    """The template itself called raise_exception."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Generation(Extension):
    """`{% generation %}` marks what training counts as the assistant's words; for a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True)
        ).set_lineno(line)


def _check_size(*values: Any) -> None:
    """Widths, counts and lengths that one operation may have: 'x' * 10**10 would take all memory before anybody could look."""
    for value in values:
        size = (
            abs(value)
            if isinstance(value, int)
            else len(value)
            if isinstance(value, (str, list, tuple))
            else 0
        )
        if size > MAX_CHARS:
            raise OverflowError(f"it makes something larger than {MAX_CHARS}")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_size(left, right)
        if operator == "*" and not (isinstance(left, float) or isinstance(right, float)):
            sizes = [value if isinstance(value, int) else len(value) for value in (left, right)]
            _check_size(sizes[0] * sizes[1])
        elif operator == "**" and abs(right) > 64:
            raise OverflowError("it raises to a power above 64")
        elif (
            operator == "%" and isinstance(left, str) and re.search(r"%[^a-zA-Z%]*(\d{5}|\*)", left)
        ):
            raise OverflowError("it formats to more than 9999 characters")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(obj, "__self__", None), str):
            _check_size(*args, *kwargs.values())
        return super().call(context, obj, *args, **kwargs)


def _bounded(filter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(filter)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_size(*args, *kwargs.values())
        return filter(*args, **kwargs)

    return checked


def _environment() -> ImmutableSandboxedEnvironment:
    env = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    for name in ("center", "indent", "batch", "slice", "wordwrap", "round"):
        env.filters[name] = _bounded(env.filters[name])
    env.filters["tojson"] = _tojson
    env.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda format: datetime.now().strftime(format),
    )
    del env.globals["lipsum"]
    return env


def _counted_range() -> Callable[..., range]:
    left = MAX_ITERATIONS

    def limited(*args: int) -> range:
        nonlocal left
        result = range(*args)
        left -= len(result)
        if left < 0:
            raise OverflowError(f"it loops more than {MAX_ITERATIONS} times")
        return result

    return limited


class ChatTemplate:
    """A compiled template. `specials` are the tokenizer's named special tokens, which templates write by name."""

    def __init__(self, source: str, specials: dict[str, str] | None = None):
        env = _environment()
        self._specials = specials or {}
        self._reserved = (
            _OWN
            | set(self._specials)
            | set(env.globals)
            | {"bos_token", "eos_token", "unk_token", "pad_token"}
        )
        try:
            self._template = env.from_string(source)
            variables = find_undeclared_variables(env.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template has a syntax error in line {error.lineno}: {error.message}"
            ) from error
        self.source = source
        self.knows_tools = "tools" in variables
        self.options = frozenset(variables - self._reserved)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> str:
        """The prompt. `continue_final_message` leaves the last message open for the model to go on with, and then there is
        no generation prompt. `options` are further variables that this template reads: see `self.options`."""
        messages = check_messages(messages)
        for name in options:
            if name not in self.options:
                known = ", ".join(sorted(self.options)) or "none"
                raise InvalidRequest(
                    f"the chat template has no option {name!r}; it has: {known}",
                    "chat_template_kwargs",
                )
        end = ""
        if continue_final_message:
            # A tag after the last message's text shows where that text ends in the prompt. The space after it shows
            # whether the template trims the text: then what the tag kept from being trimmed is trimmed here.
            end = _unused(messages) * 2
            content = messages[-1].get("content")
            if content is None:
                raise InvalidRequest(
                    "continue_final_message needs a last message with content",
                    "continue_final_message",
                )
            messages = [*messages[:-1], {**messages[-1], "content": content + end + " "}]
        text = self._run(
            {
                "documents": None,  # templates ask whether it is none, and what is undefined is not
                **_plain(options, "chat_template_kwargs"),
                **self._specials,
                "messages": messages,
                "tools": None if tools is None else _plain(tools, "tools"),
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
                "range": _counted_range(),
            }
        )
        if continue_final_message:
            before, found, after = text.rpartition(end)
            if not found:
                raise InvalidRequest(
                    "the chat template does not write the last message as it is",
                    "continue_final_message",
                )
            text = before if after.startswith(" ") else before.rstrip()
        return text

    def _run(self, variables: dict[str, Any]) -> str:
        deadline = time.monotonic() + MAX_SECONDS
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                size += len(part)
                if size > MAX_CHARS:
                    raise OverflowError(f"the prompt is longer than {MAX_CHARS} characters")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"it takes longer than {MAX_SECONDS:g} s")
        except _Refused as error:
            raise InvalidRequest(
                f"the chat template refuses these messages: {error}", "messages"
            ) from None
        except SecurityError as error:
            raise ModelError(
                f"the chat template tries what a template may not do: {error}"
            ) from None
        except Exception as error:  # a template can raise anything that its expressions can
            raise InvalidRequest(
                f"the chat template cannot render these messages: {error}", "messages"
            ) from error
        return "".join(parts)


def select_template(
    tokenizer: Tokenizer, source: str | None = None, tools: bool = False
) -> ChatTemplate:
    """The given template, or the model's own: the one for tools where tools are used and it has one."""
    if source is None and tools:
        source = tokenizer.chat_templates.get("tool_use")
    if source is None:
        source = tokenizer.chat_template
    if source is None:
        raise InvalidRequest(
            "this model has no chat template: pass chat_template=..., or use completions, which take a plain prompt",
            "messages",
        )
    return _compiled(source, tuple(tokenizer.specials.items()))


@lru_cache(maxsize=16)
def _compiled(source: str, specials: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(specials))  # 8 ms, which every request would pay


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    **options: Any,
) -> list[int]:
    """The prompt's tokens: those of the rendered text, where special tokens that the template wrote are special tokens,
    and the same characters in a message, a tool or an option are only characters. Options as
    render_marked's."""
    text, mark = render_marked(tokenizer, template, messages, tools, **options)
    if mark is None:
        return tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    return tokenizer.encode_marked(text, mark)


def render_marked(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **options: Any,
) -> tuple[str, str | None]:
    """The rendered text, and what marks special tokens in it that the template did not write: None if there are none.

    To tell them apart after rendering, a mark goes before each special token in what the caller sent. A mark is not white
    space and stands before the first character of something, so a template that trims, splits or compares finds its way.
    """
    messages = check_messages(messages)
    tools = None if tools is None else _plain(tools, "tools")
    if not template.knows_tools:
        messages = spell_out(messages, tools)
        tools = None
    given = [messages, tools, _plain(options, "chat_template_kwargs")]
    mark = _unused(given)

    def protect(value: Any) -> Any:
        return _map_text(value, lambda text: tokenizer.protect(text, mark))

    safe_messages, safe_tools, safe_options = protect(given)
    text = template.render(
        safe_messages, safe_tools, add_generation_prompt, continue_final_message, **safe_options
    )
    text = text.replace(f"\\u{ord(mark):04x}", mark)  # a template may write JSON in ASCII
    return text, mark if mark in text else None


# ---- what a caller sent -----------------------------------------------------------------------------


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as templates expect them: content as one string, the arguments of tool calls as objects."""
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest(
            'messages must be a non-empty list of {"role": ..., "content": ...}', "messages"
        )
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidRequest(
                f"messages.{i} must be an object with role and content, got {_kind(message)}",
                f"messages.{i}",
            )
        if message.get("role") not in ROLES:
            got = repr(message.get("role"))[:40]
            raise InvalidRequest(
                f"messages.{i}.role must be one of {', '.join(ROLES)}, got {got}",
                f"messages.{i}.role",
            )
        message = _plain(message, f"messages.{i}")
        if message["role"] == "assistant" and message.get("tool_calls"):
            message["tool_calls"] = _parsed_arguments(
                message["tool_calls"], f"messages.{i}.tool_calls"
            )
        if message.get("content") is not None or not message.get("tool_calls"):
            message["content"] = _joined(message.get("content"), f"messages.{i}.content")
        checked.append(message)
    return checked


def _joined(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        parts = '{"type": "text", "text": ...}'
        raise InvalidRequest(
            f"{where} must be a string or a list of {parts}, got {_kind(content)}", where
        )
    for j, part in enumerate(content):
        if (
            not isinstance(part, dict)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            message = (
                f'{where}.{j} must be {{"type": "text", "text": ...}}: this model takes text only'
            )
            raise InvalidRequest(message, f"{where}.{j}")
    return "".join(part["text"] for part in content)


def _parsed_arguments(calls: Any, where: str) -> list[dict[str, Any]]:
    """The API sends a call's arguments as a string of JSON; templates want what it says. They know a call without "function"
    around it too."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidRequest(f"{where} must be a list of objects", where)
    parsed = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            wanted = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
            raise InvalidRequest(f"{where} must be a list of {wanted}", where)
        if "function" in call and isinstance(function.get("arguments"), str):
            try:
                function = {**function, "arguments": json.loads(function["arguments"] or "{}")}
            except (ValueError, RecursionError):
                raise InvalidRequest(
                    f"{where}: the arguments of a call must be a string of valid JSON", where
                ) from None
            call = {**call, "function": function}
        parsed.append(call)
    return parsed


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of JSON's types alone: a template must not get hold of anything that has methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{where} is nested more than {MAX_DEPTH} levels deep", where)
    if isinstance(value, (list, tuple)):
        return [_plain(item, where, depth + 1) for item in value]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: _plain(item, where, depth + 1) for key, item in value.items()}
    raise InvalidRequest(
        f"{where} must be made of strings, numbers, booleans, lists and objects, got {_kind(value)}",
        where,
    )


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    """The same structure with every string in it changed, names included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_text(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): _map_text(item, change) for key, item in value.items()}
    return value


def _unused(value: Any) -> str:
    """A noncharacter that occurs in no string of `value`, nor its escape sequence."""
    text = json.dumps(value, ensure_ascii=False)
    for char in _NONCHARACTERS:
        if char not in text and f"{ord(char):04x}" not in text.lower():
            return char
    raise InvalidRequest(
        "messages use every noncharacter from U+FDD0 to U+FDEF: leave one of them out", "messages"
    )
