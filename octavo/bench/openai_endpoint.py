"""The address of an OpenAI-compatible server, and the model and the key to send.

    OpenAIEndpoint.parse("https://host/v1", model="m", api_key="...").applied_to(load)

This module uses HTTP and does not depend on engines.
"""

from __future__ import annotations

import http.client
import json
import os
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from octavo.bench.http_load import Load
from octavo.errors import InvalidRequest, OctavoError

KEY_VARIABLE = "OCTAVO_API_KEY"


@dataclass(frozen=True)
class OpenAIEndpoint:
    host: str
    port: int
    tls: bool = False
    base: str = "/v1"  # the path before /completions
    model: str | None = None
    api_key: str | None = None
    chat: bool = False  # requests are chats, because not every server has /completions
    may_stop: bool = False  # the server does not support ignore_eos

    @classmethod
    def parse(cls, url: str, **options: Any) -> OpenAIEndpoint:
        """Parse a URL, whose path is /v1 by default. The key may also come from OCTAVO_API_KEY."""
        address = urlsplit(url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise InvalidRequest(
                f"{url} is not the address of a server: give http://HOST:PORT or https://HOST/v1",
                "url",
            )
        tls = address.scheme == "https"
        options.setdefault("api_key", None)
        options["api_key"] = options["api_key"] or os.environ.get(KEY_VARIABLE)
        return cls(
            host=address.hostname,
            port=address.port or (443 if tls else 80),
            tls=tls,
            base=address.path.rstrip("/") or "/v1",
            **options,
        )

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def applied_to(self, load: Load) -> Load:
        """Return the load for this server."""
        return replace(
            load,
            host=self.host,
            port=self.port,
            tls=self.tls,
            path=f"{self.base}/chat/completions" if self.chat else f"{self.base}/completions",
            chat=self.chat,
            may_stop=self.may_stop,
            model=self.model,
            headers=load.headers | self.headers,
        )

    def with_model(self) -> OpenAIEndpoint:
        """Return the endpoint with the name of the only model, if no name was given.

        Raises OctavoError if the server does not answer, refuses the key or has several models."""
        names = self.model_names()
        if self.model is not None:
            if names and self.model not in names:
                raise OctavoError(
                    f"the server has no model {self.model!r}: it has {', '.join(names)}"
                )
            return self
        if len(names) != 1:
            raise OctavoError(
                f"the server has {len(names)} models ({', '.join(names) or 'it lists none'}): name "
                "the one to use"
            )
        return replace(self, model=names[0])

    def model_names(self) -> list[str]:
        connection_class = http.client.HTTPSConnection if self.tls else http.client.HTTPConnection
        connection = connection_class(self.host, self.port, timeout=10)
        address = f"{self.host}:{self.port}{self.base}/models"
        try:
            connection.request("GET", f"{self.base}/models", headers=self.headers)
            reply = connection.getresponse()
            body = reply.read()
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or error
            raise OctavoError(
                f"no server answers at {address} ({reason}): start one with `octavo serve`"
            ) from None
        finally:
            connection.close()
        if reply.status in (401, 403):
            raise OctavoError(
                f"{address} refuses the API key (status {reply.status}): give --api-key, or set "
                f"{KEY_VARIABLE}"
            )
        if reply.status == 404:  # not every server lists its models
            return []
        if reply.status != 200:
            raise OctavoError(f"{address} answers with status {reply.status}")
        try:
            return [model["id"] for model in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError):
            raise OctavoError(f"{address} does not answer with a list of models") from None
