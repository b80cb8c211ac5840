"""A model behind a server with the OpenAI API, for `octavo chat --url`.

It uses only the HTTP client of the standard library. A reply is a stream of events. Stopping it
shuts the connection down, which the server notices at once.
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
SILENT_SECONDS = 120.0  # Servers send a comment every few seconds if there is nothing else.
# The parameters of OpenAI are always sent. Others are sent only if they differ from the neutral
# value, because not every server knows them.
OPENAI_FIELDS = (
    "temperature",
    "top_p",
    "max_tokens",
    "presence_penalty",
    "frequency_penalty",
    "stop",
)
NEUTRAL_VALUES = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


class ServerError(OctavoError):
    """The server cannot be reached, or did not do what was requested."""

    status = 0


class Stopped(OctavoError):
    """This side shut the connection down."""


class RemoteBackend:
    def __init__(self, url: str, api_key: str | None, model: str | None, seed: int):
        """Ask the server for its models. Raises ServerError if it cannot answer yet."""
        address = urlsplit(url if "://" in url else f"http://{url}")
        try:
            self._address = address.hostname, address.port
        except ValueError:
            self._address = None, None
        if address.scheme not in ("http", "https") or self._address[0] is None:
            raise ServerError(
                f"{url} is not the address of a server: give one such as http://127.0.0.1:8000"
            )
        self._uses_tls = address.scheme == "https"
        self._base_path = address.path.rstrip("/").removesuffix("/v1")
        self.url = f"{address.scheme}://{address.netloc}{self._base_path}"
        self._api_key = api_key
        self._seed = seed
        self._replies = 0
        self._socket: socket.socket | None = None  # connection of the current reply
        self._stopped = False
        self._check_ready()
        model_cards = self._request_json("GET", "/v1/models")["data"]
        model_names = [model_card["id"] for model_card in model_cards]
        if not model_names or (model is not None and model not in model_names):
            raise ServerError(
                f"{self.url} has no model {model or ''}: it has {', '.join(model_names) or 'none'}"
            )
        self.model = model_names[0] if model is None else model
        model_card = model_cards[model_names.index(self.model)]
        self.context = model_card.get("max_model_len") or 0
        # The recommendations of generation_config.json, if the server reports them.
        self.default_sampling: dict[str, Any] = model_card.get("default_sampling_params") or {}

    # ---- ChatBackend -----------------------------------------------------------------------------

    def encode(self, messages: Messages) -> Prompt:
        try:
            rendered = self._request_json(
                "POST", "/v1/chat/completions/render", {"model": self.model, "messages": messages}
            )
        except ServerError as error:
            if error.status not in (404, 405):
                raise
            return Prompt(messages, [], "")
        return Prompt(messages, rendered["token_ids"], rendered["prompt"][-64:])

    def pieces(self, prompt: Prompt, sampling: SamplingOptions) -> Iterator[Piece]:
        fields = {name: getattr(sampling, name) for name in OPENAI_FIELDS}
        fields |= {
            name: value
            for name, neutral in NEUTRAL_VALUES.items()
            if (value := getattr(sampling, name)) != neutral
        }
        body = {
            "model": self.model,
            "messages": prompt.messages,
            **{name: value for name, value in fields.items() if value is not None},
            # A repeated question gets another answer.
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
        generated_tokens = 0
        cached_tokens = 0
        with self._request("POST", "/v1/chat/completions", body) as response:
            for event in self._events(response):
                usage = event.get("usage")
                choices = event.get("choices")
                if usage:
                    generated_tokens = usage["completion_tokens"]
                    details = usage.get("prompt_tokens_details") or {}
                    cached_tokens = details.get("cached_tokens") or 0
                    yield Piece("", generated_tokens, cached_tokens, None)
                if choices:
                    text = choices[0]["delta"].get("content") or ""
                    finish_reason = choices[0].get("finish_reason")
                    generated_tokens += bool(text)
                    if text or finish_reason:
                        yield Piece(text, generated_tokens, cached_tokens, finish_reason)

    def stop(self) -> None:
        """Shut the connection down. A thread that reads from it sees the end at once."""
        self._stopped = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def memory(self) -> str | None:
        try:
            with self._request("GET", "/metrics") as response:
                metrics = response.read().decode(errors="replace")
        except ServerError:
            return None
        blocks = dict(
            re.findall(
                r"^\w+:kv_blocks_(used|cached|free)(?:\{[^}]*\})? ([\d.e+]+)$",
                metrics,
                re.MULTILINE,
            )
        )
        if len(blocks) < 3:
            return None
        return ", ".join(
            f"{float(blocks[block_state]):,.0f} {block_state}"
            for block_state in ("used", "cached", "free")
        )

    # ---- HTTP ------------------------------------------------------------------------------------

    def _check_ready(self) -> None:
        try:
            self._request_json("GET", "/readyz")
        except ServerError as error:
            # Other servers have no /readyz. The first request shows whether they are ready.
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
                raise ServerError(
                    f"the server ended the reply with an error: {_error_message(event)}"
                )
            yield event
        if self._stopped:
            raise Stopped
        raise ServerError("the server closed the connection in the middle of its reply")

    def _request_json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        with self._request(method, path, body) as response:
            return json.loads(response.read())

    @contextmanager
    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and yield the reply, which has a good status.

        An error while the reply is read is a ServerError too, unless `stop` was called.
        """
        host, port = self._address
        assert host is not None
        connection_class = (
            http.client.HTTPSConnection if self._uses_tls else http.client.HTTPConnection
        )
        connection = connection_class(host, port, timeout=CONNECT_SECONDS)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        try:
            try:
                connection.connect()
            except OSError as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise ServerError(
                    f"no server answers at {self.url} ({reason}): start one with `octavo serve`"
                ) from None
            connection.sock.settimeout(SILENT_SECONDS)
            self._socket = connection.sock
            if self._stopped:
                raise Stopped
            connection.request(
                method, self._base_path + path, None if body is None else json.dumps(body), headers
            )
            response = connection.getresponse()
            if response.status >= 400:
                raise self._status_error(response)
            yield response
        except TimeoutError:
            raise ServerError(f"{self.url} has sent nothing for {SILENT_SECONDS:g} s") from None
        except (OSError, http.client.HTTPException, LookupError, ValueError) as error:
            if self._stopped:
                raise Stopped from None
            raise ServerError(
                f"{self.url} does not answer like an OpenAI-compatible server ({error!r:.200})"
            ) from None
        finally:
            self._socket = None
            connection.close()

    def _status_error(self, response: http.client.HTTPResponse) -> ServerError:
        try:
            reply = json.loads(response.read())
        except ValueError:
            reply = {}
        message = _error_message(reply) or response.reason
        status = response.status
        if status == 401:
            advice = "needs an API key: give --api-key, or set OCTAVO_API_KEY"
            if self._api_key:
                advice = "does not accept this API key"
            error = ServerError(f"{self.url} {advice}")
        elif status == 429:
            retry_after = response.headers.get("retry-after")
            advice = f", try again in {retry_after} s" if retry_after else ""
            error = ServerError(f"the server is busy{advice}: {message}")
        elif status == 503 and "phase" in reply:
            progress = reply.get("progress")
            progress_text = f", {progress:.0%}" if isinstance(progress, float) else ""
            error = ServerError(
                f"the server is not ready: {reply.get('state')} ({reply['phase']}{progress_text}). "
                "Try again soon"
            )
        else:
            error = ServerError(f"the server answers with status {status}: {message}")
        error.status = status
        return error


def _error_message(reply: Any) -> str:
    error = reply.get("error") if isinstance(reply, dict) else None
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error or "")
