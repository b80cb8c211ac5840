"""gRPC, against a real server: the same text, keys, limits and errors as over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from octavo.serve.api.protocol import BatchGenerateRequest, GenerateRequest
from octavo.serve.front.front import Front
from octavo.serve.proto import octavo_pb2 as pb
from octavo.serve.proto.octavo_pb2_grpc import InferenceServiceStub
from octavo.serve.serve_config import ServeConfig
from octavo.serve.server import ServeError, listen_rpc
from tests.serve.running import NAME, ROOT, Running, alive, free_port, server
from tests.serve.test_streams import settled

SERVICE = "octavo.v1.InferenceService"
KEY = "alice-0123456789abcdef"
SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)
LONG = pb.GenerateRequest(prompt="hello", max_new_tokens=900, ignore_eos=True)
Code = grpc.StatusCode


class Rpc:
    """A running server and a channel to it."""

    def __init__(self, running: Running, port: int):
        self.running, self.port = running, port
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self.stub, self.health = (
            InferenceServiceStub(self.channel),
            health_pb2_grpc.HealthStub(self.channel),
        )
        self.watch: Any = None
        self.watched: list[int] = []
        self.early: dict[str, Any] = {}

    def raw(self, method: str, data: bytes, **options: Any) -> bytes:
        return self.channel.unary_unary(method)(data, timeout=10, **options)

    def services(self, **options: Any) -> set[str]:
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (reply,) = reflection_pb2_grpc.ServerReflectionStub(self.channel).ServerReflectionInfo(
            iter([ask]), **options
        )
        return {service.name for service in reply.list_services_response.service}


@pytest.fixture(scope="module")
def rpc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rpc]:
    """Watched from its start on, by `rpc.watch`."""
    port = free_port()
    limits = {"send_seconds": 0.5, "body_seconds": 0.5, "connections_per_address": 20}
    with server(
        tmp_path_factory.mktemp("rpc"), ready=False, grpc_port=port, limits=limits
    ) as running:
        found = Rpc(running, port)
        found.watch = found.health.Watch(health_pb2.HealthCheckRequest())
        found.watched = [next(found.watch).status]
        found.early = refused(
            lambda: found.stub.Generate(LONG), Code.UNAVAILABLE, "engine_starting"
        )
        found.watched.append(next(found.watch).status)
        yield found
        found.channel.close()
        log = running.log.read_text()
        assert "Traceback" not in log and "never retrieved" not in log and "fork" not in log, log[
            -3000:
        ]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rpc]:
    """With a key, and room for one request that runs, one that waits, and ten calls."""
    folder, port = tmp_path_factory.mktemp("locked"), free_port()
    (folder / "keys.toml").write_text(f'[[keys]]\nname = "alice"\nkey = "{KEY}"\n')
    tight: dict[str, Any] = {
        "engine": {"max_num_seqs": 1},
        "max_queue": 1,
        "limits": {"connections": 10},
    }
    with server(folder, keys_file=str(folder / "keys.toml"), grpc_port=port, **tight) as running:
        found = Rpc(running, port)
        yield found
        found.channel.close()


def refused(
    call: Callable[[], Any], code: grpc.StatusCode, name: str | None = ...
) -> dict[str, Any]:  # type: ignore[assignment]
    """The error, which must look as every error does; and its metadata under "metadata"."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    assert error.code() is code, error
    metadata = dict(error.trailing_metadata())
    assert metadata["x-request-id"].startswith("req_")
    body: dict[str, Any] = json.loads(metadata["octavo-error-bin"])["error"]
    assert set(body) == {"message", "type", "param", "code"} and body["message"] == error.details()
    assert (
        "Traceback" not in error.details()
        and "/octavo/" not in error.details()
        and "0x" not in error.details()
    )
    if name is not ...:
        assert body["code"] == name
    return {**body, "metadata": metadata}


