"""Options that several commands share. A command takes a whole group of options as one parameter:

    @command
    def complete(model: Model = None, *, prompt: str = "", engine: EngineOptions) -> None: ...

A group is a dataclass whose fields are declared with Option (octavo/option_declaration.py).
`command` shows typer each field that has a help text as an option and passes the function the group
with the values that the user gave. The defaults are those of the group, or of the instance that is
the parameter's default. A field is left out if the command has a parameter of the same name. An
error of Octavo becomes one line and exit code 2.

Must not import torch: `octavo --help` has to be quick.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_origin, get_type_hints

import typer

from octavo.cli import status
from octavo.cli.terminal import tokens
from octavo.config import EMBEDDED, SpeculativeConfig
from octavo.core.draft_methods import OFF, parse_speculative
from octavo.engine_options import EngineOptions
from octavo.errors import (
    MEMORY_RAN_OUT,
    ChatTemplateError,
    InvalidRequest,
    OctavoError,
    is_out_of_memory,
)
from octavo.model_files import find_model_files
from octavo.option_declaration import Option, check_option, flag_of, option_declarations
from octavo.params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


# ---- values --------------------------------------------------------------------------------------


def size(text: str) -> int:
    """Read a size. 32K is 32,768, and 1.5G is 1,610,612,736."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", str(text).strip(), re.IGNORECASE)
    value = float(match[1]) * UNITS[match[2].upper()] if match else 0.5
    if value != int(value) or value < 1:
        raise typer.BadParameter(
            f"{text!r} is not a size: give a whole number like 4096, or 32K, 1.5M, 80G (K is 1,024)"
        )
    return int(value)


def size_or_none(text: str) -> int:
    return 0 if str(text).strip() == "0" else size(text)


def size_or_auto(text: str) -> int | None:
    return None if str(text).lower() == "auto" else size(text)


def sizes(text: str) -> list[int]:
    return [size(part) for part in text.split(",")]


def speculative(text: str) -> SpeculativeConfig | str:
    try:
        return parse_speculative("--speculative", text) or OFF
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from None


def read_template(path: str) -> str:
    """Read a chat template and compile it, so that its author and not a client sees an error.

    A value with an expression or a statement of Jinja is the template itself, as in vLLM."""
    from octavo.text.chat import ChatTemplate

    is_template = "{{" in path or "{%" in path
    try:
        text = path if is_template else Path(path).read_text(encoding="utf-8")
        return ChatTemplate(text).source
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, ChatTemplateError) as error:
        raise typer.BadParameter(f"{path} is not a chat template: {error}") from None


def read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r:.100} is not JSON: {error}") from None


# How the command line reads the values of Option.reads.
READERS: dict[str, Callable[[str], Any]] = {
    "size": size,
    "size or zero": size_or_none,
    "size or auto": size_or_auto,
    "chat template": read_template,
    "json": read_json,
    "speculative": speculative,
}


# ---- groups --------------------------------------------------------------------------------------


def option(
    help: str, panel: str | None, metavar: str | None = None, *names: str, **settings: Any
) -> Any:
    """Declare an option. The default is shown only if `show_default` asks for it."""
    return typer.Option(
        *names,
        help=help,
        rich_help_panel=panel,
        metavar=metavar,
        **{"show_default": False} | settings,
    )


def flag(name: str, help: str, panel: str | None = None) -> Any:
    return option(help, panel, "", name)


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A directory, a .gguf file or a name on huggingface.co. "
        f"Default: the embedded model, {EMBEDDED}.",
        show_default=False,
    ),
]
Output = Annotated[
    Path | None, option("Write the result to this file as JSON.", None, "FILE", "--json")
]


def declared_option(group: type, name: str, default: Any, panel: str | None) -> Any:
    """Return the command-line option of a field of a group."""
    declared = option_declarations(group)[name]
    names = [flag_of(group, name), *declared.aliases]
    if isinstance(default, bool):
        return option(declared.help, panel, "", *names)
    settings: dict[str, Any] = {"show_default": declared.show_default}
    if declared.reads:
        settings["parser"] = READERS[declared.reads]
        if declared.show_default and default >= UNITS["K"]:
            settings["show_default"] = tokens(default)
    return option(declared.help, panel, declared.metavar, *names, **settings)


