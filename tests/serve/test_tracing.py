"""Spans arrive at a collector in this process, over both protocols of OTLP: their tree, their times
and their attributes. The collector decodes them with the messages of opentelemetry-proto.

Most tests need `pip install 'octavo[otel]'` and are slow."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest

from octavo.errors import InvalidRequest
from octavo.serve.front.front import Front
from octavo.serve.proto import octavo_pb2 as pb
from octavo.serve.proto.octavo_pb2_grpc import InferenceServiceStub
from octavo.serve.serve_config import ServeConfig
from tests.serve.running import Running, free_port, server

HAS_OTEL = importlib.util.find_spec("opentelemetry") is not None
needs_otel = pytest.mark.skipif(not HAS_OTEL, reason="needs octavo[otel]")
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01"
NOT_SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-00"
ASKED = {"prompt": "hello", "max_tokens": 6, "ignore_eos": True, "temperature": 0.5, "seed": 3}


class Collector:
    """Keeps the spans that exporters send."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()

    def add(self, request: Any) -> None:
        for resource in request.resource_spans:
            named = {one.key: one.value.string_value for one in resource.resource.attributes}
            self.services.add(named["service.name"])
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def tree(self, trace_id: str, count: int, seconds: float = 20) -> list[Any]:
        """Wait until a trace has this many spans, and return them by their start."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = [span for span in self.spans if span.trace_id.hex() == trace_id]
            if len(found) >= count:
                return sorted(
                    found, key=lambda span: (span.start_time_unix_nano, -span.end_time_unix_nano)
                )
            time.sleep(0.05)
        raise AssertionError([(span.name, span.trace_id.hex()) for span in self.spans])


@pytest.fixture(scope="module", params=["grpc", "http/protobuf"])
def collector(request: pytest.FixtureRequest) -> Iterator[tuple[Collector, str, str]]:
    """The collector, its endpoint and its protocol."""
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

    found = Collector()
    if request.param == "grpc":

        class Service(services.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:
                found.add(request)
                return messages.ExportTraceServiceResponse()

        rpc = grpc.server(futures.ThreadPoolExecutor(2))
        services.add_TraceServiceServicer_to_server(Service(), rpc)
        port = rpc.add_insecure_port("127.0.0.1:0")
        rpc.start()
        yield found, f"http://127.0.0.1:{port}", request.param
        rpc.stop(None)
        return

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["content-type"] == "application/x-protobuf"
            body = self.rfile.read(int(self.headers["content-length"]))
            found.add(messages.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield found, f"http://127.0.0.1:{http.server_port}/v1/traces", request.param
    http.shutdown()


@pytest.fixture(scope="module")
def traced(
    collector: tuple[Collector, str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, Collector, int]]:
    """A server whose spans go to the collector, and its gRPC port."""
    found, endpoint, protocol = collector
    grpc_port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        folder = tmp_path_factory.mktemp("traced")
        with server(
            folder, otlp_traces_endpoint=endpoint, grpc_port=grpc_port, log_level="INFO"
        ) as running:
            yield running, found, grpc_port


def attributes(span: Any) -> dict[str, Any]:
    values = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        values[one.key] = getattr(one.value, kind)
    return values


@needs_otel
@pytest.mark.slow
def test_a_request_is_a_tree_from_http_to_steps(traced: tuple[Running, Collector, int]) -> None:
    running, found, _ = traced
    before = time.time_ns()
    reply = running.post("/v1/completions", ASKED, headers={"traceparent": SAMPLED})
    after = time.time_ns()
    assert reply.status_code == 200
    spans = {span.name: span for span in found.tree(TRACE_ID, 5)}
    assert set(spans) == {"POST /v1/completions", "llm_request", "queued", "prefill", "decode"}
    http, request = spans["POST /v1/completions"], spans["llm_request"]
    assert http.parent_span_id.hex() == PARENT_ID and http.kind == 2  # SERVER
    assert request.parent_span_id == http.span_id
    assert all(
        spans[name].parent_span_id == request.span_id for name in ("queued", "prefill", "decode")
    )
    assert reply.headers["traceresponse"] == f"00-{TRACE_ID}-{http.span_id.hex()}-01"
    assert before - 2e6 <= http.start_time_unix_nano <= request.start_time_unix_nano + 2e6
    assert spans["decode"].end_time_unix_nano <= after
    assert spans["prefill"].end_time_unix_nano <= spans["decode"].start_time_unix_nano + 2e6
    assert len(spans["decode"].events) == 5 and {e.name for e in spans["decode"].events} == {"step"}
    of_http = attributes(http)
    assert of_http["http.response.status_code"] == 200
    assert of_http["http.route"] == "/v1/completions"
    of_request = attributes(request)
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.completion_tokens": 6,
        "gen_ai.usage.num_sequences": 1,
    }
    assert {name: of_request[name] for name in expected} == expected
    assert of_request["gen_ai.usage.input_tokens"] == of_request["gen_ai.usage.prompt_tokens"] > 0
    assert 0 < of_request["gen_ai.latency.time_to_first_token"] < of_request["gen_ai.latency.e2e"]
    assert of_request["gen_ai.latency.time_in_model_decode"] > 0
    assert of_request["gen_ai.request.id"].startswith(reply.headers["x-octavo-request-id"])
    assert attributes(spans["prefill"])["octavo.tokens"] == of_request["gen_ai.usage.input_tokens"]
    assert "hello" not in str(spans), "no text of the client"
    assert found.services == {"octavo"}
    assert f"trace_id={TRACE_ID}" in running.log.read_text()


@needs_otel
@pytest.mark.slow
def test_without_a_context_a_trace_begins_and_the_reply_names_it(
    traced: tuple[Running, Collector, int],
) -> None:
    running, found, _ = traced
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
        "n": 2,
        "stream": True,
    }
    reply = running.post("/v1/chat/completions", body)
    _, trace_id, span_id, flags = reply.headers["traceresponse"].split("-")
    assert int(flags, 16) & 1 and trace_id != TRACE_ID
    spans = found.tree(trace_id, 6)
    assert spans[0].span_id.hex() == span_id and spans[0].name == "POST /v1/chat/completions"
    request = next(span for span in spans if span.name == "llm_request")
    assert attributes(request)["gen_ai.operation.name"] == "chat"
    indices = {attributes(span).get("octavo.sequence.index") for span in spans}
    assert {0, 1} <= indices


@needs_otel
@pytest.mark.slow
def test_what_the_client_does_not_sample_has_no_spans(
    traced: tuple[Running, Collector, int],
) -> None:
    running, found, _ = traced
    other = NOT_SAMPLED.replace("4bf9", "5bf9")
    reply = running.post("/v1/completions", ASKED, headers={"traceparent": other})
    assert reply.headers["traceresponse"].startswith(f"00-{other[3:35]}-")
    assert reply.headers["traceresponse"].endswith("-00")
    probe = running.get("/health")
    assert "traceresponse" not in probe.headers, "probes have no spans"
    time.sleep(0.5)
    assert not [span for span in found.spans if span.trace_id.hex() == other[3:35]]
    invalid = running.post("/v1/completions", ASKED, headers={"traceparent": "00-nonsense-01"})
    assert invalid.status_code == 200 and "nonsense" not in invalid.headers["traceresponse"]


@needs_otel
@pytest.mark.slow
def test_errors_and_disconnects_end_their_spans(traced: tuple[Running, Collector, int]) -> None:
    running, found, _ = traced
    refused = running.post("/v1/completions", {**ASKED, "temperature": -5})
    (span,) = found.tree(refused.headers["traceresponse"].split("-")[1], 1)
    assert attributes(span)["http.response.status_code"] == 400 and span.status.code == 0
    with httpx.Client(base_url=running.url, timeout=30) as client:
        body = {**ASKED, "max_tokens": 900, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as reply:
            trace_id = reply.headers["traceresponse"].split("-")[1]
            next(reply.iter_raw())
    spans = {one.name: one for one in found.tree(trace_id, 5)}
    assert spans["llm_request"].status.code == 2
    assert attributes(spans["llm_request"])["error.type"] == "client_gone"
    assert spans["decode"].parent_span_id == spans["llm_request"].span_id, (
        "the engine's spans came later"
    )


@needs_otel
@pytest.mark.slow
def test_grpc_metadata_carries_the_context(traced: tuple[Running, Collector, int]) -> None:
    _, found, port = traced
    context = SAMPLED.replace("4bf9", "6bf9")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = pb.GenerateRequest(prompt="hello", max_new_tokens=4, ignore_eos=True)
        stub = InferenceServiceStub(channel)
        _, call = stub.Generate.with_call(request, metadata=(("traceparent", context),))
    answered = dict(call.trailing_metadata())["traceresponse"]
    spans = found.tree(context[3:35], 5)
    assert spans[0].name == "octavo.v1.InferenceService/Generate"
    assert spans[0].parent_span_id.hex() == PARENT_ID
    assert answered == f"00-{context[3:35]}-{spans[0].span_id.hex()}-01"
    assert attributes(spans[0])["rpc.grpc.status_code"] == 0
    assert {"llm_request", "prefill", "decode"} <= {span.name for span in spans}


@needs_otel
@pytest.mark.slow
def test_a_server_without_its_collector_serves_and_stops(tmp_path: Path) -> None:
    with server(tmp_path, otlp_traces_endpoint=f"http://127.0.0.1:{free_port()}") as running:
        assert running.complete()["choices"][0]["finish_reason"] == "length"
        begun = time.monotonic()
        assert running.stop() == 0
        assert time.monotonic() - begun < 15


@pytest.mark.skipif(HAS_OTEL, reason="octavo[otel] is installed")
def test_missing_packages_are_named() -> None:
    with pytest.raises(InvalidRequest, match=r"pip install 'octavo\[otel\]'"):
        Front(ServeConfig(otlp_traces_endpoint="http://127.0.0.1:4317"))


def test_without_the_option_nothing_is_traced(running: Running) -> None:
    reply = running.post("/v1/completions", ASKED, headers={"traceparent": SAMPLED})
    assert reply.status_code == 200 and "traceresponse" not in reply.headers