# ---- the service ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 7},
        {"stop": ["e"]},
    ],
)
def test_generate_says_what_http_says(rpc: Rpc, more: dict[str, Any]) -> None:
    more = {"seed": 3, **more}
    want = rpc.running.post("/generate", {"prompt": "hello", "max_new_tokens": 24, **more}).json()[
        "generated_text"
    ]
    reply, call = rpc.stub.Generate.with_call(
        pb.GenerateRequest(prompt="hello", max_new_tokens=24, **more)
    )
    assert (
        reply.generated_text == want
        and 1 <= reply.tokens_generated <= 24
        and 0 < reply.latency_ms < 10_000
    )
    assert dict(call.trailing_metadata())["x-request-id"].startswith("req_")


def test_a_stream_is_the_same_text_in_pieces(rpc: Rpc) -> None:
    ask = pb.GenerateRequest(prompt="hello", max_new_tokens=24, seed=3, ignore_eos=True)
    whole, pieces = rpc.stub.Generate(ask), list(rpc.stub.GenerateStream(ask))
    assert "".join(p.text for p in pieces) == whole.generated_text and len(pieces) > 5
    assert pieces[-1].tokens_generated == whole.tokens_generated == 24
    assert [p.finish_reason for p in pieces] == [""] * (len(pieces) - 1) + ["length"]
    assert [p.tokens_generated for p in pieces] == sorted(p.tokens_generated for p in pieces)


def test_a_batch_is_in_order(rpc: Rpc) -> None:
    prompts = ["hello", "one two", "x"]
    reply = rpc.stub.BatchGenerate(
        pb.BatchGenerateRequest(prompts=prompts, max_new_tokens=8, temperature=0)
    )
    alone = [
        rpc.stub.Generate(pb.GenerateRequest(prompt=p, max_new_tokens=8, temperature=0))
        for p in prompts
    ]
    assert [r.generated_text for r in reply.responses] == [r.generated_text for r in alone]
    assert [r.tokens_generated for r in reply.responses] == [r.tokens_generated for r in alone]


# Fields of every kind: each changes the text, or may not be lost.
ASKED: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.5, "seed": 3},
    "stop_token_ids": {"stop_token_ids": list(range(97, 123)), "seed": 3},
    "include_stop_str_in_output": {"stop": ["vZ"], "include_stop_str_in_output": True, "seed": 3},
    "penalties": {
        "presence_penalty": 1.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.3,
        "temperature": 0,
    },
    "logit_bias": {"logit_bias": {65: 100.0}, "temperature": 0},
    "allowed_token_ids": {"allowed_token_ids": [65, 66], "seed": 3},
    "special tokens": {
        "allowed_token_ids": [256, 65],
        "skip_special_tokens": False,
        "ignore_eos": True,
        "seed": 3,
    },
    "min_tokens": {"min_tokens": 20, "stop_token_ids": list(range(200)), "seed": 3},
    "beams": {
        "use_beam_search": True,
        "best_of": 4,
        "length_penalty": 0.5,
        "early_stopping": "never",
    },
    "beams that stop early": {"use_beam_search": True, "best_of": 4, "early_stopping": "true"},
    "best_of": {"best_of": 3, "seed": 3},
    "regex": {"structured_outputs": {"regex": "[a-f]{3,9}"}, "seed": 3},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}, "seed": 3},
    "json": {"structured_outputs": {"json": '{"type": "boolean"}'}, "seed": 3},
    "grammar": {"structured_outputs": {"grammar": 'start: "a" | "bc"'}, "seed": 3},
    "any object": {"structured_outputs": {"json_object": True}, "seed": 3},
    "a repetition": {
        "structured_outputs": {"regex": "[ab]{50}"},
        "seed": 3,
        "repetition_detection": {"max_pattern_size": 2, "min_count": 2},
    },
    "labels": {
        "model": NAME,
        "cache_salt": "s",
        "request_id": "me",
        "timeout": 30.0,
        "temperature": 0,
    },
}


