"""Follows one request from its arrival to its end, whatever happens to it: counts, trace, slice of its arm, line in the log.

Guards: every request that began ends in exactly one outcome, also when its client leaves. Leaves out how it is answered.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator

from orthrus_serve.serving.exchange import Exchange
from orthrus_serve.serving.live_arms import Arm, LiveArms
from orthrus_serve.serving.metrics_export import Began, FrontMetrics, outcome_of
from orthrus_serve.serving.mirror import COMPARED, ended
from orthrus_serve.serving.tracing import Traces
from orthrus_serve.serving.tunnel import Header
from orthrus_serve.telemetry.catalog import Outcome
from orthrus_serve.telemetry.log import event_log
from orthrus_serve.types import RequestKind

log = event_log(__name__)


class RequestWatch:
    """What one Front keeps of every request with a forward pass."""

    def __init__(self, metrics: FrontMetrics, arms: LiveArms, traces: Traces, *, logs_requests: bool = False) -> None:
        self._metrics = metrics
        self._arms = arms
        self._traces = traces
        self._logs_requests = logs_requests

    @contextlib.contextmanager
    def following(
        self, path: str, headers: Iterable[Header], kind: RequestKind, arm: Arm, exchange: Exchange
    ) -> Iterator[None]:
        """While the request is answered."""
        began = self._metrics.began(kind, arm.name, arm.topology)
        trace = self._traces.begin(path, kind, headers, exchange.request_id, arm.name)
        exchange.traced = trace.headers
        try:
            yield
        except asyncio.CancelledError:  # Serve cancels us when the client disconnects
            exchange.has_left = True
            raise
        finally:
            outcome = outcome_of(exchange.status, is_cut=exchange.is_cut, has_left=exchange.has_left)
            self._metrics.ended(kind, began, outcome, exchange)
            trace.end(began, outcome, exchange)
            if self._arms.are_named and outcome in COMPARED:
                self._arms.slices.add(ended(exchange, arm.name, kind, began.at_s))
            if self._logs_requests:
                _log_end(path, began, outcome, exchange)


def _log_end(path: str, began: Began, outcome: Outcome, exchange: Exchange) -> None:
    def since_began(at_s: float | None) -> float | None:
        return None if at_s is None else at_s - began.at_s

    log.info(
        "request_ended",
        request_id=exchange.request_id,
        path=path,
        arm=began.arm,
        outcome=outcome,
        status=exchange.status,
        replica=exchange.replica,
        tries=exchange.num_tries,
        tokens=exchange.num_tokens,
        placed_s=since_began(exchange.placed_s),
        first_s=since_began(exchange.first_s),
        took_s=time.monotonic() - began.at_s,
    )
