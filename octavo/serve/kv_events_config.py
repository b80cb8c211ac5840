"""The configuration of KV events, under the names of vLLM's option --kv-events-config.

docs/routing.md describes the events. This module must not import zmq, torch or typer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from octavo.errors import InvalidRequest
from octavo.params import check_integer

PUBLISHERS = ("zmq", "null")
ENCODINGS = ("map", "array")


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """The settings of the publication of KV events."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"  # "null" publishes nothing.
    # An endpoint with * or :: and an ipc:// endpoint are bound. The publisher connects to others.
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None  # always bound
    buffer_steps: int = 10_000  # The number of batches that a subscriber can ask for again.
    hwm: int = 100_000  # ZeroMQ drops batches for a subscriber that is this many behind.
    max_queue_size: int = 100_000  # Accepted for vLLM's command lines. This server has no queue.
    topic: str = ""
    # The form of an event: "map" as in vLLM 0.24 and later, "array" as in vLLM before.
    encoding: str = "map"

    @property
    def enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


def kv_events_config(name: str, value: Any) -> KVEventsConfig:
    """Return a configuration from the object of the option. Raises InvalidRequest."""
    if isinstance(value, KVEventsConfig):
        return value
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be a JSON object, got {value!r:.100}", name)
    known = [field.name for field in fields(KVEventsConfig)]
    for key, given in value.items():
        if key not in known:
            raise InvalidRequest(
                f"{name} has the unknown key {key!r}: use {', '.join(known)}", name
            )
        _check_entry(name, key, given)
    return KVEventsConfig(**value)


def _check_entry(name: str, key: str, given: Any) -> None:
    shown = f"{name}: {key}"
    if key == "enable_kv_cache_events":
        if not isinstance(given, bool):
            raise InvalidRequest(f"{shown} must be true or false, got {given!r:.100}", name)
    elif key in ("buffer_steps", "hwm", "max_queue_size"):
        check_integer(shown, given, 1)
    elif key in ("publisher", "encoding"):
        allowed = PUBLISHERS if key == "publisher" else ENCODINGS
        if given not in allowed:
            raise InvalidRequest(
                f"{shown} must be one of {', '.join(allowed)}, got {given!r:.100}", name
            )
    elif not isinstance(given, str) and not (key == "replay_endpoint" and given is None):
        raise InvalidRequest(f"{shown} must be a string, got {given!r:.100}", name)
