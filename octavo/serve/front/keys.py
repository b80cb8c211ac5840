"""Reads and checks API keys. A TOML file gives each key a name, a priority and limits:

    [[keys]]
    name = "alice"
    key = "a long random text"      # or sha256 = "...", so that the file contains no secret
    priority = 1                    # Default: 0. With --policy priority, requests of keys with
                                    # higher numbers come first in the queue and displace
                                    # requests of keys with lower numbers from a full queue.
    requests_per_minute = 60        # Limits are optional.
    tokens_per_minute = 100000      # Tokens of prompts and replies are counted together.
    max_concurrency = 8
    admin = true                    # The key allows the routes for administrators.

The server keeps only digests of the keys. It compares every digest each time, in constant time.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import ipaddress
import logging
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import OctavoError
from octavo.serve.api.api_errors import ApiError
from octavo.serve.limits import Limits

log = logging.getLogger(__name__)
MINUTE = 60.0
MIN_LENGTH = 16
MAX_ADDRESSES = 10_000  # Wrong keys are counted for this many addresses.
SPACE = " \t"  # HTTP allows this white space around the value of a header.


class KeysError(OctavoError):
    """The file of keys cannot be used."""


class KeyEntry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    key: str | None = None
    sha256: str | None = None
    priority: int = 0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None
    admin: bool = False


class Bucket:
    """A token bucket. It gains `per_minute` tokens per minute and holds at most `burst`.

    By default `burst` equals `per_minute`. `level` is the number of tokens in the bucket. It may be
    negative after a large amount was taken.
    """

    def __init__(self, per_minute: int, burst: int | None = None):
        self.per_minute = per_minute
        self.burst = per_minute if burst is None else burst
        self.level = float(self.burst)
        self.updated = time.monotonic()

    def wait(self) -> float:
        """Return the seconds until the bucket holds a token, or 0 if it holds one now."""
        now = time.monotonic()
        gained = (now - self.updated) * self.per_minute / MINUTE
        self.level = min(self.level + gained, self.burst)
        self.updated = now
        if self.level >= 1:
            return 0.0
        return (1 - self.level) * MINUTE / self.per_minute

    def take(self, amount: float = 1.0) -> None:
        self.level -= amount


class Key:
    def __init__(self, entry: KeyEntry, digest: bytes):
        self.name = entry.name
        self.priority = entry.priority
        self.admin = entry.admin
        self.digest = digest
        self.salt = hashlib.sha256(b"octavo salt" + digest).hexdigest()[:16]
        self.requests = Bucket(entry.requests_per_minute) if entry.requests_per_minute else None
        self.tokens = Bucket(entry.tokens_per_minute) if entry.tokens_per_minute else None
        self.max_concurrency = entry.max_concurrency
        self.open_requests = 0

    def check(self) -> None:
        """Raise if the key does not allow another request now."""
        if self.max_concurrency is not None and self.open_requests >= self.max_concurrency:
            raise limited(f"{self.max_concurrency} requests at a time", 1.0)
        for bucket, unit in ((self.requests, "requests"), (self.tokens, "tokens")):
            if bucket is not None and (wait := bucket.wait()):
                raise limited(f"{bucket.per_minute} {unit} per minute", wait)

    def enter(self) -> None:
        """Count a request that starts. Raises if the key does not allow another request now."""
        self.check()
        if self.requests is not None:
            self.requests.take()
        self.open_requests += 1

    def leave(self, tokens: int) -> None:
        self.open_requests -= 1
        if self.tokens is not None:
            self.tokens.wait()
            self.tokens.take(tokens)


@functools.lru_cache(maxsize=4096)
def network(address: str) -> str:
    """Return the network that counts as one address.

    With IPv6 this is the /64 network, because a client usually controls all of its addresses.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))


def limited(allowance: str, wait: float) -> ApiError:
    return ApiError(
        429,
        f"this API key allows {allowance}: try again later",
        "rate_limit_exceeded",
        retry_after=wait,
    )


