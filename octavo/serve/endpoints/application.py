"""The HTTP application: the table of routes, and the checks that every request passes first."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.serve.endpoints import (
    anthropic_routes,
    completions,
    file_routes,
    live_controls,
    ollama_routes,
    operator_routes,
    pooling_routes,
    responses_routes,
    router_routes,
    routes,
)
from octavo.serve.endpoints.guard import Guard
from octavo.serve.endpoints.live_feed import WatchEndpoint
from octavo.serve.endpoints.live_page import PAGE, send_page
from octavo.serve.endpoints.websocket import WebSocketEndpoint
from octavo.serve.front.front import Front
from octavo.serve.http.exchange import Endpoint, Handler

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
    "/server_info": router_routes.server_info,
    "/get_server_info": router_routes.server_info,
    "/model_info": router_routes.model_info,
    "/get_model_info": router_routes.model_info,
    "/get_load": router_routes.load,
    "/health_generate": router_routes.health_generate,
    "/v1/responses/{id}": responses_routes.retrieve,
    "/api/tags": ollama_routes.tags,
    "/api/ps": ollama_routes.running_models,
    "/api/version": ollama_routes.version,
    "/v1/files": file_routes.list_files,
    "/v1/files/{id}": file_routes.retrieve_file,
    "/v1/files/{id}/content": file_routes.file_content,
    "/v1/batches": file_routes.list_batches,
    "/v1/batches/{id}": file_routes.retrieve_batch,
    "/ping": operator_routes.ping,
    "/load": operator_routes.load,
    "/is_sleeping": operator_routes.is_sleeping,
}
POST: dict[str, Handler] = {
    "/v1/chat/completions": completions.chat_completions,
    "/v1/chat/completions/render": completions.render,
    "/v1/completions": completions.completions,
    "/v1/completions/render": completions.render_completion,
    "/inference/v1/generate": completions.generate_tokens,
    "/v1/messages": anthropic_routes.messages,
    "/v1/messages/count_tokens": anthropic_routes.count_tokens,
    "/v1/responses": responses_routes.create,
    "/v1/responses/{id}/cancel": responses_routes.cancel,
    "/api/chat": ollama_routes.chat,
    "/api/generate": ollama_routes.generate,
    "/api/show": ollama_routes.show,
    "/api/embed": pooling_routes.ollama_embed,
    "/api/embeddings": pooling_routes.ollama_embeddings,
    "/v1/embeddings": pooling_routes.embeddings,
    "/pooling": pooling_routes.pooling,
    "/rerank": pooling_routes.rerank,
    "/v1/rerank": pooling_routes.rerank,
    "/v2/rerank": pooling_routes.rerank,
    "/score": pooling_routes.score,
    "/v1/score": pooling_routes.score,
    "/generate": routes.generate,
    "/batch_generate": routes.batch_generate,
    "/tokenize": routes.tokenize,
    "/detokenize": routes.detokenize,
    "/v1/requests/{id}/cancel": routes.cancel,
    "/v1/files": file_routes.upload,
    "/v1/batches": file_routes.create_batch,
    "/v1/batches/{id}/cancel": file_routes.cancel_batch,
    "/v1/chat/completions/batch": completions.chat_batch,
    "/ping": operator_routes.ping,
    "/invocations": operator_routes.invocations,
    "/sleep": operator_routes.sleep,
    "/wake_up": operator_routes.wake_up,
    "/flush_cache": router_routes.flush_cache,
    "/reset_prefix_cache": router_routes.flush_cache,
    "/live/settings": live_controls.settings,
    "/live/crash": live_controls.crash,
    "/live/what-if": live_controls.what_if,
}
DELETE: dict[str, Handler] = {
    "/v1/responses/{id}": responses_routes.delete,
    "/v1/files/{id}": file_routes.delete_file,
}
METHODS = {"GET": GET, "POST": POST, "DELETE": DELETE}


async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404)


class RouteTable:
    """The ASGI application that finds the route of a request and runs its handler.

    A slash at the end of the path is ignored.

    Plain paths are looked up in a dictionary. All other paths go to starlette's router, which
    handles paths with parameters and replies with an error when no route matches.
    """

    def __init__(self, front: Front):
        routes = [
            Route(path, Endpoint(front, handler), methods=[method])
            for method, handlers in METHODS.items()
            for path, handler in handlers.items()
        ]
        routes += [Route(path, Endpoint(front, send_page), methods=["GET"]) for path in PAGE]
        sockets = [
            WebSocketRoute("/ws/generate", WebSocketEndpoint(front)),
            WebSocketRoute("/ws/watch", WatchEndpoint(front)),
        ]
        self.router = Router([*routes, *sockets], redirect_slashes=False, default=not_found)
        self.routes = routes
        self.plain_routes = {
            (method, route.path): route
            for route in routes
            for method in route.methods or ()
            if "{" not in route.path
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.endswith("/") and path != "/":
            scope["path"] = path[:-1]
        route = self.plain_routes.get((scope.get("method", ""), scope["path"]))
        if route is None:
            return await self._route_with_parameters(scope, receive, send)
        scope["route"] = route  # The guard logs its path.
        await route.app(scope, receive, send)

    async def _route_with_parameters(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.router(scope, receive, send)
        except HTTPException as error:
            if error.status_code == 405:  # The router names the methods of one route only.
                methods = {
                    method
                    for route in self.routes
                    if route.matches(scope)[0] != Match.NONE
                    for method in route.methods or ()
                }
                error.headers = {"Allow": ", ".join(sorted(methods))}
            raise


class RootPathMiddleware:
    """Removes the path at which a proxy offers the server from the paths of requests."""

    def __init__(self, app: ASGIApp, root_path: str):
        self.app = app
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self.root_path or path.startswith(self.root_path + "/"):
            scope["path"] = path.removeprefix(self.root_path) or "/"
        await self.app(scope, receive, send)


def application(front: Front) -> ASGIApp:
    return with_guard(RouteTable(front), front)


def with_guard(app: ASGIApp, front: Front) -> ASGIApp:
    """Return the application behind the guard, and behind middleware that the options ask for."""
    app = Guard(app, front)
    if front.config.root_path:
        app = RootPathMiddleware(app, front.config.root_path)
    if front.config.allowed_origins:
        origins = list(front.config.allowed_origins)
        app = CORSMiddleware(
            app, allow_origins=origins, allow_methods=list(METHODS), allow_headers=["*"]
        )
    return app
