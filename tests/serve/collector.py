"""A collector of OpenTelemetry traces in the test's own process: OTLP over HTTP, as a real one takes it."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from typing_extensions import override


@dataclass(frozen=True)
class Span:
    """A span that arrived. Ids are in hex; `parent` is empty for a root."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    is_error: bool
    attributes: dict[str, Any]


@dataclass
class Collector:
    """What has arrived so far."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)

    def of(self, trace: str) -> list[Span]:
        """The spans of a trace."""
        return [span for span in list(self.spans) if span.trace == trace]


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    """Listens on a free port; `url` is what is configured as endpoint."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            collector.spans += spans_of(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        @override
        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield collector
        finally:
            server.shutdown()


def spans_of(request: Any) -> Iterator[Span]:
    """The spans of one export."""
    for of_resource in request.resource_spans:
        resource = _values(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield Span(
                    service=str(resource.get("service.name", "")),
                    name=span.name,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    is_error=span.status.code == 2,
                    attributes=_values(span.attributes),
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
