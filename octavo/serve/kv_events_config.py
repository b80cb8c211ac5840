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
    replay_endpoint: str | None = None  # This endpoint is always bound.
    buffer_steps: int = 10_000  # The number of batches that a subscriber can ask for again.
    hwm: int = 100_000  # ZeroMQ drops batches for a subscriber that has not received this many.
    max_queue_size: int = 100_000  # vLLM's command lines may set it. This server has no queue.
    topic: str = ""
    # The form of an event: "map" as in vLLM 0.24 and later, "array" as in earlier versions.
    encoding: str = "map"

    @property
    def enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


def kv_events_config(name: str, settings: Any) -> KVEventsConfig:
    """Return the configuration that a JSON object describes.

    `name` is the name of the option for errors. Raises InvalidRequest if the object is invalid.
    """
    if isinstance(settings, KVEventsConfig):
        return settings
    if not isinstance(settings, dict):
        raise InvalidRequest(f"{name} must be a JSON object, got {settings!r:.100}", name)
    names = [field.name for field in fields(KVEventsConfig)]
    for key, entry in settings.items():
        if key not in names:
            raise InvalidRequest(
                f"{name} has the unknown key {key!r}: use {', '.join(names)}", name
            )
        _check_entry(name, key, entry)
    return KVEventsConfig(**settings)


def _check_entry(name: str, key: str, entry: Any) -> None:
    subject = f"{name}: {key}"
    if key == "enable_kv_cache_events":
        if not isinstance(entry, bool):
            raise InvalidRequest(f"{subject} must be true or false, got {entry!r:.100}", name)
    elif key in ("buffer_steps", "hwm", "max_queue_size"):
        check_integer(subject, entry, 1)
    elif key in ("publisher", "encoding"):
        allowed = PUBLISHERS if key == "publisher" else ENCODINGS
        if entry not in allowed:
            raise InvalidRequest(
                f"{subject} must be one of {', '.join(allowed)}, got {entry!r:.100}", name
            )
    elif not isinstance(entry, str) and not (key == "replay_endpoint" and entry is None):
        raise InvalidRequest(f"{subject} must be a string, got {entry!r:.100}", name)
