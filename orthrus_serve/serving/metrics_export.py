"""What a Front counts and how its requests went, as Prometheus metrics of the catalogue.

Guards: every count that has a fixed set of labels is there from the start, at zero, so that a rate over it is never missing;
what belongs to a replica ends with it. Leaves out names and labels (`telemetry/catalog.py`), the engines' own
(`engine_metrics.py`), and the label that tells replicas apart (`metrics_merge.py` adds it).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from typing_extensions import override

from orthrus_serve.policy.balance import imbalance_ratio
from orthrus_serve.serving.exchange import Exchange
from orthrus_serve.serving.router_state import RouterState
from orthrus_serve.telemetry import catalog
from orthrus_serve.telemetry.catalog import (
    LABEL_VALUES,
    BadKey,
    Copied,
    GoalName,
    GoalResult,
    Handed,
    Metric,
    Outcome,
    Refusal,
)
from orthrus_serve.types import RequestKind, TopologyName

KINDS: tuple[RequestKind, ...] = ("generate", "embed")
# By the values of a metric's labels.
Samples = Mapping[tuple[str, ...], float]


@dataclass(frozen=True)
class Began:
    """A request that arrived: when, and under which arm and topology. It is counted there, also when the topology changes
    meanwhile."""

    at_s: float
    arm: str
    topology: TopologyName


@dataclass(frozen=True)
class _Followed:
    """An arm whose routing is told."""

    name: str
    topology: Callable[[], TopologyName]
    state: RouterState


class FrontMetrics:
    """What one Front counts of the requests it answers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._followed: list[_Followed] = []
        self._ended = _counter(catalog.REQUESTS, self.registry)
        self._took = _histogram(catalog.REQUEST_DURATION, self.registry)
        self._waited = _histogram(catalog.FRONT_WAIT, self.registry)
        self._first = _histogram(catalog.FIRST_TOKEN, self.registry)
        self._open = Gauge(
            catalog.IN_FLIGHT.name, catalog.IN_FLIGHT.help, catalog.IN_FLIGHT.labels, registry=self.registry
        )
        self._retries = _counter(catalog.RETRIES, self.registry)
        self._refusals = _counter(catalog.REFUSALS, self.registry)
        self._unauthorized = _counter(catalog.UNAUTHORIZED, self.registry)
        self._goals = _counter(catalog.GOALS, self.registry)
        self._mirrored = _counter(catalog.MIRRORED, self.registry)
        self._handovers = _counter(catalog.HANDOVERS, self.registry)
        fixed = (
            (catalog.REFUSALS, self._refusals),
            (catalog.UNAUTHORIZED, self._unauthorized),
            (catalog.GOALS, self._goals),
        )
        for family, counter in fixed:
            for values in product(*(LABEL_VALUES[label] for label in family.labels)):
                counter.labels(*values)
        self.registry.register(_Routing(self._followed))

    def follow(self, arm: str, topology: Callable[[], TopologyName], state: RouterState) -> None:
        """From now on what `state` holds is told under that arm and the topology then in force."""
        self._followed.append(_Followed(arm, topology, state))
        for kind in KINDS:
            self._retries.labels(arm, kind)
        for handed in LABEL_VALUES["handed"]:
            self._handovers.labels(arm, handed)
        for kind, copied in product(KINDS, LABEL_VALUES["copied"]):
            if arm:
                self._mirrored.labels(arm, kind, copied)

    def began(self, kind: RequestKind, arm: str, topology: TopologyName) -> Began:
        """A request arrived. Returns what is to be given to `ended`."""
        self._open.labels(arm, topology, kind).inc()
        return Began(time.monotonic(), arm, topology)

    def ended(self, kind: RequestKind, began: Began, outcome: Outcome, exchange: Exchange | None = None) -> None:
        """The request ended, in one of the ways that the catalogue names. `exchange` knows what happened on the way."""
        labels = (began.arm, began.topology, kind)
        self._open.labels(*labels).dec()
        self._ended.labels(*labels, outcome).inc()
        self._took.labels(*labels).observe(time.monotonic() - began.at_s)
        if exchange is None:
            return
        if exchange.placed_s is not None:
            self._waited.labels(*labels).observe(max(0.0, exchange.placed_s - began.at_s))
        if exchange.first_s is not None:
            self._first.labels(*labels).observe(exchange.first_s - began.at_s)
        if exchange.num_tries > 1:
            self._retries.labels(began.arm, kind).inc(exchange.num_tries - 1)

    def mirrored(self, arm: str, kind: RequestKind, copied: Copied) -> None:
        """A copy for `arm` ended, or was not made."""
        self._mirrored.labels(arm, kind, copied).inc()

    def handed(self, arm: str, handed: Handed) -> None:
        """A half of a shared generation ended so."""
        self._handovers.labels(arm, handed).inc()

    def refused(self, kind: RequestKind, reason: Refusal) -> None:
        """A request was not let in."""
        self._refusals.labels(kind, reason).inc()

    def unauthorized(self, key: BadKey) -> None:
        """A request was answered with a 401."""
        self._unauthorized.labels(key).inc()

    def goal(self, kind: RequestKind, goal: GoalName, result: GoalResult) -> None:
        """An admitted request that had a goal reached it, or is late."""
        self._goals.labels(kind, goal, result).inc()

    def collect(self) -> Iterable[Family]:
        """Everything counted so far."""
        for arm in self._followed:
            for kind in KINDS:
                labels = (arm.name, arm.topology(), kind)
                self._open.labels(*labels)
                for histogram in (self._took, self._waited, self._first):
                    histogram.labels(*labels)
                for outcome in LABEL_VALUES["outcome"]:
                    self._ended.labels(*labels, outcome)
        return self.registry.collect()

    def text(self) -> str:
        """The same, as Prometheus text."""
        self.collect()
        return generate_latest(self.registry).decode()


