"""A model behind a server that speaks OpenAI's API, as a partner for `octavo chat --url`. The standard library's HTTP alone.

A reply is a stream of events. Stopping it shuts the connection down, which the server notices at once.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from octavo.cli.chat_backend import Messages, Piece, Prompt
from octavo.cli.options import SamplingOptions
from octavo.errors import OctavoError

CONNECT_SECONDS = 5.0
SILENT_SECONDS = 120.0  # servers write a comment every few seconds when there is nothing else
# OpenAI's own are always sent; what others added only where it asks for something, as not every server knows it.
OPENAI = ("temperature", "top_p", "max_tokens", "presence_penalty", "frequency_penalty", "stop")
EXTRA = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


class ServerError(OctavoError):
    """The server is not there, or does not do as it was asked."""

    status = 0


class Stopped(OctavoError):
    """The connection was shut down from this side."""


class Remote:
    def __init__(self, url: str, key: str | None, model: str | None, seed: int):
        """Asks the server what it has. Raises ServerError if it cannot answer yet."""
        found = urlsplit(url if "://" in url else f"http://{url}")
        try:
            self._address = found.hostname, found.port
        except ValueError:
            self._address = None, None
        if found.scheme not in ("http", "https") or self._address[0] is None:
            raise ServerError(
                f"{url} is no server's address: give something like http://127.0.0.1:8000"
            )
        self._secure = found.scheme == "https"
        self._base = found.path.rstrip("/").removesuffix("/v1")
        self.url = f"{found.scheme}://{found.netloc}{self._base}"
        self._key = key
        self._seed = seed
        self._replies = 0
        self._socket: socket.socket | None = None  # of the reply that is coming
        self._stopped = False
        self._check_ready()
        cards = self._json("GET", "/v1/models")["data"]
        names = [card["id"] for card in cards]
        if not names or (model is not None and model not in names):
            raise ServerError(
                f"{self.url} has no model {model or ''}: it has {', '.join(names) or 'none'}"
            )
        self.model = names[0] if model is None else model
        card = cards[names.index(self.model)]
        self.context = card.get("max_model_len") or 0
        # what generation_config.json recommends, where the server tells
        self.default_sampling: dict[str, Any] = card.get("default_sampling_params") or {}

    # ---- a partner ----------------------------------------------------------------------------------

    def encode(self, messages: Messages) -> Prompt:
        try:
            found = self._json(
                "POST", "/v1/chat/completions/render", {"model": self.model, "messages": messages}
            )
        except ServerError as error:
            if error.status not in (404, 405):
                raise
            return Prompt(messages, [], "")
        return Prompt(messages, found["token_ids"], found["prompt"][-64:])

    def pieces(self, prompt: Prompt, sampling: SamplingOptions) -> Iterator[Piece]:
        given = {name: getattr(sampling, name) for name in OPENAI}
        given |= {
            name: value
            for name, nothing in EXTRA.items()
            if (value := getattr(sampling, name)) != nothing
        }
        body = {
            "model": self.model,
            "messages": prompt.messages,
            **{name: value for name, value in given.items() if value is not None},
            # the same question again gets another answer
            "seed": (self._seed + self._replies) % 2**63,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._replies += 1
        try:
            yield from self._reply(body)
        except Stopped:
            pass
        finally:
            self._stopped = False

    def _reply(self, body: dict[str, Any]) -> Iterator[Piece]:
        generated = cached = 0
        with self._request("POST", "/v1/chat/completions", body) as response:
            for event in self._events(response):
                usage = event.get("usage")
                choices = event.get("choices")
                if usage:
                    generated = usage["completion_tokens"]
                    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                    yield Piece("", generated, cached, None)
                if choices:
                    text = choices[0]["delta"].get("content") or ""
                    reason = choices[0].get("finish_reason")
                    generated += bool(text)
                    if text or reason:
                        yield Piece(text, generated, cached, reason)

    def stop(self) -> None:
        """Whoever reads from the connection sees its end at once."""
        self._stopped = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def memory(self) -> str | None:
        try:
            with self._request("GET", "/metrics") as response:
                text = response.read().decode(errors="replace")
        except ServerError:
            return None
        found = dict(
            re.findall(
                r"^\w+:kv_blocks_(used|cached|free)(?:\{[^}]*\})? ([\d.e+]+)$", text, re.MULTILINE
            )
        )
        if len(found) < 3:
            return None
        return ", ".join(f"{float(found[kind]):,.0f} {kind}" for kind in ("used", "cached", "free"))

    # ---- HTTP ---------------------------------------------------------------------------------------

    def _check_ready(self) -> None:
        try:
            self._json("GET", "/readyz")
        except ServerError as error:
            # a server of another kind: the first real request will tell
            if error.status not in (401, 403, 404, 405):
                raise

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        for line in iter(response.readline, b""):
            if self._stopped:
                raise Stopped
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise ServerError(f"the server broke off: {_message(event)}")
            yield event
        raise (
            Stopped
            if self._stopped
            else ServerError("the server broke off in the middle of its reply")
        )

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        with self._request(method, path, body) as response:
            return json.loads(response.read())

    @contextmanager
    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """A reply with a good status. What goes wrong while it is read is a ServerError too, unless `stop` was called."""
        host, port = self._address
        assert host is not None
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(host, port, timeout=CONNECT_SECONDS)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            try:
                connection.connect()
            except OSError as error:
                why = getattr(error, "strerror", None) or str(error)
                raise ServerError(
                    f"no server answers at {self.url} ({why}): `octavo serve` starts one"
                ) from None
            connection.sock.settimeout(SILENT_SECONDS)
            self._socket = connection.sock
            if self._stopped:
                raise Stopped
            connection.request(
                method, self._base + path, None if body is None else json.dumps(body), headers
            )
            response = connection.getresponse()
            if response.status >= 400:
                raise self._refused(response)
            yield response
        except TimeoutError:
            raise ServerError(f"{self.url} has said nothing for {SILENT_SECONDS:g} s") from None
        except (OSError, http.client.HTTPException, LookupError, ValueError) as error:
            if self._stopped:
                raise Stopped from None
            raise ServerError(
                f"{self.url} does not answer as a server of this kind does ({error!r:.200})"
            ) from None
        finally:
            self._socket = None
            connection.close()

    def _refused(self, response: http.client.HTTPResponse) -> ServerError:
        try:
            found = json.loads(response.read())
        except ValueError:
            found = {}
        said = _message(found) or response.reason
        status = response.status
        if status == 401:
            advice = (
                "does not take this API key"
                if self._key
                else "wants an API key: give --api-key, or set OCTAVO_API_KEY"
            )
            error = ServerError(f"{self.url} {advice}")
        elif status == 429:
            wait = response.headers.get("retry-after")
            error = ServerError(
                f"the server is busy{f', try again in {wait} s' if wait else ''}: {said}"
            )
        elif status == 503 and "phase" in found:
            part = found.get("progress")
            far = f", {part:.0%}" if isinstance(part, float) else ""
            error = ServerError(
                f"the server is not ready: {found.get('state')} ({found['phase']}{far}). Try again soon"
            )
        else:
            error = ServerError(f"the server says {status}: {said}")
        error.status = status
        return error


def _message(reply: Any) -> str:
    error = reply.get("error") if isinstance(reply, dict) else None
    return str(error.get("message", error) if isinstance(error, dict) else error or "")
