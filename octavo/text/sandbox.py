"""The Jinja environment in which chat templates run: sandboxed, and bounded in the size of what one
operation makes.

A template is a program that somebody else wrote. It may compute text and nothing else. Time and
output are bounded where the template is run (octavo.text.chat).
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

MAX_CHARS = 4_000_000  # of a rendered prompt, and of any value on the way to it
# of all range() loops together: loops that produce no output are bounded by this
MAX_ITERATIONS = 1_000_000
MAX_WIDTH = 9_999  # of a formatted value
_WIDE = re.compile(r"\d{5}|\{")  # in the part of a format string after the colon
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)")


class Refused(jinja2.TemplateError):
    """The template called raise_exception."""


def _raise_exception(message: str) -> NoReturn:
    raise Refused(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON. Jinja's own filter escapes for HTML, which models were not trained on."""
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > MAX_WIDTH:
        raise OverflowError(f"it indents by more than {MAX_WIDTH} characters")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training. A prompt needs its body alone."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _size(value: Any) -> int:
    if isinstance(value, int):
        return abs(value)
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def _check_size(*values: Any) -> None:
    """Refuse operands so large that the result could take all memory, such as in 'x' * 10**10."""
    if any(_size(value) > MAX_CHARS for value in values):
        raise OverflowError(f"it makes something larger than {MAX_CHARS}")


def _check_width(pattern: str, percent: bool) -> None:
    """Refuse a format string that pads to a great width: its result is larger than it and its
    arguments."""
    if percent:
        wide = _WIDE_PERCENT.search(pattern) is not None
    else:
        wide = any(_WIDE.search(spec or "") for _, _, spec, _ in Formatter().parse(pattern))
    if wide:
        raise OverflowError(f"it formats to more than {MAX_WIDTH} characters")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_size(left, right)
        if operator == "*" and not (isinstance(left, float) or isinstance(right, float)):
            _check_size(_size(left) * _size(right))
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
        """The sandboxed form of str.format, for those patterns that do not pad to a great width."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_width(value.__self__, percent=False)
            return formatted(*args, **kwargs)

        return checked


def _bounded(filter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(filter)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_size(*args, *kwargs.values())
        return filter(*args, **kwargs)

    return checked


def _format(pattern: Any, *args: Any, **kwargs: Any) -> str:
    _check_width(str(pattern), percent=True)
    return do_format(pattern, *args, **kwargs)


def make_environment() -> ImmutableSandboxedEnvironment:
    """An environment with what transformers gives chat templates."""
    # The optimizer takes time that grows with the cube of the depth of an expression.
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    for name in ("center", "indent", "batch", "slice", "wordwrap", "round"):
        environment.filters[name] = _bounded(environment.filters[name])
    environment.filters["format"] = _format
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda format: datetime.now().strftime(format),
    )
    del environment.globals["lipsum"]
    return environment


def undeclared_variables(environment: jinja2.Environment, source: str) -> set[str]:
    """The variables that a template reads and does not set.

    Jinja's find_undeclared_variables does the same with the optimizer, which is too slow."""
    generator = TrackingCodeGenerator(environment)
    generator.optimizer = None
    generator.visit(environment.parse(source))
    return generator.undeclared_identifiers


def counted_range() -> Callable[..., range]:
    """A range() whose loops have MAX_ITERATIONS steps in all."""
    left = MAX_ITERATIONS

    def limited(*args: int) -> range:
        nonlocal left
        result = range(*args)
        left -= len(result)
        if left < 0:
            raise OverflowError(f"it loops more than {MAX_ITERATIONS} times")
        return result

    return limited