class _Routing(Collector):
    """What the routers' states hold, read whenever somebody asks. They change on another thread meanwhile: all is copied
    first."""

    def __init__(self, followed: list[_Followed]) -> None:
        self._followed = followed

    @override
    def collect(self) -> Iterator[Family]:
        arms = self._followed
        yield _gauges(catalog.CHARGED_TOKENS, {(a.name, a.topology()): a.state.ledger.num_own_tokens for a in arms})
        yield _gauges(catalog.DRIFT_TOKENS, {(a.name, a.topology()): a.state.ledger.num_drift_tokens for a in arms})
        yield _gauges(catalog.REPLICAS, {(a.name,): len(a.state.replicas) for a in arms})
        yield _gauges(catalog.QUARANTINED, {(a.name,): len(a.state.quarantined) for a in arms})
        yield _counts(catalog.QUARANTINES, {(a.name,): a.state.num_quarantines for a in arms})
        yield _gauges(
            catalog.REPLICA_LOAD,
            {(a.name, str(replica)): a.state.ledger.load(replica) for a in arms for replica in a.state.replicas},
        )
        yield _gauges(catalog.IMBALANCE, {(a.name, kind): _imbalance(a.state, kind) for a in arms for kind in KINDS})
        yield _counts(
            catalog.ROUTED,
            {
                (a.name, kind, str(replica)): a.state.num_routed_to[replica, kind]
                for a in arms
                for replica in a.state.replicas
                for kind in KINDS
                if replica in a.state.serving(kind, a.state.replicas) or a.state.num_routed_to[replica, kind]
            },
        )


def silent_text(num_silent: Mapping[str, int]) -> str:
    """How many engine replicas of each arm did not answer a scrape, as Prometheus text."""
    registry = CollectorRegistry()
    gauge = Gauge(catalog.SILENT.name, catalog.SILENT.help, catalog.SILENT.labels, registry=registry)
    for arm, count in num_silent.items():
        gauge.labels(arm).set(count)
    return generate_latest(registry).decode()


def _imbalance(state: RouterState, kind: RequestKind) -> float:
    serving = state.serving(kind, state.replicas)
    return imbalance_ratio([state.ledger.load(replica) for replica in serving]) if serving else 1.0


def _counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    return Counter(metric.name, metric.help, metric.labels, registry=registry)


def _histogram(metric: Metric, registry: CollectorRegistry) -> Histogram:
    return Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)


def _counts(metric: Metric, samples: Samples) -> Family:
    return _filled(CounterMetricFamily(metric.name, metric.help, labels=metric.labels), samples)


def _gauges(metric: Metric, samples: Samples) -> Family:
    return _filled(GaugeMetricFamily(metric.name, metric.help, labels=metric.labels), samples)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, samples: Samples) -> Family:
    for labels, value in samples.items():
        family.add_metric(labels, value)
    return family


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