@pytest.mark.parametrize("name", ASKED)
def test_every_field_means_what_it_means_over_http(rpc: Rpc, name: str) -> None:
    asked = {"max_new_tokens": 24, **ASKED[name]}
    body = {
        **asked,
        "early_stopping": {"true": True}.get(
            str(asked.get("early_stopping")), asked.get("early_stopping")
        ),
    }
    want = rpc.running.post("/generate", {"prompt": "hello", **body}).json()["generated_text"]
    plain = rpc.stub.Generate(pb.GenerateRequest(prompt="hello", max_new_tokens=24, **{
        k: v for k, v in asked.items() if k in ("seed", "temperature")})).generated_text  # fmt: skip
    assert rpc.stub.Generate(pb.GenerateRequest(prompt="hello", **asked)).generated_text == want
    batch = rpc.stub.BatchGenerate(
        pb.BatchGenerateRequest(prompts=["hello"] * 2, **asked)
    ).responses
    assert "seed" in asked or [r.generated_text for r in batch] == [want] * 2
    assert want != plain or name == "labels", "it shows"


def test_control_tokens_of_a_prompt(rpc: Rpc) -> None:
    ask = dict(prompt="a<|end|>", max_new_tokens=1)
    assert rpc.stub.Generate(pb.GenerateRequest(**ask)).prompt_tokens == 2
    assert rpc.stub.Generate(pb.GenerateRequest(**ask, parse_special=False)).prompt_tokens == 8


def test_no_field_of_http_is_missing() -> None:
    """By the same names; what is said in another way here is named."""
    other_ways = {
        "response_format",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_whitespace_pattern",
        "json_schema",
        "regex",
        "ebnf",
        "grammar",
        "user",
    }
    for message, struct in (
        (pb.GenerateRequest, GenerateRequest),
        (pb.BatchGenerateRequest, BatchGenerateRequest),
    ):
        assert {f.name for f in message.DESCRIPTOR.fields} == set(
            struct.__struct_fields__
        ) - other_ways
    one, many = (
        {f.name: (f.number, f.type) for f in m.DESCRIPTOR.fields}
        for m in (pb.GenerateRequest, pb.BatchGenerateRequest)
    )
    assert {**one, "prompts": one["prompt"]} == {**many, "prompt": many["prompts"]}


def test_replies_say_how_they_ended_and_what_was_cached(rpc: Rpc) -> None:
    ask = pb.GenerateRequest(
        prompt="a prompt of several blocks " * 4,
        max_new_tokens=4,
        cache_salt="rpc",
        ignore_eos=True,
    )
    first, second = rpc.stub.Generate(ask), rpc.stub.Generate(ask)
    *pieces, last = rpc.stub.GenerateStream(ask)
    assert (
        first.finish_reason == last.finish_reason == "length"
        and first.prompt_tokens == last.prompt_tokens == 108
    )
    assert first.cached_tokens == 0 and second.cached_tokens == last.cached_tokens == 96
    assert all(p.prompt_tokens == 0 for p in pieces)


def test_fields_without_effect_are_named(rpc: Rpc) -> None:
    _, call = rpc.stub.Generate.with_call(
        pb.GenerateRequest(prompt="x", max_new_tokens=1, priority=3)
    )
    assert dict(call.trailing_metadata())["x-ignored-params"] == "priority"


def test_what_is_left_out_has_its_default(rpc: Rpc) -> None:
    assert (
        rpc.stub.Generate(pb.GenerateRequest(prompt="hello", ignore_eos=True)).tokens_generated
        == 128
    )


def test_health(rpc: Rpc) -> None:
    found = rpc.stub.Health(pb.HealthRequest())
    assert found.ready and found.state == found.phase == "ready" and found.elapsed_s > 0
    for service in ("", SERVICE):
        assert rpc.health.Check(health_pb2.HealthCheckRequest(service=service)).status == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        rpc.health.Check(health_pb2.HealthCheckRequest(service="nothing"))
    assert caught.value.code() is Code.NOT_FOUND


