"""Defines every error that a client can receive: `{"error": {message, type, param, code}}`.

The errors have this shape on every transport. No message contains a path, an address, a prompt or a
traceback. Details of errors inside the server are logged and not sent.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from octavo.errors import InvalidRequest, ModelError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    424: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "invalid_request_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}
MAX_RETRY_AFTER = 120.0  # openai-python ignores a larger number of seconds.


class ApiError(Exception):
    """An error for one client. `retry_after` is the number of seconds after which to retry."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        type: str | None = None,
        retry_after: float | None = None,
        allow: str | None = None,
    ):
        """Create the error. `allow` names the HTTP methods that a route accepts."""
        # The message may quote the request. Half of a surrogate pair cannot be encoded.
        message = message.encode(errors="replace").decode()
        param = param and param.encode(errors="replace").decode()
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.type = type or TYPES[status]
        self.retry_after = retry_after
        self.allow = allow

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self.retry_after is not None:
            seconds = min(max(self.retry_after, 0.05), MAX_RETRY_AFTER)
            headers["retry-after"] = str(math.ceil(seconds))
            headers["retry-after-ms"] = str(math.ceil(seconds * 1000))
            headers["x-should-retry"] = "true"
        elif self.status >= 500:  # A retry would return the same error.
            headers["x-should-retry"] = "false"
        if self.allow is not None:
            headers["allow"] = self.allow
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status in (408, 413, 431):
            headers["connection"] = "close"  # The rest of the request is not read.
        return headers

    def encode(self) -> bytes:
        return msgspec.json.encode(self.body)

    def forget(self) -> ApiError:
        """Remove the traceback and return the error.

        The traceback refers to the frame that handles the error, and the frame refers to the error.
        This cycle would keep the data of the request until the garbage collector runs.
        """
        self.__traceback__ = None
        self.__context__ = None
        return self


def api_error(error: Exception) -> ApiError:
    """Convert any exception to an error that a client may see."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error), error.code, error.param)
    if isinstance(error, ModelError):  # For example, the chat template of the model fails.
        return ApiError(
            500, "the files of the model, such as its chat template, are faulty", "model_error"
        )
    return ApiError(
        500,
        "an internal error occurred: the log of the server has the details under this request id",
        "internal_error",
    )


# ---- errors that several modules raise -----------------------------------------------------------


def invalid_field(param: str | None, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, code, param)


def prompt_too_long(tokens: int | str, context: int, param: str = "prompt") -> ApiError:
    """Return the error. `tokens` is the length, or a phrase such as "more than 1024"."""
    message = (
        f"the prompt has {tokens} tokens, but the context holds {context}, and the reply needs at "
        "least one: shorten the prompt, or set truncate_prompt_tokens in a chat or completion"
    )
    return invalid_field(param, message, "context_length_exceeded")


def unsupported(param: str, reason: str) -> ApiError:
    return ApiError(400, f"{param} is not supported: {reason}", "unsupported_parameter", param)


def not_ready(phase: str, restarting: bool) -> ApiError:
    if phase == "sleeping":
        return ApiError(503, "the engine is asleep: wake it with POST /wake_up", "engine_sleeping")
    if restarting:
        return ApiError(
            503, "the engine is restarting: try again soon", "engine_restarting", retry_after=2.0
        )
    return ApiError(
        503,
        f"the engine is not ready yet ({phase}): try again soon",
        "engine_starting",
        retry_after=2.0,
    )


def engine_lost() -> ApiError:
    return ApiError(
        503,
        "the engine failed during this request and is restarting: try again soon",
        "engine_restarting",
        retry_after=2.0,
    )


def step_failed() -> ApiError:
    return ApiError(
        500,
        "the computation of this request failed, but the server is running: try again",
        "engine_error",
        retry_after=0.5,
    )


def out_of_memory() -> ApiError:
    return ApiError(
        503,
        "the device has too little memory for this request, even in smaller steps: try again "
        "later, or shorten the prompt",
        "out_of_memory",
        retry_after=5.0,
    )


def not_a_number(message: str) -> ApiError:
    return ApiError(500, message, "not_a_number")


def poisoned() -> ApiError:
    return ApiError(
        500,
        "this request made the engine fail repeatedly and is quarantined: do not retry it",
        "poison_request",
    )


def tried_alone() -> ApiError:
    return ApiError(
        503,
        "this request was running when the engine failed twice, and such requests run one at a "
        "time: try again soon",
        "engine_restarting",
        retry_after=1.0,
    )


def draining() -> ApiError:
    return ApiError(
        503, "the server is shutting down: try another server", "draining", retry_after=5.0
    )


def cut_off() -> ApiError:
    return ApiError(
        503,
        "the server shut down before this request was finished: try another server",
        "draining",
        retry_after=5.0,
    )


def cancelled() -> ApiError:
    return ApiError(499, "the request was cancelled", "cancelled")


def queue_full(reason: str, retry_after: float) -> ApiError:
    return ApiError(
        429,
        f"the queue is full ({reason}): try again later",
        "queue_full",
        type="overloaded_error",
        retry_after=retry_after,
    )


def queue_timeout(seconds: float, retry_after: float) -> ApiError:
    return ApiError(
        429,
        f"the request waited in the queue for {seconds:g} s without being started: try again later",
        "queue_timeout",
        type="overloaded_error",
        retry_after=retry_after,
    )


def deadline_exceeded(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"the request did not finish within its timeout of {seconds:g} s: shorten the reply, or "
        "set a longer timeout",
        "deadline_exceeded",
    )
