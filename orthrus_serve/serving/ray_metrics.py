"""Copies what is counted here into Ray's own metrics, which Ray publishes on every node: ours, and vLLM's with them.

What is counted is counted once, in Prometheus registries; every few seconds the difference is handed on, through
`ray.serve.metrics`, which adds the labels `deployment`, `replica` and `application`. Guards: a copy never fails whoever counts;
counts and sums are exact, only where in its bucket a value lay is made up. Leaves out what is counted.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NoReturn

from prometheus_client.core import Metric as Family
from ray.serve import metrics as ray_metrics

from orthrus_serve.telemetry.log import event_log

log = event_log(__name__)

COPY_GAP_S = 5.0
# What of a process's registry is ours to copy: Ray publishes memory and CPU of every process itself.
PREFIXES = ("orthrus_", "vllm:")
# One value for every token: too many to hand on one by one. `/metrics` has it.
LEFT_OUT = frozenset({"vllm:inter_token_latency_seconds"})
# After so many values the event loop gets its turn.
VALUES_AT_ONCE = 100
# Labels that Ray adds, or that have no bound.
_OF_RAY = frozenset({"deployment", "replica", "application", "route"})
Labels = tuple[tuple[str, str], ...]


class RayCopy:
    """The metrics of one process in Ray."""

    def __init__(self, collect: Callable[[], Iterable[Family]], make: Any = ray_metrics) -> None:
        """
        Args:
            collect: everything counted so far.
            make: the module with Ray's `Counter`, `Gauge` and `Histogram`.
        """
        self._collect = collect
        self._make = make
        self._known: dict[str, Any] = {}
        self._copied: dict[str, dict[Labels, Any]] = {}

    async def run(self) -> NoReturn:
        """Copies every few seconds until it is cancelled."""
        while True:
            await asyncio.sleep(COPY_GAP_S)
            try:
                for number, _ in enumerate(self.copy()):
                    if number % VALUES_AT_ONCE == 0:
                        await asyncio.sleep(0)
            except Exception:  # whatever it is, the next copy has it all
                log.exception("metrics_not_copied")

    def copy(self) -> Iterator[None]:
        """Hands on what changed since the last copy, one value at a step."""
        for family in self._collect():
            if family.name.startswith(PREFIXES) and family.name not in LEFT_OUT:
                yield from self._copy_histograms(family) if family.type == "histogram" else self._copy_values(family)

    def _copy_histograms(self, family: Family) -> Iterator[None]:
        copied = self._copied.setdefault(family.name, {})
        for labels, seen in histograms_of(family).items():
            before = copied.get(labels, Buckets(seen.bounds, [0] * len(seen.counts), 0.0))
            copied[labels] = seen
            for value in values_between(before, seen):
                yield self._metric(family, labels, seen.bounds[:-1]).observe(value, tags=dict(labels))

    def _copy_values(self, family: Family) -> Iterator[None]:
        copied = self._copied.get(family.name, {})
        now = {
            _labels(sample.labels): sample.value for sample in family.samples if not sample.name.endswith("_created")
        }
        self._copied[family.name] = now
        for labels, value in now.items():
            if family.type != "counter":
                yield self._metric(family, labels).set(value, tags=dict(labels))
            elif value > copied.get(labels, 0.0):
                yield self._metric(family, labels).inc(value - copied.get(labels, 0.0), tags=dict(labels))
        for labels in copied.keys() - now.keys() if family.type != "counter" else ():
            yield self._metric(family, labels).set(0.0, tags=dict(labels))  # Ray would repeat the last value for ever

    def _metric(self, family: Family, labels: Labels, bounds: Sequence[float] = ()) -> Any:
        if family.name not in self._known:
            name, keys = ray_name(family), tuple(key for key, _ in labels)
            if family.type == "histogram":
                made = self._make.Histogram(name, family.documentation, list(bounds), keys)
            else:
                kind = self._make.Counter if family.type == "counter" else self._make.Gauge
                made = kind(name, family.documentation, keys)
            self._known[family.name] = made
        return self._known[family.name]


def ray_name(family: Family) -> str:
    """The name in Ray, which takes no colons; a counter ends in `_total`, as in the text that it came from."""
    name = family.name.replace(":", "_")
    return f"{name}_total" if family.type == "counter" and not name.endswith("_total") else name


@dataclass
class Buckets:
    """A histogram: upper bounds, how many values are in each bucket (not cumulated), and the sum of all."""

    bounds: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0


def histograms_of(family: Family) -> Mapping[Labels, Buckets]:
    """The histograms of a family, by their labels."""
    found: dict[Labels, Buckets] = {}
    for sample in family.samples:
        labels = _labels({key: value for key, value in sample.labels.items() if key != "le"})
        buckets = found.setdefault(labels, Buckets())
        if sample.name.endswith("_bucket"):
            buckets.bounds.append(float(sample.labels["le"]))
            buckets.counts.append(int(sample.value) - sum(buckets.counts))
        elif sample.name.endswith("_sum"):
            buckets.sum = sample.value
    return {labels: buckets for labels, buckets in found.items() if buckets.bounds}


def values_between(before: Buckets, after: Buckets) -> Iterator[float]:
    """Values that turn one histogram into the other: as many in each bucket as there are new, with the new sum.

    All lie in the same part of their bucket, from its lower bound (0) to its upper (1): the part that gives the sum.
    """
    new = [now - then for then, now in zip(before.counts, after.counts, strict=True)]
    edges = list(pairwise([0.0, *after.bounds[:-1], 2 * after.bounds[-2] if len(after.bounds) > 1 else 1.0]))
    least = sum(count * low for count, (low, _) in zip(new, edges, strict=True))
    room = sum(count * (high - low) for count, (low, high) in zip(new, edges, strict=True))
    part = min(1.0, max(1e-6, (after.sum - before.sum - least) / room)) if room > 0 else 1.0
    for count, (low, high) in zip(new, edges, strict=True):
        for _ in range(count):
            yield low + part * (high - low)


def _labels(labels: Mapping[str, str]) -> Labels:
    return tuple((key, value) for key, value in labels.items() if key not in _OF_RAY)