def engine_option(name: str) -> Any:
    """Return an engine option, for a command that has this one and not the whole group."""
    return declared_option(EngineOptions, name, getattr(EngineOptions, name), panel=None)


def bench_options(**changes: Any) -> EngineOptions:
    """Return the default options of a bench. It measures without drafts unless --speculative asks
    for them."""
    return EngineOptions(speculative_config=None, **changes)


def load_llm(model: str | dict[str, Any] | None, engine: EngineOptions, **changes: Any) -> LLM:
    """Load a model with these options, some of them changed, and show the progress."""
    options = replace(engine, **changes)
    check_model_files(model, options)
    status.show("importing PyTorch")
    from octavo.llm import LLM

    name = "the model" if isinstance(model, dict) else model or EMBEDDED

    def progress(fraction: float) -> None:
        is_loaded = fraction >= 1
        status.show("allocating memory" if is_loaded else f"loading {name}, {fraction:.0%}")

    status.begin(f"opening {name}")  # A log message may have ended the status line.
    if status.is_shown():
        show_compilation()
    status.show(f"opening {name}")
    on_progress: bool | Callable[[float], None] = progress if status.is_shown() else False
    llm = LLM.from_options(model, options, progress=on_progress)
    status.show("computing the first token")
    return llm


def check_model_files(model: str | dict[str, Any] | None, engine: EngineOptions) -> None:
    """Refuse a wrong name, and a directory that lacks a file, before PyTorch is imported."""
    if not isinstance(model, str):
        return
    find_model_files(
        model,
        weights=engine.load_format != "dummy",
        tokenizer=engine.tokenizer is None and not engine.skip_tokenizer_init,
    )


def show_compilation() -> None:
    """Show in the status line that CPU kernels are compiled, if they are."""
    from octavo.ops.cpu.thread_pool import report_compilation

    @contextlib.contextmanager
    def compiling() -> Iterator[None]:
        status.show(status.PHASES["compiling"])
        yield
        status.show("allocating memory")

    report_compilation(compiling)


NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
# Sampling defaults for a model that recommends nothing. The embedded model rambles at a temperature
# of 0.7 and repeats itself at 0.2.
FALLBACK = {"temperature": 0.4, "top_p": 0.9}


