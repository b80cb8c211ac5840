"""The option --speculative: METHOD[,NAME=VALUE...], or vLLM's speculative_config as a dictionary.

    auto             a draft head if the model has one that is measured to pay, else off
    off              no speculative decoding
    ngram            searches the same text for the last tokens (min, max: how many tokens)
    suffix           searches it and earlier replies to the same tenant (min, max)
    early_exit       the model's own first layers draft (layer: how many)
    head             a trained draft head drafts (model: its directory)
    draft_model      a smaller model drafts (model: its directory)

Every method takes k, the most drafts that one step verifies for a sequence, and adaptive=no, which
verifies k drafts in every step, even if measurements show that fewer pay. The last three take
lookup=yes: where the last tokens occur earlier in the text, its continuation is drafted instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from os import PathLike
from pathlib import PurePath
from typing import Any

from octavo.config import SpeculativeConfig
from octavo.errors import InvalidRequest
from octavo.params import check_integer

MAX_DRAFTS = 16
# The settings of each method besides k and adaptive -> the fields of SpeculativeConfig.
METHODS: dict[str, dict[str, str]] = {
    "auto": {},
    "ngram": {"min": "ngram_min", "max": "ngram_max"},
    "suffix": {"min": "ngram_min", "max": "ngram_max"},
    "early_exit": {"layer": "exit_layer", "lookup": "lookup"},
    "head": {"model": "model", "lookup": "lookup"},
    "draft_model": {"model": "model", "lookup": "lookup"},
}
# vLLM's names of settings -> our names.
VLLM_METHODS = {"eagle3": "head"}
VLLM_NAMES = {
    "num_speculative_tokens": "k",
    "prompt_lookup_min": "min",
    "prompt_lookup_max": "max",
}
OFF = "off"
SWITCH = {"yes": True, "no": False, "true": True, "false": False}


def parse_speculative(name: str, value: Any) -> SpeculativeConfig | None:
    """Return the config of an option's value. The config of "off" is None. Raises
    InvalidRequest."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = from_json(name, value)
    method = value.get("method") if isinstance(value, Mapping) else value
    if value is None or (isinstance(method, str) and method.strip() in (OFF, "none")):
        return None
    return parse_method(name, value)


def parse_method(name: str, value: Any) -> SpeculativeConfig:
    """Return the config of text, JSON, a dictionary or a SpeculativeConfig."""
    if isinstance(value, SpeculativeConfig):
        return value
    if isinstance(value, str):
        value = from_json(name, value) if value.lstrip().startswith("{") else from_text(name, value)
    if not isinstance(value, Mapping):
        raise InvalidRequest(
            f"{name} must be METHOD[,k=N...] or a dictionary with a method, got {value!r:.100}",
            name,
        )
    settings = {VLLM_NAMES.get(str(key), str(key)): value[key] for key in value}
    # vLLM names no method for a draft model.
    method = settings.pop("method", "draft_model" if "model" in settings else None)
    method = VLLM_METHODS.get(str(method), method)
    if method not in METHODS:
        raise InvalidRequest(
            f"{name} has no method {method!r}: the methods are off, {', '.join(METHODS)}", name
        )
    fields = settings_of(method)
    unknown = sorted(key for key in settings if key not in fields)
    if unknown:
        raise InvalidRequest(
            f"{name}: the method {method} has no setting {unknown[0]!r}. Its settings are "
            f"{', '.join(fields) or 'chosen automatically'}",
            name,
        )
    checked = {fields[key]: check(name, key, setting) for key, setting in settings.items()}
    return with_defaults(name, method, checked)


def settings_of(method: str) -> dict[str, str]:
    """Return the names of a method's settings, and the fields of SpeculativeConfig they set."""
    if method == "auto":
        return {}
    return {"k": "num_tokens", "adaptive": "adaptive", **METHODS[method]}


def with_defaults(name: str, method: str, checked: dict[str, Any]) -> SpeculativeConfig:
    """Fill in settings that depend on others."""
    if method == "early_exit" and "exit_layer" not in checked:
        raise InvalidRequest(
            f"{name}: early_exit needs the number of layers that draft, as in early_exit,layer=8",
            name,
        )
    if method == "draft_model" and "model" not in checked:
        raise InvalidRequest(
            f"{name}: draft_model needs the model that drafts, as in draft_model,model=DIRECTORY",
            name,
        )
    if "ngram_max" in checked and "ngram_min" not in checked:
        checked["ngram_min"] = min(checked["ngram_max"], SpeculativeConfig.ngram_min)
    if "ngram_min" in checked and "ngram_max" not in checked:
        checked["ngram_max"] = max(checked["ngram_min"], SpeculativeConfig.ngram_max)
    config = SpeculativeConfig(method, **checked)
    if config.ngram_min > config.ngram_max:
        raise InvalidRequest(f"{name}: min is larger than max, so nothing can be found", name)
    return config


def from_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{name} is not valid JSON: {error}", name) from None


def from_text(name: str, text: str) -> dict[str, Any]:
    method, *settings = text.split(",")
    parsed: dict[str, Any] = {"method": method.strip()}
    for setting in settings:
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not equals:
            raise InvalidRequest(
                f"{name}: {setting.strip()!r} has no value. Write NAME=VALUE, as in ngram,k=4", name
            )
        parsed[key] = value
    return parsed


def check(name: str, key: str, value: Any) -> Any:
    label = f"{name} {key}"
    if key in ("adaptive", "lookup"):
        if isinstance(value, bool):
            return value
        if str(value).lower() not in SWITCH:
            raise InvalidRequest(f"{label} must be yes or no, got {value!r}", name)
        return SWITCH[str(value).lower()]
    if key == "model":
        if not isinstance(value, str | PathLike) or not str(value):
            raise InvalidRequest(
                f"{label} must be a directory or a model's name, got {value!r}", name
            )
        return str(value)
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            raise InvalidRequest(f"{label} must be a whole number, got {value!r}", name) from None
    return check_integer(label, value, 1, MAX_DRAFTS if key == "k" else None)


def describe(config: SpeculativeConfig) -> str:
    """Return the method and all of its settings in the syntax of --speculative, for people. A model
    is named without its directory, because the text is shown to clients."""
    settings = asdict(config)
    parts = [config.method]
    for key, field in settings_of(config.method).items():
        value = settings[field]
        if field == "lookup" and not value:
            continue
        if isinstance(value, bool):
            value = "yes" if value else "no"
        if field == "model" and value is not None:
            value = PurePath(value).name
        if value is not None:
            parts.append(f"{key}={value}")
    return ",".join(parts)
