"""Wrong keys, and right keys used for what they do not open."""

from __future__ import annotations

import time

import grpc

from octavo.serve.proto import octavo_pb2, octavo_pb2_grpc
from tests.attacks import replies
from tests.attacks.clients import open_websocket
from tests.attacks.target import ADMIN, ALICE, BOB, Target

MODELS = "/v1/models"


def get(target: Target, path: str, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return replies.check(target.running.get(path, headers=headers), {401, 403, 404, 429})


def guess(target: Target, count: int, seconds: float) -> None:
    """Right keys are served while somebody at the same address tries wrong ones."""
    for i in range(count):
        assert get(target, MODELS, f"wrong-{i:020d}") in (401, 429)
    assert get(target, MODELS, ALICE) == 200
    assert get(target, MODELS, BOB) == 200
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert get(target, MODELS, "wrong-again-00000000") in (401, 429)
        assert get(target, MODELS, ALICE) == 200
        time.sleep(0.1)


def guess_by_rpc(target: Target, port: int, count: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = octavo_pb2_grpc.InferenceServiceStub(channel)
        asked = octavo_pb2.GenerateRequest(prompt="a", max_new_tokens=1)
        for i in range(count):
            metadata = [("authorization", f"Bearer wrong-{i:020d}")]
            try:
                stub.Generate(asked, metadata=metadata)
            except grpc.RpcError as error:
                codes = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED)
                assert error.code() in codes, error
            else:
                raise AssertionError("a wrong key was taken")
        for key in (ALICE, BOB):
            stub.Generate(asked, metadata=[("authorization", f"Bearer {key}")])


def misuse(target: Target) -> None:
    """A user's key opens no route of an administrator's, no request of another user's, and nothing
    from a URL."""
    assert get(target, "/v1/dumps", BOB) == 403
    assert get(target, "/v1/dumps", ADMIN) == 200
    cancel = "/v1/requests/req_000000000000000000000000/cancel"
    assert replies.check(target.post(cancel, {}, BOB)) == 404
    connection, reply = open_websocket(target.port, f"/ws/generate?key={ALICE}")
    connection.close()
    assert reply.startswith(b"HTTP/1.1 401"), reply[:200]
    log = target.running.log.read_text()
    assert ALICE not in log and BOB not in log
