"""Help texts without Python's types, and error messages with hints for users of other programs.

A help text shows `--version` in place of `--version <bool>`. An option that takes a value has a
metavar, such as N or FILE, which says more than a type. typer's own classes show both the metavar
of an argument and its type, and the type of a flag.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from octavo.cli import other_programs

# The first words of a library's message about a value of the wrong type -> a message in our words.
TYPE_MESSAGES = {
    "Input should be a valid integer": "it must be an integer",
    "Input should be a valid number": "it must be a number",
}
# typer does not export the class of errors in a command line, from which BadParameter derives.
UsageError: Any = typer.BadParameter.__mro__[1]


def without_types(parameters: list[Any]) -> list[Any]:
    """Change the parameters so that help texts do not show their types, and return them."""
    for parameter in parameters:
        if isinstance(parameter, TyperArgument):
            parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
        elif parameter.is_flag and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


def wrap_option_names() -> None:
    """Make the tables of a help text wrap long names of options, instead of cutting them off."""
    from rich.text import Text
    from typer import rich_utils

    class WrappedNames(rich_utils.OptionHighlighter):
        def highlight(self, text: Text) -> None:
            super().highlight(text)
            text.overflow = "fold"

    rich_utils.highlighter = WrappedNames()


class PlainCommand(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return without_types(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        wrap_option_names()
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)  # The parser empties its argument.
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            unknown = getattr(error, "option_name", None)
            for word in words:
                name = word.partition("=")[0]
                # The parser divides -ngl into -n, -g and -l, and names the first of them.
                if unknown and name.startswith(unknown) and name in other_programs.OPTIONS:
                    error.message = f"No such option: {name}. {other_programs.OPTIONS[name]}"
                    error.possibilities = []
            library_message, _, _ = error.message.partition(",")
            error.message = TYPE_MESSAGES.get(library_message, error.message)
            raise


class PlainGroup(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return without_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except UsageError as error:
            if ctx.parent is None and args[0] in other_programs.COMMANDS:
                hint = other_programs.COMMANDS[args[0]]
                error.message = f"No such command: {args[0]}. {hint}"
            raise


class Application(typer.Typer):
    """An application, or a group of commands, whose help texts show no types."""

    def __init__(self, **options: Any):
        super().__init__(cls=PlainGroup, **options)

    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, **{"cls": PlainCommand} | options)
