"""The sections `tracing` and `log`: what Fronts and engine replicas tell of themselves, and where it goes.

Metrics need no setting. Leaves out what is told (`telemetry/`, `serving/tracing.py`).
"""

from pydantic import Field

from orthrus_serve.config.section import Section
from orthrus_serve.types import LogLevel


class TracingSpec(Section):
    """Where OpenTelemetry traces go. Without this section there are none.

    `endpoint` is that of a collector for OTLP over HTTP, with its path (`http://collector:4318/v1/traces`). `sample_ratio` is
    the share of requests that are traced where the client did not decide it by its own `traceparent`.
    """

    endpoint: str = Field(pattern=r"^https?://[^/]+/.*")
    sample_ratio: float = Field(default=1.0, ge=0, le=1)


class LogSpec(Section):
    """What Fronts and engine replicas write to their logs: events of this level and above, as `event key=value` or as JSON.
    `requests` also tells the end of every request, at level info. No event holds a prompt or an answer."""

    level: LogLevel = "info"
    as_json: bool = False
    requests: bool = False
