"""What any reply of the server must look like."""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any

import httpx2 as httpx

from tests.http_replies import Reply

FIELDS = {"message", "type", "param", "code"}


def check(reply: httpx.Response | Reply, allowed: Container[int] = range(400, 500)) -> int:
    """The status: 200, or one that is allowed, in the shape of every error."""
    if isinstance(reply, Reply):
        status = reply.status
        body = reply.body
    else:
        status = reply.status_code
        body = reply.content
    if status != 200:
        assert status in allowed, (status, body[:500])
        check_error(json.loads(body), reply.headers)
    return status


def check_error(body: Any, headers: Any) -> None:
    error = body["error"]
    assert set(error) == FIELDS, error
    assert error["message"] and error["type"], error
    assert headers["x-request-id"].startswith("req_")
    text = json.dumps(error)
    assert "Traceback" not in text and "/octavo" not in text and "/tmp" not in text, error
