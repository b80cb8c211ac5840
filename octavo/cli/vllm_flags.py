"""Lets `octavo serve` accept the command lines of `vllm serve` unchanged.

Most of vLLM's flags are flags of Octavo too, or other names of them (Option.aliases). VllmCommand
translates the others before the flags are parsed:

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
# A short flag and the text after it in the same word: -tp=2, -cc.mode, -O3.
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
    """Return the arguments with flags of Octavo only. `takes_value` maps Octavo's flags to whether
    they take a value."""
    remaining = join_members([long_flag(word) for word in args])
    translated: list[str] = []
    has_model = False
    while remaining:
        word = remaining.pop(0)
        if word == "--":
            return [*translated, word, *remaining]
        if not word.startswith("--"):
            has_model = has_model or not word.startswith("-")
            translated.append(word)
            continue
        flag, equals, text = word.partition("=")
        flag = flag.replace("_", "-")
        if flag == "--model":
            translated.append(text if equals else take_value(flag, remaining))
            has_model = True
        elif flag in takes_value:
            translated.append(flag + equals + text)
            if not equals and takes_value[flag] and remaining:
                translated.append(remaining.pop(0))
            while flag in REPEATED and has_model and remaining and not remaining[0].startswith("-"):
                translated += [flag, remaining.pop(0)]
        elif option_name(flag) in SERVER_DEFAULTS:
            drop_flag(flag, text if equals else None, remaining)
        else:
            translated.append(word)
    return translated


def long_flag(word: str) -> str:
    """Return a word of the command line with the long name of its flag."""
    match = SHORT_WORD.fullmatch(word)
    if match is None or match[1] not in SHORT_FLAGS:
        return word
    suffix = match[2] or ""
    return SHORT_FLAGS[match[1]] + (f"={suffix}" if suffix.isdigit() else suffix)


def join_members(args: list[str]) -> list[str]:
    """Return the arguments with --NAME.MEMBER VALUE joined to one --NAME with a JSON object."""
    joined: list[str] = []
    members: dict[str, dict[str, Any]] = {}
    remaining = list(args)
    while remaining:
        word = remaining.pop(0)
        flag, equals, text = word.partition("=")
        name, dot, member = flag.partition(".")
        if not (dot and name.startswith("--") and member.isidentifier()):
            joined.append(word)
            continue
        value = text if equals else take_value(flag, remaining)
        members.setdefault(name, {})[member] = read_like(None, value)
    for name, member_values in members.items():
        joined += [name, json.dumps(member_values)]
    return joined


def option_name(flag: str) -> str:
    """Return the name of a vLLM option. --no-NAME turns an option off."""
    name = flag.removeprefix("--").replace("-", "_")
    positive = name.removeprefix("no_")
    return positive if is_switch(positive) else name


def is_switch(name: str) -> bool:
    """Return whether an option of vLLM is a switch, which takes no value."""
    if name not in SERVER_DEFAULTS:
        return False
    default = SERVER_DEFAULTS[name]
    may_be_switch = name.startswith(("enable_", "disable_", "async_"))
    return isinstance(default, bool) or (default is None and may_be_switch)


def take_value(flag: str, remaining: list[str]) -> str:
    if not remaining:
        raise InvalidRequest(f"{flag} needs a value")
    return remaining.pop(0)


def drop_flag(flag: str, text: str | None, remaining: list[str]) -> None:
    """Drop a flag of vLLM and its values. Raise InvalidRequest if the flag would have an effect."""
    name = option_name(flag)
    default = SERVER_DEFAULTS[name]
    value: Any = text
    if text is None and is_switch(name):
        value = not flag.startswith("--no-")
    elif text is None:
        values = [remaining.pop(0)] if remaining and not remaining[0].startswith("--") else []
        while isinstance(default, list) and remaining and not remaining[0].startswith("-"):
            values.append(remaining.pop(0))
        value = values[0] if len(values) == 1 else values
    try:
        check_vllm_option(name, read_like(default, value))
    except InvalidRequest as error:
        shown = flag if isinstance(value, bool) else f"{flag} "
        replaced = f"{name}={value}" if isinstance(value, bool) else f"{name}="
        raise InvalidRequest(str(error).replace(replaced, shown, 1), name) from None


def read_like(default: Any, value: Any) -> Any:
    """Parse a text of the command line as JSON, unless the option's default is a string."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    return value if isinstance(default, str) else parsed
