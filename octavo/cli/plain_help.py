"""Help texts without Python's types: `--version` in place of `--version <bool>`.

An option that takes a value has a metavar, such as N or FILE, which says more than a type. typer's
own classes show both the metavar of an argument and its type, and the type of a flag.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup


def without_types(parameters: list[Any]) -> list[Any]:
    """Change the parameters so that help texts do not show their types, and return them."""
    for parameter in parameters:
        if isinstance(parameter, TyperArgument):
            parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
        elif parameter.is_flag and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


class PlainCommand(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return without_types(super().get_params(ctx))


class PlainGroup(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return without_types(super().get_params(ctx))


class Application(typer.Typer):
    """An application, or a group of commands, whose help texts show no types."""

    def __init__(self, **options: Any):
        super().__init__(cls=PlainGroup, **options)

    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, **{"cls": PlainCommand} | options)
