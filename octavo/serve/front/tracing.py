"""OpenTelemetry spans of requests, sent to a collector over OTLP (`--otlp-traces-endpoint`).

    POST /v1/chat/completions          the HTTP request or gRPC call, a child of the client's span
      llm_request                      one prompt, from its arrival to its last token
        queued, prefill, decode, ...   what the engine did (octavo/core/spans.py)

The engine process collects its spans from the event log, and only of requests that are sampled. It
sends them in one message when a sequence ends. Spans hold lengths, times and parameters, no text.
This module is the only one that imports opentelemetry, and only if an endpoint is given.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidRequest
from octavo.serve.channel.messages import RequestSpans

if TYPE_CHECKING:
    from octavo.collect import Collector
    from octavo.serve.front.engine_client import Call

PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
CONTEXT_HEADERS = ("traceparent", "tracestate")
# An aborted request ends before the engine has sent its spans, so the spans of this many requests
# are remembered.
REMEMBERED_REQUESTS = 4096
CLOCK_TOLERANCE_NS = 1_000_000
FLUSH_MS = 3000  # Spans that are not sent within this time after the shutdown are lost.
OPERATION = "gen_ai.operation.name"
# vLLM's names of the times that a request spends in the engine, and the spans that they add up.
LATENCIES = {
    "gen_ai.latency.time_in_queue": ("queued",),
    "gen_ai.latency.time_in_model_prefill": ("prefill",),
    "gen_ai.latency.time_in_model_decode": ("decode",),
    "gen_ai.latency.time_in_model_inference": ("prefill", "decode", "preempted", "swapped"),
}
Attributes = dict[str, Any]


def span_exporter(endpoint: str) -> Any:
    """Return an exporter for the protocol that the environment names. The default is gRPC."""
    chosen = [os.environ[name] for name in PROTOCOL_VARIABLES if os.environ.get(name)]
    protocol = chosen[0] if chosen else "grpc"
    if protocol == "grpc":
        # Child processes are new programs, not forks that would continue the open calls.
        os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_exporter

        return grpc_exporter.OTLPSpanExporter(endpoint=endpoint)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_exporter

        return http_exporter.OTLPSpanExporter(endpoint=endpoint)
    raise InvalidRequest(
        f"{PROTOCOL_VARIABLES[0]} must be grpc or http/protobuf, got {protocol!r}",
        "otlp_traces_endpoint",
    )


class Tracing:
    """Creates the spans of this server. OTEL_TRACES_SAMPLER decides which requests have spans."""

    def __init__(self, endpoint: str, model: str):
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            exporter = span_exporter(endpoint)
        except ImportError as error:
            raise InvalidRequest(
                f"--otlp-traces-endpoint needs more packages ({error.name} is missing): "
                "pip install 'octavo[otel]'",
                "otlp_traces_endpoint",
            ) from None
        self.model = model
        self.trace = trace
        self.propagator = TraceContextTextMapPropagator()
        resource = Resource.create()
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "octavo"}))
        self.provider = TracerProvider(resource=resource)
        self.provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self.provider.get_tracer("octavo")
        self.clock_offset = time.time_ns() - time.monotonic_ns()
        self.spans: OrderedDict[str, Any] = OrderedDict()  # request id -> its llm_request

    def begin(
        self, name: str, headers: Mapping[str, str], arrival: float, attributes: Attributes
    ) -> ServerSpan:
        """Begin the span of an HTTP request or a gRPC call.

        `headers` are the client's headers or metadata, and `arrival` is on the monotonic clock."""
        self._correct_clock()
        carrier = {header: headers[header] for header in CONTEXT_HEADERS if header in headers}
        span = self.tracer.start_span(
            name,
            context=self.propagator.extract(carrier),
            kind=self.trace.SpanKind.SERVER,
            start_time=self.unix_ns(arrival),
            attributes=attributes,
        )
        return ServerSpan(self, span, attributes.get(OPERATION, "text_completion"))

    def add_engine_spans(self, message: RequestSpans) -> None:
        """Create the spans of a sequence that has ended in the engine."""
        request_span = self.spans.get(message.id)
        if request_span is None:
            return
        if message.index == 0 and request_span.is_recording():
            request_span.set_attributes(engine_attributes(message))
        context = self.trace.set_span_in_context(request_span)
        for name, start, end, tokens, steps, landings in message.spans:
            attributes: Attributes = {"octavo.sequence.index": message.index}
            if steps:
                attributes["octavo.tokens"] = tokens
                attributes["octavo.first_step"] = steps[0]
                attributes["octavo.last_step"] = steps[-1]
            span = self.tracer.start_span(
                name, context=context, start_time=self.unix_ns(start), attributes=attributes
            )
            for step, landed_at in zip(steps, landings, strict=True):
                span.add_event("step", {"octavo.step": step}, timestamp=self.unix_ns(landed_at))
            span.end(end_time=self.unix_ns(end))

    def unix_ns(self, monotonic: float) -> int:
        """Convert a time of the monotonic clock to nanoseconds of the wall clock."""
        return round(monotonic * 1e9) + self.clock_offset

    def _correct_clock(self) -> None:
        """Update the offset of the clocks after a correction of the wall clock.

        Smaller differences are ignored, so that the spans of a request keep their order.
        """
        offset = time.time_ns() - time.monotonic_ns()
        if abs(offset - self.clock_offset) > CLOCK_TOLERANCE_NS:
            self.clock_offset = offset

    def remember(self, request_id: str, span: Any) -> None:
        self.spans[request_id] = span
        if len(self.spans) > REMEMBERED_REQUESTS:
            self.spans.popitem(last=False)

    def close(self) -> None:
        """Send the spans that are not sent yet, and stop."""
        self.provider.force_flush(FLUSH_MS)
        self.provider.shutdown()