@dataclass
class SamplingOptions:
    """The options that choose tokens and end a text."""

    temperature: Annotated[
        float | None,
        Option(
            "Sampling temperature; 0 means greedy decoding. "
            "Default: the model's recommendation, else 0.4.",
            "Sampling",
            metavar="X",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Option(
            "Sample from the most likely tokens whose probabilities sum to this value. "
            "Default: the model's, else 0.9.",
            "Sampling",
            metavar="X",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        Option(
            "Sample from this many of the most likely tokens; 0 means all. "
            "Default: the model's, else 0.",
            "Sampling",
            metavar="N",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        Option(
            "Drop tokens whose probability is below this fraction of the largest one. "
            "Default: the model's, else 0.",
            "Sampling",
            metavar="X",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Option(
            "Penalty on tokens of the prompt and the reply; above 1 discourages repetition. "
            "Default: the model's, else 1; in a chat 1.05.",
            "Sampling",
            metavar="X",
        ),
    ] = None
    presence_penalty: Annotated[
        float,
        Option(
            "Penalty on tokens that the reply already contains, -2 to 2.", "Sampling", metavar="X"
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Option(
            "Penalty per earlier occurrence of a token in the reply, -2 to 2.",
            "Sampling",
            metavar="X",
        ),
    ] = 0.0
    seed: Annotated[
        int | None,
        Option("Random seed; the same seed gives the same text.", "Sampling", metavar="N"),
    ] = None
    max_tokens: Annotated[
        int,
        Option(
            "Maximum number of tokens to generate.",
            "Sampling",
            metavar="N",
            reads="size",
            show_default=True,
        ),
    ] = 128
    stop: Annotated[
        list[str] | None,
        Option("Stop before this text. May be given several times.", "Sampling", metavar="TEXT"),
    ] = None

    def with_defaults(
        self, recommended: dict[str, Any], fallback: dict[str, float] = FALLBACK
    ) -> SamplingOptions:
        """Fill in the options that the user left out: with the model's recommendation, or with the
        fallback if the model recommends nothing."""
        defaults: dict[str, Any] = NEUTRAL | (recommended or fallback)
        return replace(
            self, **{name: defaults[name] for name in NEUTRAL if getattr(self, name) is None}
        )

    def params(self, **changes: Any) -> SamplingParams:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return SamplingParams(
            **{n: value for n, value in values.items() if value is not None} | changes
        )


# ---- commands ------------------------------------------------------------------------------------


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function whose parameters may be groups of options, as the docstring of
    this module describes."""
    hints = get_type_hints(function, include_extras=True)
    own_parameters = inspect.signature(function).parameters
    groups: dict[str, tuple[Any, list[str]]] = {}  # the defaults, and the fields that are options
    option_parameters: list[inspect.Parameter] = []
    for name, parameter in own_parameters.items():
        if not is_dataclass(hints[name]):
            option_parameters.append(
                parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            )
            continue
        group = hints[name]()
        if parameter.default is not inspect.Parameter.empty:
            group = parameter.default
        members = [
            group_parameter
            for group_parameter in group_parameters(group)
            if group_parameter.name not in own_parameters
        ]
        groups[name] = group, [member.name for member in members]
        option_parameters += members

    @functools.wraps(function)
    def run(**arguments: Any) -> None:
        try:
            for name, (group, members) in groups.items():
                arguments[name] = fill_group(
                    group, {member: arguments.pop(member) for member in members}
                )
            function(**arguments)
        except OctavoError as error:
            if os.environ.get("OCTAVO_DEBUG"):
                raise
            fail(with_flags(str(error)))
        except BrokenPipeError:  # The reader has ended, as in `octavo complete ... | head`.
            # Without this, Python prints an error when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except OSError as error:
            fail(str(error))
        except (RuntimeError, MemoryError) as error:
            if os.environ.get("OCTAVO_DEBUG") or not is_out_of_memory(error):
                raise
            fail(MEMORY_RAN_OUT)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    run.__signature__ = inspect.Signature(option_parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in option_parameters}
    return run


def group_parameters(group: Any) -> Iterator[inspect.Parameter]:
    """Yield the options of a group as parameters that typer understands.

    A flag inverts the default of its field, so --no-prefix-caching turns enable_prefix_caching off.
    """
    kind: type = type(group)
    hints = get_type_hints(kind)
    for name, declared in option_declarations(kind).items():
        if not declared.help:
            continue
        hint = hints[name]
        default = getattr(group, name)
        if hint is bool:
            default = default != getattr(kind, name)
        elif get_origin(hint) is tuple:  # typer supports repeated options as lists only
            hint = list[str]
            default = list(default)
        option_info = declared_option(kind, name, default, declared.panel)
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[hint, option_info],
        )


def fill_group(group: Any, option_values: dict[str, Any]) -> Any:
    """Return the group with the values of its options. An error names the flag."""
    kind: type = type(group)
    values = {}
    for name, value in option_values.items():
        default = getattr(kind, name)
        if isinstance(default, bool):
            value = default != value
        values[name] = check_option(kind, name, value, shown_name=flag_of(kind, name))
    return replace(group, **values)


def with_flags(message: str) -> str:
    """Return an error of the engine without the names of options in Python.

    `tokenizer=DIRECTORY (--tokenizer)` becomes `--tokenizer DIRECTORY`.
    """
    names = "|".join(option_declarations(EngineOptions))
    pattern = rf"\b(?:{names})(?:[= ]([^\s()]+))? \((--[\w-]+)(?: ([^)]+))?\)"

    def flag_and_value(match: re.Match[str]) -> str:
        value = match[3] or match[1]
        return f"{match[2]} {value}" if value else match[2]

    return re.sub(pattern, flag_and_value, message)


def fail(message: str, code: int = 2) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(code)
