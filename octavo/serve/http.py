"""The HTTP application: which route is whose, and what stands before them all."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.serve import completions, routes
from octavo.serve.exchange import Endpoint, Handler
from octavo.serve.front import Front
from octavo.serve.guard import Guard
from octavo.serve.page import PAGE, send_page
from octavo.serve.watch import WatchEndpoint
from octavo.serve.websocket import WebSocketEndpoint

GET: dict[str, Handler] = {
    "/v1/models": routes.models,
    "/v1/models/{id:path}": routes.model,
    "/tokenizer_info": routes.tokenizer_info,
    "/v1/limits": routes.limits,
    "/version": routes.version,
    "/livez": routes.livez,
    "/readyz": routes.readyz,
    "/startupz": routes.startupz,
    "/health": routes.readyz,
    "/metrics": routes.metrics,
    "/openapi.json": routes.description,
    "/v1/dumps": routes.dumps,
}
POST: dict[str, Handler] = {
    "/v1/chat/completions": completions.chat_completions,
    "/v1/chat/completions/render": completions.render,
    "/v1/completions": completions.completions,
    "/generate": routes.generate,
    "/batch_generate": routes.batch_generate,
    "/tokenize": routes.tokenize,
    "/detokenize": routes.detokenize,
    "/v1/requests/{id}/cancel": routes.cancel,
}


async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404)


def application(front: Front) -> ASGIApp:
    table: list[Route | WebSocketRoute] = [
        *(Route(path, Endpoint(front, handler), methods=["POST"]) for path, handler in POST.items()),  # tried in order
        *(Route(path, Endpoint(front, handler), methods=["GET"]) for path, handler in GET.items()),
        *(Route(path, Endpoint(front, send_page), methods=["GET"]) for path in PAGE),
        WebSocketRoute("/ws/generate", WebSocketEndpoint(front)),
        WebSocketRoute("/ws/watch", WatchEndpoint(front)),
    ]
    app: ASGIApp = Guard(Router(table, redirect_slashes=False, default=not_found), front)
    if front.config.allowed_origins:
        origins = list(front.config.allowed_origins)
        app = CORSMiddleware(app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    return app
