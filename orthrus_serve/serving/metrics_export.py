"""Turns the catalogue's declarations into Prometheus metrics: the Front's as they are counted, the engine's from its reports.

Leaves out names and labels (`telemetry/catalog.py`) and the label that tells replicas apart (`metrics_merge.py` adds it).
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from typing_extensions import override

from orthrus_serve.policy.ledger import TokenLoadLedger
from orthrus_serve.policy.step_plan import LANES, Lane
from orthrus_serve.serving.topology_totals import TopologyTotals
from orthrus_serve.telemetry import catalog
from orthrus_serve.telemetry.catalog import LABEL_VALUES, Copied, GoalName, GoalResult, Metric, Outcome, Refusal
from orthrus_serve.types import RequestKind, TopologyName


@dataclass(frozen=True)
class Began:
    """A request that arrived: when, and under which arm and topology. It is counted there, also when the topology changes
    meanwhile."""

    at_s: float
    arm: str
    topology: TopologyName


class FrontMetrics:
    """What one Front counts of the requests it answers."""

    def __init__(self) -> None:
        self._followed: dict[str, tuple[Callable[[], TopologyName], TokenLoadLedger]] = {}
        self._registry = CollectorRegistry()
        charged, drift = catalog.CHARGED_TOKENS, catalog.DRIFT_TOKENS
        self._charged = Gauge(charged.name, charged.help, charged.labels, registry=self._registry)
        self._drift = Gauge(drift.name, drift.help, drift.labels, registry=self._registry)
        ended, took, open_now = catalog.REQUESTS, catalog.REQUEST_DURATION, catalog.IN_FLIGHT
        self._ended = Counter(ended.name, ended.help, ended.labels, registry=self._registry)
        self._took = Histogram(took.name, took.help, took.labels, registry=self._registry, buckets=took.buckets)
        self._open = Gauge(open_now.name, open_now.help, open_now.labels, registry=self._registry)
        refusals, goals = catalog.REFUSALS, catalog.GOALS
        self._refusals = Counter(refusals.name, refusals.help, refusals.labels, registry=self._registry)
        self._goals = Counter(goals.name, goals.help, goals.labels, registry=self._registry)
        copies = catalog.MIRRORED
        self._mirrored = Counter(copies.name, copies.help, copies.labels, registry=self._registry)

    def follow(self, arm: str, topology: Callable[[], TopologyName], ledger: TokenLoadLedger) -> None:
        """From now on what `ledger` holds is told under that arm and the topology then in force."""
        self._followed[arm] = topology, ledger

    def began(self, kind: RequestKind, arm: str, topology: TopologyName) -> Began:
        """A request arrived. Returns what is to be given to `ended`."""
        self._open.labels(arm, topology, kind).inc()
        return Began(time.monotonic(), arm, topology)

    def ended(self, kind: RequestKind, began: Began, outcome: Outcome) -> None:
        """The request ended, in one of the ways that the catalogue names."""
        self._open.labels(began.arm, began.topology, kind).dec()
        self._ended.labels(began.arm, began.topology, kind, outcome).inc()
        self._took.labels(began.arm, began.topology, kind).observe(time.monotonic() - began.at_s)

    def mirrored(self, arm: str, kind: RequestKind, copied: Copied) -> None:
        """A copy for `arm` ended, or was not made."""
        self._mirrored.labels(arm, kind, copied).inc()

    def refused(self, kind: RequestKind, reason: Refusal) -> None:
        """A request was not let in."""
        self._refusals.labels(kind, reason).inc()

    def goal(self, kind: RequestKind, goal: GoalName, result: GoalResult) -> None:
        """An admitted request that had a goal reached it, or is late."""
        self._goals.labels(kind, goal, result).inc()

    def text(self) -> str:
        """Everything counted so far, as Prometheus text."""
        for gauge in (self._charged, self._drift):
            gauge.clear()  # of a topology that is in force no more
        for arm, (topology, ledger) in self._followed.items():
            self._charged.labels(arm, topology()).set(ledger.num_own_tokens)
            self._drift.labels(arm, topology()).set(ledger.num_drift_tokens)
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

    def __init__(self, totals: TopologyTotals, last_report: Callable[[], Mapping[str, Any]]) -> None:
        """`totals` has seen the totals of that last report."""
        self._totals = totals
        self._last_report = last_report

    @override
    def collect(self) -> Iterator[Family]:
        report = self._last_report()
        if not report:
            return
        yield self._counts(catalog.STEPS, {"steps": ()})
        yield self._counts(catalog.MIXED_STEPS, {"mixed_steps": ()})
        yield self._counts(catalog.STEP_TOKENS, {f"{part}_tokens": (part,) for part in LABEL_VALUES["part"]})
        yield self._counts(catalog.STEP_BUDGET_TOKENS, {"budget_tokens": ()})
        requests = report.get("requests", {})
        yield self._gauges(catalog.RUNNING_REQUESTS, {(): report.get("running", 0)})
        yield self._gauges(catalog.WAITING_REQUESTS, {(): report.get("waiting", 0)})
        yield self._gauges(catalog.HELD_REQUESTS, _held(requests))
        left = {(kind,): tokens for kind, tokens in remaining_tokens(report).items()}
        yield self._gauges(catalog.REMAINING_TOKENS, left)
        policies = {(policy,): int(policy == report.get("policy")) for policy in LABEL_VALUES["policy"]}
        yield self._gauges(catalog.POLICY_INFO, policies)

    def _counts(self, metric: Metric, names: Mapping[str, tuple[str, ...]]) -> Family:
        family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        for topology, totals in self._totals.by_topology().items():
            for name, labels in names.items():
                family.add_metric([topology, *labels], totals.get(name, 0))
        return family

    def _gauges(self, metric: Metric, values: Mapping[tuple[str, ...], float]) -> Family:
        family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, value in values.items():
            family.add_metric([self._totals.topology, *labels], value)
        return family


def _held(requests: Mapping[str, Any]) -> dict[tuple[str, ...], float]:
    lanes = [request[0] for request in requests.values()]
    return {(lane.kind,): lanes.count(lane) for lane in LANES}


def remaining_tokens(report: Mapping[str, Any]) -> dict[RequestKind, int]:
    """Prompt tokens left by kind, from an engine's report; generations also have what they may still produce."""
    requests, prompt_left = report.get("requests", {}), report.get("prompt_left", {})
    output_left = sum(max(0, most - made) for lane, _, made, most in requests.values() if lane == Lane.GENERATE)
    generate = prompt_left.get("generate", 0) + output_left
    return {"generate": generate, "embed": prompt_left.get("embed", 0)}
