"""vLLM's helpers for a script that has an HTTP server of its own around AsyncLLM.

    task = await serve_http(app, sock=None, host=None, port=8000)
    await task

Octavo's own server does not use them: it limits the resources of each client, which uvicorn does
not.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import resource
from collections.abc import Awaitable, Callable
from socket import socket
from typing import Any

from octavo.errors import InvalidRequest

VLLM_HTTP_TIMEOUT_KEEP_ALIVE = 5  # seconds
MIN_DESCRIPTORS = 65535


class UsageContext(enum.StrEnum):
    """Which program runs the engine. Octavo does not report it."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def set_ulimit(target_soft_limit: int = MIN_DESCRIPTORS) -> None:
    """Let the process open more descriptors, up to the system's hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_limit = (
        target_soft_limit if hard == resource.RLIM_INFINITY else min(target_soft_limit, hard)
    )
    if soft < soft_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard))


async def serve_http(
    app: Any, sock: socket | None = None, enable_ssl_refresh: bool = False, **options: Any
) -> Awaitable[None]:
    """Serve an ASGI application until a signal ends the process. Options are uvicorn's."""
    if enable_ssl_refresh:
        message = "certificates are read once: restart the server to read them again"
        raise InvalidRequest(message, "enable_ssl_refresh")
    import uvicorn

    server_options = {name: value for name, value in options.items() if value is not None}
    server = uvicorn.Server(uvicorn.Config(app, **server_options))
    await server.serve(sockets=None if sock is None else [sock])
    return asyncio.sleep(0)


def with_cancellation(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Cancel a handler when its client disconnects.

    The request is the argument raw_request, or the second argument."""

    @functools.wraps(handler)
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        request = kwargs["raw_request"] if "raw_request" in kwargs else args[1]
        handler_task = asyncio.ensure_future(handler(*args, **kwargs))
        disconnect_task = asyncio.create_task(_until_disconnected(request))
        try:
            await asyncio.wait({handler_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
            return handler_task.result() if handler_task.done() else None
        finally:
            handler_task.cancel()
            disconnect_task.cancel()

    return wrapped


async def _until_disconnected(request: Any) -> None:
    message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await request.receive()
