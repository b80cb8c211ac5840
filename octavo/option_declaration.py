"""Declares an option once, as a field of a dataclass, with default, check and help text.

    port: Annotated[int, Option("Port to listen on.", check=integer_range(0, 65535))] = 8000

EngineOptions (octavo/engine_options.py), ServeConfig and Limits (octavo/serve/) are such
dataclasses. They call `check_options` in __post_init__, so an object of them is always valid.
The command line shows every field with a help text as an option (octavo/cli/options.py).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_type_hints

from octavo.errors import InvalidRequest
from octavo.params import check_integer, check_real

# (name, value) -> the value to keep. Raises InvalidRequest.
Check = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Option:
    """The declaration of an option: its help, its command-line flag and its allowed values."""

    help: str = ""  # If it is empty, the field is not an option of the command line.
    # The box of --help. None stands for the box of the command's own options.
    panel: (
        Literal["Model", "Memory", "Scheduling", "Kernels", "Sampling", "Safety", "Load", "Ray"]
        | None
    ) = None
    metavar: str = ""
    flag: str = ""  # If it is empty, the flag is the name of the field with dashes.
    aliases: tuple[str, ...] = ()  # Other names of the flag.
    # How the command line reads the value: by its type, as a size such as 32K, as the name of a
    # file with a chat template, as JSON, or as METHOD[,NAME=VALUE...]. Only "size or zero" may be
    # 0, and "size or auto" may also be "auto", which means None.
    reads: Literal[
        "", "size", "size or zero", "size or auto", "chat template", "json", "speculative"
    ] = ""
    show_default: bool = False
    check: Check | None = None  # The value None also passes if it is the default.


# ---- checks ------------------------------------------------------------------------------------


def integer_range(low: int, high: int | None = None) -> Check:
    return lambda name, value: check_integer(name, value, low, high)


def real(low: float, high: float, open_low: bool = False) -> Check:
    return lambda name, value: check_real(name, value, low, high, open_low)


def one_of(*names: str) -> Check:
    def check(name: str, value: Any) -> Any:
        if value not in names:
            raise InvalidRequest(f"{name} must be one of {', '.join(names)}, got {value!r}", name)
        return value

    return check


def path(name: str, value: Any) -> str:
    """Return the path as a string, which can be sent to another process."""
    try:
        return os.fspath(value)
    except TypeError:
        raise InvalidRequest(f"{name} must be a path, got {value!r:.100}", name) from None


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Return a list of strings as a tuple."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
        raise InvalidRequest(f"{name} must be a list of strings, got {value!r:.100}", name)
    return tuple(value)


# ---- the fields of a dataclass -----------------------------------------------------------------


@functools.cache
def option_declarations(group: type) -> dict[str, Option]:
    """Return the declarations of the fields that have one."""
    hints = get_type_hints(group, include_extras=True)
    metadata = {name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()}
    return {name: option for name, option in metadata.items() if isinstance(option, Option)}


def flag_of(group: type, name: str) -> str:
    """Return the command-line flag of a field."""
    return option_declarations(group)[name].flag or f"--{name.replace('_', '-')}"


def check_option(group: type, name: str, value: Any, shown_name: str) -> Any:
    """Return the value that a field keeps. An error calls the field `shown_name`."""
    check = option_declarations(group)[name].check
    if check is None or (value is None and getattr(group, name) is None):
        return value
    return check(shown_name, value)


def check_options(options: Any) -> None:
    """Check and convert the values of a frozen dataclass, in its __post_init__.

    NumPy numbers become Python's, paths become strings and lists become tuples."""
    group: type = type(options)
    for field in fields(options):
        if field.name in option_declarations(group):
            value = check_option(group, field.name, getattr(options, field.name), field.name)
            object.__setattr__(options, field.name, value)