class Keys:
    """All keys of the server. If there are none, no key is needed."""

    def __init__(self, keys: list[Key], limits: Limits):
        self.keys = keys
        self.limits = limits
        self._failures: dict[str, Bucket] = {}

    @classmethod
    def read(cls, file: str | None, limits: Limits, option_keys: tuple[str, ...] = ()) -> Keys:
        """Read the keys in a file. `option_keys` are the keys of the option --api-key."""
        keys = [_option_key(number, key) for number, key in enumerate(option_keys, 1)]
        if file is None:
            return cls(_distinct(keys, "--api-key") if keys else [], limits)
        try:
            value = tomllib.loads(Path(file).read_text(encoding="utf-8"))
            entries = msgspec.convert(value, dict[str, list[KeyEntry]]).get("keys", [])
        except OSError as error:
            raise KeysError(f"cannot read the API keys in {file}: {error.strerror}") from None
        except ValueError as error:
            raise KeysError(f"cannot use the API keys in {file}: {error}") from None
        return cls(_distinct(keys + [_file_key(entry, file) for entry in entries], file), limits)

    def check(self, header: str | None, address: str) -> Key | None:
        """Return the key in an Authorization header.

        Raises ApiError 401, or 429 after many wrong keys from one address. A valid key is always
        accepted, because a client that sends wrong keys may share its address with others.
        """
        if not self.keys:
            return None
        scheme, _, key = (header or "").strip(SPACE).partition(" ")
        digest = hashlib.sha256(key.strip(SPACE).encode("utf-8", "surrogateescape")).digest()
        match: Key | None = None
        for (
            candidate
        ) in self.keys:  # All keys are compared, so the time does not depend on a match.
            if hmac.compare_digest(candidate.digest, digest):
                match = candidate
        if match is not None and scheme.lower() == "bearer":
            return match
        if not header:
            raise ApiError(
                401,
                "this server needs an API key: send the header Authorization: Bearer KEY",
                "invalid_api_key",
            )
        self._count_failure(network(address))
        raise ApiError(
            401, "the API key is not valid: check the Authorization header", "invalid_api_key"
        )

    def _count_failure(self, address: str) -> None:
        """Count a wrong key. Raises ApiError if the address has sent too many of them recently."""
        if len(self._failures) >= MAX_ADDRESSES and address not in self._failures:
            self._failures.pop(next(iter(self._failures)))
        bucket = self._failures.setdefault(address, Bucket(self.limits.failed_logins))
        seconds = bucket.wait()
        if seconds > 0:
            raise ApiError(
                429,
                "this address has sent too many wrong API keys: try again later with a valid key",
                "too_many_failures",
                retry_after=seconds,
            )
        bucket.take()


def _distinct(keys: list[Key], file: str) -> list[Key]:
    if not keys:
        raise KeysError(f"{file} has no [[keys]], so no client could use the server: add a key")
    if len({key.name for key in keys}) < len(keys):
        raise KeysError(f"{file} has two keys with the same name: rename one of them")
    names: dict[bytes, str] = {}
    for key in keys:
        if (other := names.setdefault(key.digest, key.name)) != key.name:
            raise KeysError(
                f"{file}: {other!r} and {key.name!r} have the same key: give each its own"
            )
    return keys


def _option_key(number: int, key: str) -> Key:
    """Return the key of one --api-key option. It may be shorter than a key in a file."""
    if not key or not _can_be_sent(key):
        raise KeysError("--api-key must be printable ASCII characters without spaces")
    if len(key) < MIN_LENGTH:
        log.warning(
            "an API key of %d characters can be guessed: use at least %d", len(key), MIN_LENGTH
        )
    return Key(KeyEntry(f"api-key-{number}"), hashlib.sha256(key.encode()).digest())


def _can_be_sent(key: str) -> bool:
    """Return whether a key consists of characters that a client can send in a header."""
    return key.isascii() and key.isprintable() and " " not in key


def _file_key(entry: KeyEntry, file: str) -> Key:
    """Return the key of an entry. Raises KeysError if the entry is invalid."""
    subject = f"{file}: the key named {entry.name!r}"
    if not re.fullmatch(r"[\w.-]{1,64}", entry.name):
        raise KeysError(
            f"{file}: a name must have 1 to 64 characters of A-Z a-z 0-9 . _ -, not {entry.name!r}"
        )
    if (entry.key is None) == (entry.sha256 is None):
        raise KeysError(f"{subject} needs either key or sha256")
    limits: dict[str, Any] = {
        name: getattr(entry, name)
        for name in ("requests_per_minute", "tokens_per_minute", "max_concurrency")
    }
    if any(value is not None and value < 1 for value in limits.values()):
        raise KeysError(f"{subject} has a limit below 1: a limit must be at least 1")
    if entry.sha256 is not None:
        if not re.fullmatch("[0-9a-f]{64}", entry.sha256):
            raise KeysError(f"{subject}: sha256 must have 64 hexadecimal digits")
        return Key(entry, bytes.fromhex(entry.sha256))
    assert entry.key is not None
    if len(entry.key) < MIN_LENGTH or not _can_be_sent(entry.key):
        raise KeysError(
            f"{subject} must have at least {MIN_LENGTH} printable ASCII characters and no spaces"
        )
    return Key(entry, hashlib.sha256(entry.key.encode()).digest())
