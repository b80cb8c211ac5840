"""The Jinja environment of chat templates: a sandbox with limits on the size of each value.

A template is an untrusted program. It may compute text and nothing else. Time and output are
limited where the template runs (octavo.text.chat).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from datetime import datetime
from string import Formatter
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import do_format
from jinja2.meta import TrackingCodeGenerator
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 4_000_000  # limits a rendered prompt and every intermediate value
# Limits all range() loops of a template together, including those without output.
MAX_ITERATIONS = 1_000_000
MAX_WIDTH = 9_999  # longest formatted value, in characters
_WIDE = re.compile(r"\d{5}|\{")  # in the part of a format string after the colon
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)")


class TemplateRefusal(jinja2.TemplateError):
    """The template called raise_exception."""


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON. The filter of Jinja escapes for HTML, which models were not trained on."""
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > MAX_WIDTH:
        raise OverflowError(f"it indents by more than {MAX_WIDTH} characters")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Generation(Extension):
    """Renders the body of `{% generation %}`, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _size_of(value: Any) -> int:
    if isinstance(value, int):
        return abs(value)
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def _check_size(*values: Any) -> None:
    """Reject operands whose result could take all memory, such as in 'x' * 10**10."""
    if any(_size_of(value) > MAX_CHARS for value in values):
        raise OverflowError(f"it makes something larger than {MAX_CHARS}")


def _check_width(pattern: str, percent: bool) -> None:
    """Reject a format string that pads to a great width.

    Its result would be larger than the format string and its arguments.
    """
    if percent:
        too_wide = _WIDE_PERCENT.search(pattern) is not None
    else:
        too_wide = any(_WIDE.search(spec or "") for _, _, spec, _ in Formatter().parse(pattern))
    if too_wide:
        raise OverflowError(f"it formats to more than {MAX_WIDTH} characters")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_size(left, right)
        if operator == "*" and not (isinstance(left, float) or isinstance(right, float)):
            _check_size(_size_of(left) * _size_of(right))
        elif operator == "**" and abs(right) > 64:
            raise OverflowError("it raises to a power above 64")
        elif operator == "%" and isinstance(left, str):
            _check_width(left, percent=True)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            _check_size(*args, *kwargs.values())
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandboxed str.format with a check of the width of the format string."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_width(value.__self__, percent=False)
            return formatted(*args, **kwargs)

        return checked


def _with_size_check(template_filter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(template_filter)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_size(*args, *kwargs.values())
        return template_filter(*args, **kwargs)

    return checked


def _format(pattern: Any, *args: Any, **kwargs: Any) -> str:
    _check_width(str(pattern), percent=True)
    return do_format(pattern, *args, **kwargs)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return an environment with the functions that transformers offers to chat templates."""
    # The optimizer takes time that grows with the cube of the depth of an expression.
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    for name in ("center", "indent", "batch", "slice", "wordwrap", "round"):
        environment.filters[name] = _with_size_check(environment.filters[name])
    environment.filters["format"] = _format
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda format: datetime.now().strftime(format),
    )
    del environment.globals["lipsum"]
    return environment


def undeclared_variables(environment: jinja2.Environment, tree: nodes.Template) -> set[str]:
    """Return the variables that a template reads and does not set.

    Jinja's find_undeclared_variables does the same with the optimizer, which is too slow.
    """
    generator = TrackingCodeGenerator(environment)
    generator.optimizer = None
    generator.visit(tree)
    return generator.undeclared_identifiers


def counted_range() -> Callable[..., range]:
    """Return a range() whose loops have MAX_ITERATIONS steps in total."""
    remaining_steps = MAX_ITERATIONS

    def counted(*args: int) -> range:
        nonlocal remaining_steps
        result = range(*args)
        remaining_steps -= len(result)
        if remaining_steps < 0:
            raise OverflowError(f"it loops more than {MAX_ITERATIONS} times")
        return result

    return counted