class ServerSpan:
    """The span of one HTTP request or gRPC call."""

    def __init__(self, tracing: Tracing, span: Any, operation: str):
        self.tracing = tracing
        self.span = span
        self.operation = operation
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}"
        # The header of the reply, in the format of traceparent (W3C Trace Context).
        self.traceresponse = f"00-{self.trace_id}-{context.span_id:016x}-{context.trace_flags:02x}"

    @property
    def is_recording(self) -> bool:
        return bool(self.span.is_recording())

    def rename(self, name: str) -> None:
        self.span.update_name(name)

    def begin_call(self, call: Call) -> CallSpans:
        return CallSpans(self, call)

    def end(self, attributes: Attributes, error: str = "") -> None:
        """End the span. `error` is the reason why the server could not serve the request."""
        self.span.set_attributes(attributes)
        if error:
            self.span.set_attribute("error.type", error)
            self.span.set_status(self.tracing.trace.StatusCode.ERROR)
        self.span.end()


class CallSpans:
    """The spans of the requests of one call, one for each prompt."""

    def __init__(self, parent: ServerSpan, call: Call):
        tracing = parent.tracing
        self.tracing = tracing
        self.spans = []
        context = tracing.trace.set_span_in_context(parent.span)
        for request in call.requests:
            span = tracing.tracer.start_span(
                "llm_request",
                context=context,
                start_time=tracing.unix_ns(request.arrival),
                attributes={
                    OPERATION: parent.operation,
                    **request_attributes(tracing.model, request.id, request.params),
                },
            )
            self.spans.append(span)
            tracing.remember(request.id, span)

    def end(self, call: Call) -> None:
        for span, collector in zip(self.spans, call.collectors, strict=True):
            span.set_attributes(reply_attributes(self.tracing.model, collector))
            if call.error is not None:
                span.set_attribute("error.type", call.error.code or call.error.type)
                span.set_status(self.tracing.trace.StatusCode.ERROR)
            span.end()


def request_attributes(model: str, request_id: str, params: Any) -> Attributes:
    """Return the attributes of a request's span, under the names of OpenTelemetry and vLLM."""
    attributes: Attributes = {
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": model,
        "gen_ai.request.id": request_id,
        "gen_ai.request.n": params.n,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
    }
    for name, value in (("max_tokens", params.max_tokens), ("seed", params.seed)):
        if value is not None:
            attributes[f"gen_ai.request.{name}"] = value
    return attributes


def engine_attributes(message: RequestSpans) -> Attributes:
    """Return the seconds that a sequence spent in each state."""
    return {
        latency: sum(end - start for name, start, end, *_ in message.spans if name in names)
        for latency, names in LATENCIES.items()
    }


def reply_attributes(model: str, collector: Collector) -> Attributes:
    prompt_tokens = len(collector.request.prompt)
    output_tokens = sum(len(output.token_ids) for output in collector.completions)
    reasons = [output.finish_reason for output in collector.completions if output.finish_reason]
    times = collector.metrics
    attributes: Attributes = {
        "gen_ai.response.model": model,
        "gen_ai.response.id": collector.request.id,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": output_tokens,
        "gen_ai.usage.cache_read.input_tokens": collector.cached,
        "gen_ai.usage.prompt_tokens": prompt_tokens,
        "gen_ai.usage.completion_tokens": output_tokens,
        "gen_ai.usage.num_sequences": len(collector.completions),
    }
    if times.first_token_time is not None:
        first_token_seconds = times.first_token_time - times.arrival_time
        attributes["gen_ai.latency.time_to_first_token"] = first_token_seconds
    if times.finished_time is not None:
        attributes["gen_ai.latency.e2e"] = times.finished_time - times.arrival_time
    return attributes
