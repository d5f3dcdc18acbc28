"""OpenTelemetry spans of a Front: one for each request, and one within it for the choice of its replica.

Guards: without the section `tracing` nothing of OpenTelemetry is loaded and nothing is sent; a span never holds a prompt or an
answer; exporting runs on a thread of its own and delays nobody. Leaves out the engine's own spans, which vLLM makes from the
`traceparent` that travels through the tunnel.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from orthrus_serve.config.schema import TracingSpec
from orthrus_serve.serving.exchange import Exchange
from orthrus_serve.serving.metrics_export import Began
from orthrus_serve.serving.tunnel import Header
from orthrus_serve.telemetry.catalog import Outcome
from orthrus_serve.types import RequestKind

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

CONTEXT_HEADERS = frozenset({b"traceparent", b"tracestate"})
SERVICE = "orthrus-front"


class Trace:
    """The span of one request; nothing, where there is no tracing."""

    def __init__(self, tracer: Any = None, span: Any = None) -> None:
        self._tracer = tracer
        self._span = span

    def headers(self, given: Iterable[Header]) -> list[Header]:
        """The headers that go on to the engine: the client's trace context, or ours in its place."""
        if self._span is None:
            return list(given)
        from opentelemetry import trace  # noqa: PLC0415  only where it is used
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(self._span))
        kept = [(name, value) for name, value in given if name not in CONTEXT_HEADERS]
        return [*kept, *((name.encode(), value.encode()) for name, value in carrier.items())]

    def end(self, began: Began, outcome: Outcome, exchange: Exchange) -> None:
        """The request is over."""
        span = self._span
        if span is None:
            return
        if span.is_recording():
            self._place(began, exchange)
            for key, value in _facts(outcome, exchange).items():
                span.set_attribute(key, value)
            if exchange.first_s is not None:
                span.add_event("first byte", timestamp=span.start_time + _ns(exchange.first_s - began.at_s))
            if outcome == "failed":
                from opentelemetry.trace import StatusCode  # noqa: PLC0415  as above

                span.set_status(StatusCode.ERROR)
        span.end()

    def _place(self, began: Began, exchange: Exchange) -> None:
        if exchange.placed_s is None:
            return
        from opentelemetry import trace  # noqa: PLC0415  as above

        span = self._span
        routing = self._tracer.start_span("route", trace.set_span_in_context(span), start_time=span.start_time)
        routing.set_attribute("orthrus.replica", str(exchange.replica))
        routing.set_attribute("orthrus.num_tries", exchange.num_tries)
        routing.end(span.start_time + _ns(exchange.placed_s - began.at_s))


class Traces:
    """Begins the spans of one Front."""

    def __init__(self, spec: TracingSpec | None, exporter: "SpanExporter | None" = None) -> None:
        """`exporter` is where spans go in place of `spec.endpoint`."""
        self._provider: Any = None
        self._tracer: Any = None
        if spec is not None:
            self._provider = _provider(spec, exporter)
            self._tracer = self._provider.get_tracer("orthrus_serve")

    def begin(self, path: str, kind: RequestKind, headers: Iterable[Header], request_id: str, arm: str) -> Trace:
        """A request arrived; its span hangs below the client's, if it sent one."""
        if self._tracer is None:
            return Trace()
        from opentelemetry.trace import SpanKind  # noqa: PLC0415  only where it is used
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        carrier = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name in CONTEXT_HEADERS
        }
        attributes = {"url.path": path, "orthrus.kind": kind, "orthrus.request_id": request_id, "orthrus.arm": arm}
        parent = TraceContextTextMapPropagator().extract(carrier)
        return Trace(
            self._tracer, self._tracer.start_span(f"POST {path}", parent, kind=SpanKind.SERVER, attributes=attributes)
        )

    def flush(self) -> None:
        """Sends what has not been sent. Blocks."""
        if self._provider is not None:
            self._provider.force_flush()


def _provider(spec: TracingSpec, exporter: "SpanExporter | None") -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415  as above
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased  # noqa: PLC0415

    sampler = ParentBased(TraceIdRatioBased(spec.sample_ratio))
    provider = TracerProvider(sampler=sampler, resource=Resource.create({"service.name": SERVICE}))
    provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=spec.endpoint)))
    return provider


def _facts(outcome: Outcome, exchange: Exchange) -> dict[str, str | int]:
    facts: dict[str, str | int] = {
        "orthrus.outcome": outcome,
        "orthrus.num_tries": exchange.num_tries,
        "orthrus.num_tokens": exchange.num_tokens,
    }
    if exchange.status is not None:
        facts["http.response.status_code"] = exchange.status
    if exchange.replica is not None:
        facts["orthrus.replica"] = str(exchange.replica)
    return facts


def _ns(duration_s: float) -> int:
    return max(0, int(duration_s * 1e9))
