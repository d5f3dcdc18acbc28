"""Turns the catalogue's declarations into Prometheus metrics: the Front's as they are counted, the engine's from its reports.

Leaves out names and labels (`telemetry/catalog.py`) and the label that tells replicas apart (`metrics_merge.py` adds it).
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from typing_extensions import override

from orthrus_serve.policy.step_plan import LANES, Lane
from orthrus_serve.telemetry import catalog
from orthrus_serve.telemetry.catalog import LABEL_VALUES, Metric, Outcome
from orthrus_serve.types import RequestKind, TopologyName


class FrontMetrics:
    """What one Front counts of the requests it answers."""

    def __init__(self, topology: TopologyName) -> None:
        self._topology = topology
        self._registry = CollectorRegistry()
        ended, took, open_now = catalog.REQUESTS, catalog.REQUEST_DURATION, catalog.IN_FLIGHT
        self._ended = Counter(ended.name, ended.help, ended.labels, registry=self._registry)
        self._took = Histogram(took.name, took.help, took.labels, registry=self._registry, buckets=took.buckets)
        self._open = Gauge(open_now.name, open_now.help, open_now.labels, registry=self._registry)

    def began(self, kind: RequestKind) -> float:
        """A request arrived. Returns the moment, to be given to `ended`."""
        self._open.labels(self._topology, kind).inc()
        return time.monotonic()

    def ended(self, kind: RequestKind, began_s: float, outcome: Outcome) -> None:
        """The request ended, in one of the ways that the catalogue names."""
        self._open.labels(self._topology, kind).dec()
        self._ended.labels(self._topology, kind, outcome).inc()
        self._took.labels(self._topology, kind).observe(time.monotonic() - began_s)

    def text(self) -> str:
        """Everything counted so far, as Prometheus text."""
        return generate_latest(self._registry).decode()


def outcome_of(status: int | None, *, is_cut: bool = False, has_left: bool = False) -> Outcome:
    """How a request ended. `status` None: nothing was sent."""
    if has_left:
        return "cancelled"
    if status is None or is_cut:
        return "failed"
    if status < 400:
        return "ok"
    if status in (429, 503):
        return "overloaded"
    return "invalid" if status < 500 else "failed"


class EngineReportCollector(Collector):
    """The engine's counts, read from its core's last report whenever somebody asks."""

    def __init__(self, topology: TopologyName, last_report: Callable[[], Mapping[str, Any]]) -> None:
        self._topology = topology
        self._last_report = last_report

    @override
    def collect(self) -> Iterator[Family]:
        report = self._last_report()
        if not report:
            return
        totals, left, requests = report.get("totals", {}), report.get("prompt_left", {}), report.get("requests", {})
        yield self._family(catalog.STEPS, {(): totals.get("steps", 0)})
        yield self._family(catalog.MIXED_STEPS, {(): totals.get("mixed_steps", 0)})
        parts = {(part,): totals.get(f"{part}_tokens", 0) for part in LABEL_VALUES["part"]}
        yield self._family(catalog.STEP_TOKENS, parts)
        yield self._family(catalog.STEP_BUDGET_TOKENS, {(): totals.get("budget_tokens", 0)})
        yield self._family(catalog.RUNNING_REQUESTS, {(): report.get("running", 0)})
        yield self._family(catalog.WAITING_REQUESTS, {(): report.get("waiting", 0)})
        yield self._family(catalog.HELD_REQUESTS, _held(requests))
        yield self._family(catalog.REMAINING_TOKENS, _remaining(requests, left))
        policies = {(policy,): int(policy == report.get("policy")) for policy in LABEL_VALUES["policy"]}
        yield self._family(catalog.POLICY_INFO, policies)

    def _family(self, metric: Metric, values: Mapping[tuple[str, ...], float]) -> Family:
        make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = make(metric.name, metric.help, labels=metric.labels)
        for labels, value in values.items():
            family.add_metric([self._topology, *labels], value)
        return family


def _held(requests: Mapping[str, Any]) -> dict[tuple[str, ...], float]:
    lanes = [request[0] for request in requests.values()]
    return {(lane.kind,): lanes.count(lane) for lane in LANES}


def _remaining(requests: Mapping[str, Any], prompt_left: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    """Prompt tokens left by kind; generations also have what they may still produce."""
    output_left = sum(max(0, most - made) for lane, _, made, most in requests.values() if lane == Lane.GENERATE)
    generate = prompt_left.get("generate", 0) + output_left
    return {("generate",): generate, ("embed",): prompt_left.get("embed", 0)}