def test_reflection_lists_the_services(rpc: Rpc) -> None:
    assert rpc.services() == {
        SERVICE,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


def test_reflection_is_all_that_a_client_needs(rpc: Rpc) -> None:
    """As grpcurl does it: no file of ours, only what the server tells of itself."""
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(rpc.channel))
    method = pool.FindServiceByName(SERVICE).FindMethodByName("Generate")
    ask, reply = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    body = json_format.ParseDict(
        {"prompt": "hello", "max_new_tokens": 8, "structured_outputs": {"choice": ["yes"]}}, ask()
    )
    found = reply.FromString(rpc.raw(f"/{SERVICE}/{method.name}", body.SerializeToString()))
    assert (
        json_format.MessageToDict(found, preserving_proto_field_name=True)["generated_text"]
        == "yes"
    )


# ---- what is wrong with a call -------------------------------------------------------------------

BAD = {
    "negative length": (
        pb.GenerateRequest(prompt="x", max_new_tokens=-2),
        "max_new_tokens",
        "param_out_of_range",
    ),
    "too hot": (
        pb.GenerateRequest(prompt="x", temperature=2.5),
        "temperature",
        "param_out_of_range",
    ),
    "no number": (
        pb.GenerateRequest(prompt="x", temperature=float("nan")),
        "temperature",
        "param_out_of_range",
    ),
    "top_p": (pb.GenerateRequest(prompt="x", top_p=-1), "top_p", "param_out_of_range"),
    "stops": (pb.GenerateRequest(prompt="x", stop=["x"] * 65), "stop", "param_out_of_range"),
    "empty stop": (pb.GenerateRequest(prompt="x", stop=[""]), "stop", None),
    "best_of": (pb.GenerateRequest(prompt="x", best_of=100), "best_of", "param_out_of_range"),
    "early_stopping": (
        pb.GenerateRequest(prompt="x", use_beam_search=True, early_stopping="soon"),
        "early_stopping",
        None,
    ),
    "two structures": (
        pb.GenerateRequest(prompt="x", structured_outputs={"regex": "a", "choice": ["b"]}),
        "structured_outputs",
        None,
    ),
    "a bad regex": (
        pb.GenerateRequest(prompt="x", structured_outputs={"regex": "("}),
        "structured_outputs",
        "invalid_structured_output",
    ),
    "timeout": (pb.GenerateRequest(prompt="x", timeout=-1), "timeout", "param_out_of_range"),
    "token ids": (
        pb.GenerateRequest(prompt="x", allowed_token_ids=[-1]),
        "allowed_token_ids",
        "param_out_of_range",
    ),
    "too long": (pb.GenerateRequest(prompt="hello " * 3000), "prompt", "context_length_exceeded"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_parameters(rpc: Rpc, name: str) -> None:
    ask, param, code = BAD[name]
    for call in (lambda: rpc.stub.Generate(ask), lambda: list(rpc.stub.GenerateStream(ask))):
        assert refused(call, Code.INVALID_ARGUMENT, code)["param"] == param


@pytest.mark.parametrize("count", [0, 2049])
def test_too_few_and_too_many_prompts(rpc: Rpc, count: int) -> None:
    ask = pb.BatchGenerateRequest(prompts=["x"] * count, max_new_tokens=1)
    assert refused(lambda: rpc.stub.BatchGenerate(ask), Code.INVALID_ARGUMENT)["param"] == "prompts"


@pytest.mark.parametrize(
    "data", [b"\x0a\x02\xff\xfe", b"\x0a\xff\xff\xff\xff\x0f", b"\xff" * 40, b"\x0a\x05abc"]
)
def test_bytes_that_are_not_a_message(rpc: Rpc, data: bytes) -> None:
    """Text that is not UTF-8, lengths beyond the end, noise."""
    refused(lambda: rpc.raw(f"/{SERVICE}/Generate", data), Code.INVALID_ARGUMENT)


def test_a_field_that_is_not_known_is_named(rpc: Rpc) -> None:
    # field 99
    data = pb.GenerateRequest(prompt="x", max_new_tokens=1).SerializeToString() + b"\x98\x06\x01"
    reply, call = rpc.channel.unary_unary(f"/{SERVICE}/Generate").with_call(data)
    assert pb.GenerateResponse.FromString(reply).tokens_generated == 1
    assert dict(call.trailing_metadata())["x-ignored-params"] == "field-99"


@pytest.mark.parametrize("method", [f"/{SERVICE}/Nothing", "/no.Such/Thing", "/"])
def test_unknown_methods(rpc: Rpc, method: str) -> None:
    refused(lambda: rpc.raw(method, b""), Code.UNIMPLEMENTED, "unknown_method")


def test_a_call_without_its_message(rpc: Rpc) -> None:
    refused(
        lambda: list(rpc.channel.stream_stream(f"/{SERVICE}/Generate")(iter(()))),
        Code.INVALID_ARGUMENT,
    )
    never = threading.Event()
    silent = (b"" for _ in iter(never.wait, True))
    refused(
        lambda: list(rpc.channel.stream_stream(f"/{SERVICE}/Generate")(silent)),
        Code.DEADLINE_EXCEEDED,
        "body_timeout",
    )
    never.set()


def test_messages_over_the_limit_and_compressed_ones(rpc: Rpc) -> None:
    """A compressed message's true size is not known in time, so there are none."""
    with pytest.raises(grpc.RpcError) as caught:
        rpc.stub.Generate(pb.GenerateRequest(prompt="x" * (9 * 2**20)))
    assert caught.value.code() is Code.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.RpcError) as caught:
        rpc.stub.Generate(
            pb.GenerateRequest(prompt="x" * 10_000), compression=grpc.Compression.Gzip
        )
    assert caught.value.code() is Code.UNIMPLEMENTED
    assert rpc.stub.Generate(pb.GenerateRequest(prompt="x", max_new_tokens=1)).tokens_generated == 1


def test_another_model_and_what_cannot_be_streamed(rpc: Rpc) -> None:
    refused(
        lambda: rpc.stub.Generate(pb.GenerateRequest(prompt="x", model="gpt-9")),
        Code.NOT_FOUND,
        "model_not_found",
    )
    best = pb.GenerateRequest(prompt="x", best_of=2)
    refused(
        lambda: list(rpc.stub.GenerateStream(best)), Code.INVALID_ARGUMENT, "unsupported_parameter"
    )
    late = pb.GenerateRequest(prompt="x", timeout=0.02, max_new_tokens=900, ignore_eos=True)
    refused(lambda: rpc.stub.Generate(late), Code.DEADLINE_EXCEEDED, "deadline_exceeded")


# ---- time, leaving, load -------------------------------------------------------------------------


def test_deadlines(rpc: Rpc) -> None:
    for seconds in (0.001, 0.1):
        for call in (
            lambda t: rpc.stub.Generate(LONG, timeout=t),
            lambda t: list(rpc.stub.GenerateStream(LONG, timeout=t)),
        ):
            begun = time.monotonic()
            with pytest.raises(grpc.RpcError) as caught:
                call(seconds)
            assert (
                caught.value.code() is Code.DEADLINE_EXCEEDED
                and time.monotonic() - begun < seconds + 0.5
            )
    settled(rpc.running)


def test_cancelling_frees_the_blocks(rpc: Rpc) -> None:
    begun = settled(rpc.running)["octavo:generation_tokens_total"]
    stream = rpc.stub.GenerateStream(LONG)
    next(stream)
    stream.cancel()
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert caught.value.code() is Code.CANCELLED
    between = settled(rpc.running)["octavo:generation_tokens_total"]
    whole = rpc.stub.Generate.future(LONG)
    while rpc.running.metrics()["octavo:num_requests_open"] == 0:
        assert not whole.done()
    whole.cancel()
    found = settled(rpc.running)
    assert between - begun < 900 and found["octavo:generation_tokens_total"] - between < 900, (
        "ended, not finished"
    )
    assert found["octavo:open_streams"] == 0


GENERATE = "/octavo.v1.InferenceService/Generate"


def varints(count: int, field: int) -> bytes:
    """So many fields of one byte each, of a number that fits into one byte."""
    return bytes([field << 3, 1]) * count


def test_a_large_message_is_parsed_in_a_worker_process(rpc: Rpc) -> None:
    prompt = pb.GenerateRequest(prompt="a", max_new_tokens=1).SerializeToString()
    packed = bytes([10 << 3 | 2]) + b"\x80\x80\xc0\x01" + b"\x01" * (3 * 2**20)  # stop_token_ids
    text = pb.GenerateRequest(prompt="a" * (8 * 2**20 - 100)).SerializeToString()
    empty = bytes([1 << 3 | 2, 0]) * (2 * 2**20)
    with alive(rpc.running):
        assert pb.GenerateResponse.FromString(rpc.raw(GENERATE, prompt + varints(2 * 2**20, 2)))
        for method, data in (
            (GENERATE, prompt + packed),
            (GENERATE, text),
            (GENERATE.replace("Generate", "BatchGenerate"), empty),
        ):
            refused(lambda m=method, d=data: rpc.raw(m, d), Code.INVALID_ARGUMENT)  # type: ignore[misc]


def test_unknown_fields_of_a_large_message_are_bounded(rpc: Rpc) -> None:
    prompt = pb.GenerateRequest(prompt="a", max_new_tokens=1).SerializeToString()
    known = b"".join(pb_tag(number) + b"\x01" for number in range(1000, 1300))
    refused(lambda: rpc.raw(GENERATE, prompt + known), Code.INVALID_ARGUMENT, "param_out_of_range")


def pb_tag(number: int) -> bytes:
    """The head of a varint field, in two bytes."""
    tag = number << 3
    return bytes([0x80 | tag & 0x7F, tag >> 7])


def test_a_health_request_is_small(rpc: Rpc) -> None:
    method = "/octavo.v1.InferenceService/Health"
    refused(lambda: rpc.raw(method, b"\x50\x01" * 2**20), Code.INVALID_ARGUMENT)


def test_a_stream_is_cancelled_over_http(rpc: Rpc) -> None:
    stream = rpc.stub.GenerateStream(LONG)
    next(stream)
    id = dict(stream.initial_metadata())["x-request-id"]
    assert rpc.running.post(f"/v1/requests/{id}/cancel", {}).json()["cancelled"] is True
    assert (
        refused(lambda: list(stream), Code.CANCELLED, "cancelled")["metadata"]["x-request-id"] == id
    )
    settled(rpc.running)


def test_a_channel_that_vanishes_frees_the_blocks(rpc: Rpc) -> None:
    other = Rpc(rpc.running, rpc.port)
    next(other.stub.GenerateStream(LONG))
    other.channel.close()
    settled(rpc.running)


def test_a_client_that_does_not_read_is_disconnected(rpc: Rpc) -> None:
    narrow = grpc.insecure_channel(
        f"127.0.0.1:{rpc.port}", [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    )
    number = 18  # an address may have 20 open calls here, and a health watch is open already
    streams = [InferenceServiceStub(narrow).GenerateStream(LONG) for _ in range(number)]
    begun = time.monotonic()
    while rpc.running.metrics()["octavo:open_streams"] < number:
        assert time.monotonic() - begun < 5, "they never began"
    settled(rpc.running, 10)
    left = 0
    for stream in streams:
        with contextlib.suppress(grpc.RpcError):
            list(stream)
        left += stream.code() is Code.CANCELLED
    assert left > number / 2
    narrow.close()


def test_watchers_hear_of_a_start_and_of_the_engines_death(rpc: Rpc) -> None:
    assert (
        rpc.watched == [NOT_SERVING, SERVING] and int(rpc.early["metadata"]["retry-after-ms"]) > 0
    )
    stream = rpc.stub.GenerateStream(LONG)
    next(stream)
    os.kill(rpc.running.engines()[0], signal.SIGKILL)
    refused(lambda: list(stream), Code.UNAVAILABLE, "engine_restarting")
    assert [next(rpc.watch).status, next(rpc.watch).status] == [NOT_SERVING, SERVING]
    assert rpc.stub.Generate(pb.GenerateRequest(prompt="x", max_new_tokens=1)).tokens_generated == 1


def test_open_calls_of_an_address_are_bounded(rpc: Rpc) -> None:
    watches = []
    with pytest.raises(grpc.RpcError) as caught:
        for _ in range(20):
            watches.append(rpc.health.Watch(health_pb2.HealthCheckRequest()))
            next(watches[-1])
    assert caught.value.code() is Code.RESOURCE_EXHAUSTED
    assert len(watches) == 20, "one more was open already"
    found = refused(
        lambda: rpc.stub.Generate(SHORT), Code.RESOURCE_EXHAUSTED, "too_many_connections"
    )
    assert int(found["metadata"]["retry-after-ms"]) > 0
    for watch in watches:
        watch.cancel()
    begun = time.monotonic()
    while True:
        try:
            assert rpc.stub.Generate(SHORT).tokens_generated > 0
            return
        except grpc.RpcError:
            assert time.monotonic() - begun < 5
            time.sleep(0.05)


def test_a_client_may_ping_an_idle_connection_every_second(rpc: Rpc) -> None:
    """gRPC's defaults end the connection after the third ping, with GOAWAY too_many_pings."""
    states: list[grpc.ChannelConnectivity] = []
    options = [
        ("grpc.keepalive_time_ms", 600),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    with grpc.insecure_channel(f"127.0.0.1:{rpc.port}", options=options) as channel:
        channel.subscribe(states.append)
        assert InferenceServiceStub(channel).Health(pb.HealthRequest()).ready
        time.sleep(3.5)
        assert states[-1] is grpc.ChannelConnectivity.READY, states
        assert states.count(grpc.ChannelConnectivity.READY) == 1, states


def test_a_port_that_is_taken(rpc: Rpc) -> None:
    async def again() -> None:
        listen_rpc(Front(ServeConfig()), "127.0.0.1", rpc.port)

    with pytest.raises(ServeError, match=f"cannot listen on port {rpc.port} for gRPC"):
        asyncio.run(again())


# ---- keys, load, the end -------------------------------------------------------------------------

GOOD = {"metadata": (("authorization", f"Bearer {KEY}"),)}
WRONG = {
    "none": {},
    "wrong": {"metadata": (("authorization", "Bearer wrong-0123456789"),)},
    "bare": {"metadata": (("authorization", KEY),)},
}
SHORT = pb.GenerateRequest(prompt="hello", max_new_tokens=4)


@pytest.mark.parametrize("name", WRONG)
def test_all_but_health_needs_a_key(locked: Rpc, name: str) -> None:
    wrong: Any = WRONG[name]
    for call in (
        lambda: locked.stub.Generate(SHORT, **wrong),
        lambda: list(locked.stub.GenerateStream(SHORT, **wrong)),
        lambda: locked.stub.BatchGenerate(pb.BatchGenerateRequest(prompts=["x"]), **wrong),
        lambda: locked.services(**wrong),
        lambda: locked.raw("/no.Such/Thing", b"", **wrong),
        lambda: locked.raw("/grpc.health.v1.Health/Nothing", b"", **wrong),
    ):
        refused(call, Code.UNAUTHENTICATED, "invalid_api_key")
    assert locked.stub.Health(pb.HealthRequest(), **wrong).ready
    assert locked.health.Check(health_pb2.HealthCheckRequest(), **wrong).status == SERVING


def test_a_key_opens(locked: Rpc) -> None:
    assert 1 <= locked.stub.Generate(SHORT, **GOOD).tokens_generated <= 4
    assert SERVICE in locked.services(**GOOD)
    refused(lambda: locked.raw("/no.Such/Thing", b"", **GOOD), Code.UNIMPLEMENTED, "unknown_method")


def test_a_full_queue_says_when_to_come_back(locked: Rpc) -> None:
    first = locked.stub.GenerateStream(LONG, **GOOD)
    next(first)
    second = locked.stub.GenerateStream(LONG, **GOOD)
    second.initial_metadata()  # it waits
    found = refused(
        lambda: locked.stub.Generate(LONG, **GOOD), Code.RESOURCE_EXHAUSTED, "queue_full"
    )
    assert 0 < int(found["metadata"]["retry-after-ms"]) <= 120_000
    assert found["metadata"]["grpc-retry-pushback-ms"] == found["metadata"]["retry-after-ms"]
    second.cancel()
    first.cancel()


def opened(call: Callable[[], Any], seconds: float = 10.0) -> tuple[Any, Any]:
    """A stream's first message, and the stream. The server counts a cancelled call until it hears
    of it: try again."""
    deadline = time.monotonic() + seconds
    while True:
        stream = call()
        try:
            return next(stream), stream
        except grpc.RpcError as error:
            if error.code() is not Code.RESOURCE_EXHAUSTED or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def watching(rpc: Rpc, name: str = "") -> Any:
    first, watch = opened(lambda: rpc.health.Watch(health_pb2.HealthCheckRequest(service=name)))
    assert first.status == SERVING
    return watch


def test_calls_are_bounded(locked: Rpc) -> None:
    watches = [watching(locked) for _ in range(10)]
    with pytest.raises(grpc.RpcError) as caught:
        locked.stub.Health(pb.HealthRequest())
    assert caught.value.code() is Code.RESOURCE_EXHAUSTED
    for watch in watches:
        watch.cancel()


def test_health_watchers_are_notified_before_the_port_closes(locked: Rpc) -> None:
    """NOT_SERVING while the port is still open; what runs is finished, what is new is refused."""
    watches = [watching(locked, name) for name in ("", SERVICE, "")]
    watches.pop().cancel()  # the others are still told
    _, stream = opened(lambda: locked.stub.GenerateStream(LONG, **GOOD))
    locked.running.process.send_signal(signal.SIGTERM)
    assert [next(w).status for w in watches] == [NOT_SERVING] * 2
    assert locked.health.Check(health_pb2.HealthCheckRequest()).status == NOT_SERVING
    refused(lambda: locked.stub.Generate(SHORT, **GOOD), Code.UNAVAILABLE, "draining")
    assert list(stream)[-1].tokens_generated == 900
    assert all(list(w) == [] for w in watches), "they were let go, not cut off"
    assert locked.running.process.wait(10) == 0


# ---- the generated code --------------------------------------------------------------------------


def test_the_generated_code_is_that_of_the_proto(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    folder = Path("octavo/serve/proto")
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    argv = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I.",
        *outputs,
        str(folder / "octavo.proto"),
    ]
    subprocess.run(argv, cwd=ROOT, check=True, timeout=60)
    made = {path.name: path.read_text() for path in (tmp_path / folder).iterdir()}
    assert made == {
        path.name: path.read_text() for path in (ROOT / folder).glob("*_pb2*") if path.is_file()
    }
