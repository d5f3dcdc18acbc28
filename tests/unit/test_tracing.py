"""Spans of a Front: what they hold, whose they hang below, and that there are none where none are wanted."""

from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import ValidationError

from orthrus_serve.config.telemetry_keys import TracingSpec
from orthrus_serve.serving.exchange import Exchange
from orthrus_serve.serving.metrics_export import Began
from orthrus_serve.serving.tracing import Traces
from orthrus_serve.types import ReplicaId

SPEC = TracingSpec(endpoint="http://collector:4318/v1/traces")
CLIENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
GIVEN = [(b"traceparent", CLIENT), (b"tracestate", b"x=1"), (b"accept", b"*/*")]
BEGAN = Began(10.0, "a", "orthrus")


async def nowhere(_: Any) -> None:
    pass


def exchange() -> Exchange:
    made = Exchange(nowhere, "a")
    made.status, made.first_s = 200, 10.5
    made.tried(ReplicaId("r1"), 10.25)
    return made


def traces(spec: TracingSpec = SPEC) -> tuple[Traces, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    return Traces(spec, exporter), exporter


def test_without_tracing_headers_pass_as_they_are() -> None:
    trace = Traces(None).begin("/v1/embeddings", "embed", GIVEN, "id", "")
    assert trace.headers(GIVEN) == GIVEN
    trace.end(BEGAN, "ok", exchange())


def test_the_engine_is_told_the_fronts_span_in_place_of_the_clients() -> None:
    made, exporter = traces()
    trace = made.begin("/v1/embeddings", "embed", GIVEN, "id", "a")
    headers = dict(trace.headers(GIVEN))
    trace.end(BEGAN, "ok", exchange())
    made.flush()
    route, front = exporter.get_finished_spans()
    context = front.get_span_context()
    assert context is not None
    assert headers[b"traceparent"].decode() == f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
    assert f"{context.trace_id:032x}".encode() in CLIENT
    assert (headers[b"tracestate"], headers[b"accept"]) == (b"x=1", b"*/*")
    assert route.parent is not None
    assert route.parent.span_id == context.span_id
    assert (route.end_time or 0) - (route.start_time or 0) == 250_000_000
    assert front.attributes is not None
    assert front.attributes["orthrus.replica"] == "r1"
    assert [event.name for event in front.events] == ["first byte"]


@pytest.mark.parametrize(
    ("outcome", "is_ok"), [("ok", True), ("invalid", True), ("cancelled", True), ("failed", False)]
)
def test_only_an_error_of_ours_is_an_error(outcome: Any, is_ok: bool) -> None:
    made, exporter = traces()
    made.begin("/v1/embeddings", "embed", (), "id", "").end(BEGAN, outcome, exchange())
    made.flush()
    assert exporter.get_finished_spans()[-1].status.is_ok == is_ok


def test_a_client_that_does_not_trace_decides_for_the_engine_too() -> None:
    made, exporter = traces()
    trace = made.begin("/v1/embeddings", "embed", [(b"traceparent", CLIENT[:-1] + b"0")], "id", "")
    assert dict(trace.headers([]))[b"traceparent"].endswith(b"-00")
    trace.end(BEGAN, "ok", exchange())
    made.flush()
    assert exporter.get_finished_spans() == ()


def test_a_share_of_nothing_traces_nothing() -> None:
    made, exporter = traces(TracingSpec(endpoint=SPEC.endpoint, sample_ratio=0.0))
    made.begin("/v1/embeddings", "embed", (), "id", "").end(BEGAN, "ok", exchange())
    made.flush()
    assert exporter.get_finished_spans() == ()


def test_an_exporter_that_fails_disturbs_nobody() -> None:
    class Broken(SpanExporter):
        def export(self, spans: Any) -> Any:
            raise RuntimeError("no collector")

    made = Traces(SPEC, Broken())
    made.begin("/v1/embeddings", "embed", (), "id", "").end(BEGAN, "ok", exchange())
    made.flush()


@pytest.mark.parametrize("endpoint", ["collector:4318", "http://collector:4318", "grpc://collector:4317/x"])
def test_an_endpoint_without_scheme_or_path_is_refused(endpoint: str) -> None:
    with pytest.raises(ValidationError, match="endpoint"):
        TracingSpec(endpoint=endpoint)
