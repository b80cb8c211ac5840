"""Every error a client sees, on every transport, is made here: `{"error": {message, type, param,
code}}`.

No message holds a path, an address, a prompt or a traceback: what went wrong inside is logged and
not told.
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
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "invalid_request_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}
MAX_RETRY_AFTER = 120.0  # openai-python takes no more seriously


class ApiError(Exception):
    """What went wrong for one client, and whether it is of use to try again: `retry_after` seconds,
    or never."""

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
        """`allow`: the methods that a route takes."""
        # They may quote what was sent, and half of a surrogate pair can be quoted to nobody.
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
        found: dict[str, str] = {}
        if self.retry_after is not None:
            seconds = min(max(self.retry_after, 0.05), MAX_RETRY_AFTER)
            found["retry-after"] = str(math.ceil(seconds))
            found["retry-after-ms"] = str(math.ceil(seconds * 1000))
            found["x-should-retry"] = "true"
        elif self.status >= 500:  # clients would try again, and get the same
            found["x-should-retry"] = "false"
        if self.allow is not None:
            found["allow"] = self.allow
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        if self.status in (408, 413, 431):
            found["connection"] = "close"  # the rest of the request is not read
        return found

    def encode(self) -> bytes:
        return msgspec.json.encode(self.body)

    def forget(self) -> ApiError:
        """The error without its traceback, which would keep the request's data until the garbage
        collector runs: the frame that handles the error refers to it, and it to the frame."""
        self.__traceback__ = None
        self.__context__ = None
        return self


def api_error(error: Exception) -> ApiError:
    """Any exception as what a client may know of it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error), error.code, error.param)
    if isinstance(error, ModelError):  # a template that came with the model
        return ApiError(500, "the model's own files do not allow this request", "model_error")
    return ApiError(
        500,
        "an error inside the server: its log has more under this request's id",
        "internal_error",
    )


# ---- those that several places raise -------------------------------------------------------------


def invalid_field(param: str | None, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, code, param)


def prompt_too_long(tokens: int | str, context: int, param: str = "prompt") -> ApiError:
    """`tokens`: how many the prompt has, or a phrase such as "more than 1024"."""
    message = (
        f"the prompt has {tokens} tokens, but the context holds {context} and one must be left to generate: "
        "shorten it (of a chat or a completion, truncate_prompt_tokens keeps so many of its last tokens)"
    )
    return invalid_field(param, message, "context_length_exceeded")


def unsupported(param: str, why: str) -> ApiError:
    return ApiError(400, f"{param} is not supported: {why}", "unsupported_parameter", param)


def not_ready(phase: str, restarting: bool) -> ApiError:
    code, what = (
        ("engine_restarting", "starting again")
        if restarting
        else ("engine_starting", f"not ready yet ({phase})")
    )
    return ApiError(503, f"the engine is {what}: try again soon", code, retry_after=2.0)


def engine_lost() -> ApiError:
    return ApiError(503, "the engine stopped while it worked on this request; it is starting again", "engine_restarting",
                    retry_after=2.0)  # fmt: skip


def step_failed() -> ApiError:
    return ApiError(
        500,
        "the computation failed for this request; others go on",
        "engine_error",
        retry_after=0.5,
    )


def out_of_memory() -> ApiError:
    return ApiError(503, "the device's memory did not suffice for this request, in smaller steps neither: try again later, or "
                    "shorten it", "out_of_memory", retry_after=5.0)  # fmt: skip


def not_a_number(why: str) -> ApiError:
    return ApiError(500, why, "not_a_number")


def poisoned() -> ApiError:
    return ApiError(
        500,
        "this request failed the engine again and again: it is not tried any more for a while",
        "poison_request",
    )


def tried_alone() -> ApiError:
    return ApiError(503, "this request was there when the engine failed twice: such ones are tried one at a time, try again soon",
                    "engine_restarting", retry_after=1.0)  # fmt: skip


def draining() -> ApiError:
    return ApiError(
        503, "the server is shutting down: try another one", "draining", retry_after=5.0
    )


def cut_off() -> ApiError:
    return ApiError(
        503, "the server shut down before this request was done", "draining", retry_after=5.0
    )


def cancelled() -> ApiError:
    return ApiError(499, "the request was cancelled", "cancelled")


def queue_full(what: str, retry_after: float) -> ApiError:
    return ApiError(429, f"too much is waiting already ({what}): try again later", "queue_full", type="overloaded_error",
                    retry_after=retry_after)  # fmt: skip


def queue_timeout(seconds: float, retry_after: float) -> ApiError:
    return ApiError(429, f"the request waited {seconds:g} s and was not begun: try again later", "queue_timeout",
                    type="overloaded_error", retry_after=retry_after)  # fmt: skip


def deadline_exceeded(seconds: float) -> ApiError:
    return ApiError(504, f"the request was not done within its {seconds:g} s", "deadline_exceeded")
