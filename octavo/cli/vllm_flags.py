"""Command lines of `vllm serve`: `octavo serve` takes them as they are.

Most of vLLM's flags are flags of Octavo too, or other names of them (Option.aliases). VllmCommand
handles the rest before the flags are parsed:

    --model NAME              becomes the argument MODEL
    --max_model_len           becomes --max-model-len
    -tp 2                     becomes --tensor-parallel-size 2
    --served-model-name a b   becomes --served-model-name a --served-model-name b
    --speculative-config.k 4  becomes --speculative-config '{"k": 4}'
    --enable-chunked-prefill  is dropped, like every flag of octavo/vllm_options.py that has no
                              effect; a flag that would have one is refused with the alternative
"""

from __future__ import annotations

import json
import re
from typing import Any

from octavo.cli.options import fail
from octavo.cli.plain_help import PlainCommand
from octavo.errors import InvalidRequest
from octavo.vllm_options import SERVER_DEFAULTS, check_vllm_option

# Flags with several values in vLLM.
REPEATED = ("--served-model-name", "--api-key", "--allowed-host", "--allowed-origin")
SHORT_FLAGS = {
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-sc": "--speculative-config",
    "-ac": "--attention-config",
    "-cc": "--compilation-config",
    "-O": "--optimization-level",
}
# A short flag, and what follows it in the same word: -tp=2, -cc.mode, -O3.
SHORT_WORD = re.compile(r"(-[a-z]+|-O)([=.].*|(?<=-O)\d)?")


class VllmCommand(PlainCommand):
    """A command that understands the flags of vLLM too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_value = {
            name: not getattr(option, "is_flag", False)
            for option in self.params
            for name in option.opts
        }
        try:
            translated = translate(args, takes_value)
        except InvalidRequest as error:
            fail(str(error))
        return super().parse_args(ctx, translated)


def translate(args: list[str], takes_value: dict[str, bool]) -> list[str]:
    """Return the arguments without those that only vLLM has. `takes_value` has Octavo's flags."""
    waiting = join_members([long_flag(word) for word in args])
    kept: list[str] = []
    model_given = False
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            return [*kept, word, *waiting]
        if not word.startswith("--"):
            model_given = model_given or not word.startswith("-")
            kept.append(word)
            continue
        flag, equals, text = word.partition("=")
        flag = flag.replace("_", "-")
        if flag == "--model":
            kept.append(text if equals else take_value(flag, waiting))
            model_given = True
        elif flag in takes_value:
            kept.append(flag + equals + text)
            if not equals and takes_value[flag] and waiting:
                kept.append(waiting.pop(0))
            while flag in REPEATED and model_given and waiting and not waiting[0].startswith("-"):
                kept += [flag, waiting.pop(0)]
        elif option_name(flag) in SERVER_DEFAULTS:
            drop_flag(flag, text if equals else None, waiting)
        else:
            kept.append(word)
    return kept


def long_flag(word: str) -> str:
    """Return a word of the command line with the long name of its flag."""
    found = SHORT_WORD.fullmatch(word)
    if found is None or found[1] not in SHORT_FLAGS:
        return word
    rest = found[2] or ""
    return SHORT_FLAGS[found[1]] + (f"={rest}" if rest.isdigit() else rest)


def join_members(args: list[str]) -> list[str]:
    """Return the arguments with --NAME.MEMBER VALUE joined to one --NAME with a JSON object."""
    joined: list[str] = []
    members: dict[str, dict[str, Any]] = {}
    waiting = list(args)
    while waiting:
        word = waiting.pop(0)
        flag, equals, text = word.partition("=")
        name, dot, member = flag.partition(".")
        if not (dot and name.startswith("--") and member.isidentifier()):
            joined.append(word)
            continue
        value = text if equals else take_value(flag, waiting)
        members.setdefault(name, {})[member] = read_like(None, value)
    for name, found in members.items():
        joined += [name, json.dumps(found)]
    return joined


def option_name(flag: str) -> str:
    """Return the name of a vLLM option. --no-NAME turns an option off."""
    name = flag.removeprefix("--").replace("-", "_")
    positive = name.removeprefix("no_")
    return positive if is_switch(positive) else name


def is_switch(name: str) -> bool:
    """Return whether an option of vLLM's is turned on and off, and takes no value."""
    if name not in SERVER_DEFAULTS:
        return False
    default = SERVER_DEFAULTS[name]
    may_be_switch = name.startswith(("enable_", "disable_", "async_"))
    return isinstance(default, bool) or (default is None and may_be_switch)


def take_value(flag: str, waiting: list[str]) -> str:
    if not waiting:
        raise InvalidRequest(f"{flag} needs a value")
    return waiting.pop(0)


def drop_flag(flag: str, text: str | None, waiting: list[str]) -> None:
    """Drop a flag of vLLM's and its values. Raise InvalidRequest if it would have an effect."""
    name = option_name(flag)
    default = SERVER_DEFAULTS[name]
    value: Any = text
    if text is None and is_switch(name):
        value = not flag.startswith("--no-")
    elif text is None:
        values = [waiting.pop(0)] if waiting and not waiting[0].startswith("--") else []
        while isinstance(default, list) and waiting and not waiting[0].startswith("-"):
            values.append(waiting.pop(0))
        value = values[0] if len(values) == 1 else values
    try:
        check_vllm_option(name, read_like(default, value))
    except InvalidRequest as error:
        shown = str(error).replace(f"{name}=", f"{flag} ", 1)
        raise InvalidRequest(shown, name) from None


def read_like(default: Any, value: Any) -> Any:
    """Return a text of the command line as the type of the option's default."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except ValueError:
        return value
    return value if isinstance(default, str) else found
