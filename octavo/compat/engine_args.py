"""EngineArgs and the parser of a script's command line, as vLLM's scripts use them.

    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    llm = LLM(**vars(parser.parse_args()))

The fields are the model, every field of EngineOptions, and vLLM's other options with the values
that octavo/vllm_options.py accepts. LLM checks them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import field, fields, make_dataclass
from typing import Any

from octavo.engine_options import EngineOptions
from octavo.vllm_options import DEFAULTS

# Fields of EngineArgs, and their defaults. A default of None asks LLM for its own.
FIELD_DEFAULTS: dict[str, Any] = {
    "model": None,
    **{option.name: option.default for option in fields(EngineOptions)},
    **DEFAULTS,
}
NUMBERS = {"max_model_len": int, "block_size": int, "max_num_batched_tokens": int, "depth": int,
           "num_gpu_blocks_override": int, "swap_space": float, "kv_budget": int}  # fmt: skip


def _field(name: str, default: Any) -> tuple[str, Any, Any]:
    if isinstance(default, (dict, list, set)):
        return name, Any, field(default_factory=default.copy)
    return name, Any, field(default=default)


_EngineFields = make_dataclass(
    "_EngineFields", [_field(name, default) for name, default in FIELD_DEFAULTS.items()]
)


class EngineArgs(_EngineFields):  # type: ignore[valid-type,misc]
    """The arguments of LLM as an object. LLM.from_engine_args makes the engine."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser, **_: Any) -> argparse.ArgumentParser:
        """Add an option for every field. Values that are not numbers, texts or flags are JSON."""
        group = parser.add_argument_group("engine")
        for name, default in FIELD_DEFAULTS.items():
            flag = f"--{name.replace('_', '-')}"
            if isinstance(default, bool):
                action = argparse.BooleanOptionalAction
                group.add_argument(flag, action=action, default=default)
            else:
                group.add_argument(flag, type=_reader(name, default), default=default)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        arguments = vars(args)
        return cls(**{name: arguments[name] for name in FIELD_DEFAULTS if name in arguments})


class AsyncEngineArgs(EngineArgs):
    """The same arguments, for AsyncLLM."""


def _reader(name: str, default: Any) -> Any:
    """Return how argparse reads the value of an option."""
    if name in NUMBERS:
        return NUMBERS[name]
    if isinstance(default, (int, float, str)):
        return type(default)
    return _text_or_json


def _text_or_json(text: str) -> Any:
    """Read JSON objects and lists. Any other value is a text."""
    return json.loads(text) if text.startswith(("{", "[")) else text


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that accepts --max_model_len for --max-model-len."""

    def parse_known_args(  # type: ignore[override]
        self, args: list[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        import sys

        arguments = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args([_with_dashes(text) for text in arguments], namespace)

    @staticmethod
    def check_port(value: str) -> int:
        port = int(value)
        if not 1024 <= port <= 65535:
            raise argparse.ArgumentTypeError(f"a port is a number in 1024..65535, got {value}")
        return port


def _with_dashes(text: str) -> str:
    if not text.startswith("--"):
        return text
    flag, equals, value = text.partition("=")
    return flag.replace("_", "-") + equals + value
