"""What an engine counts and holds, as Prometheus metrics of the catalogue, read from its core's last report.

Leaves out names and labels (`telemetry/catalog.py`), what vLLM publishes itself, and the label that tells replicas apart
(`metrics_merge.py` adds it).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from typing_extensions import override

from orthrus_serve.policy.step_plan import LANES, Lane
from orthrus_serve.serving.topology_totals import TopologyTotals
from orthrus_serve.telemetry import catalog
from orthrus_serve.telemetry.catalog import LABEL_VALUES, Metric, step_bucket_keys
from orthrus_serve.types import RequestKind

_TOTALS: tuple[tuple[Metric, Mapping[str, tuple[str, ...]]], ...] = (
    (catalog.STEPS, {"steps": ()}),
    (catalog.MIXED_STEPS, {"mixed_steps": ()}),
    (catalog.STEP_TOKENS, {f"{part}_tokens": (part,) for part in LABEL_VALUES["part"]}),
    (catalog.STEP_BUDGET_TOKENS, {"budget_tokens": ()}),
    (catalog.WASTED_TOKENS, {"wasted_tokens": ()}),
    (catalog.BUSY, {"busy_s": ()}),
    (catalog.LATE_STEPS, {"late_steps": ()}),
    (catalog.MODEL_FLOPS, {"model_flops": ()}),
    (catalog.PREEMPTIONS, {"preemptions": ()}),
)


class EngineReportCollector(Collector):
    """The engine's counts, read from its core's last report whenever somebody asks."""

    def __init__(
        self, totals: TopologyTotals, last_report: Callable[[], Mapping[str, Any]], adapters: Sequence[str] = ()
    ) -> None:
        """`totals` has seen the totals of that last report. `adapters` are counted from zero."""
        self._totals = totals
        self._last_report = last_report
        self._adapters = adapters

    @override
    def collect(self) -> Iterator[Family]:
        report = self._last_report()
        if not report:
            return
        for metric, names in _TOTALS:
            yield self._counts(metric, names)
        yield self._durations()
        yield from self._held_now(report)
        by_adapter = {**dict.fromkeys(self._adapters, 0), **report.get("adapter_requests", {})}
        yield _counter(catalog.ADAPTER_REQUESTS, {(name,): count for name, count in by_adapter.items()})
        yield _counter(catalog.ADAPTER_WAITS, {(): report.get("adapter_waits", 0)})
        fetches = {**dict.fromkeys(LABEL_VALUES["fetch"], 0), **report.get("handovers", {})}
        yield _counter(catalog.FETCHES, {(fetch,): count for fetch, count in fetches.items()})

    def _held_now(self, report: Mapping[str, Any]) -> Iterator[Family]:
        yield self._gauges(catalog.RUNNING_REQUESTS, {(): report.get("running", 0)})
        yield self._gauges(catalog.WAITING_REQUESTS, {(): report.get("waiting", 0)})
        yield self._gauges(catalog.HELD_REQUESTS, _held(report.get("requests", {})))
        left = {(kind,): tokens for kind, tokens in remaining_tokens(report).items()}
        yield self._gauges(catalog.REMAINING_TOKENS, left)
        waits = report.get("oldest_wait_s", {})
        yield self._gauges(catalog.OLDEST_WAIT, {(lane.kind,): waits.get(lane.kind, 0.0) for lane in LANES})
        yield self._gauges(catalog.POOLING_STATES, {(): report.get("pooling_states", 0)})
        if report.get("kv_blocks"):
            yield self._gauges(catalog.KV_USAGE, {(): 1 - report["kv_free_blocks"] / report["kv_blocks"]})
        yield self._gauges(catalog.USED_ADAPTERS, {(): report.get("adapters", 0)})
        yield self._gauges(catalog.STREAM_GAP, {(): report.get("stream_gap_s", 0.0)})
        yield self._gauges(catalog.ADAPTER_PLACES, {(): report.get("adapter_places", 0)})
        for metric, key in ((catalog.STEP_TARGET, "target_s"), (catalog.PEAK_FLOPS, "peak_flops")):
            if report.get(key) is not None:
                yield self._gauges(metric, {(): report[key]})
        policies = {(policy,): int(policy == report.get("policy")) for policy in LABEL_VALUES["policy"]}
        yield self._gauges(catalog.POLICY_INFO, policies)

    def _counts(self, metric: Metric, names: Mapping[str, tuple[str, ...]]) -> Family:
        by_topology = self._totals.by_topology()
        return _counter(
            metric,
            {
                (topology, *labels): totals.get(name, 0)
                for topology, totals in by_topology.items()
                for name, labels in names.items()
            },
        )

    def _durations(self) -> Family:
        metric = catalog.STEP_DURATION
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        bounds = [*map(str, metric.buckets), "+Inf"]
        for topology, totals in self._totals.by_topology().items():
            with_s = totals.get("busy_with_decodes_s", 0.0)
            sums = {"with": with_s, "without": totals.get("busy_s", 0.0) - with_s}
            for decodes, sum_s in sums.items():
                counts = accumulate(totals.get(key, 0) for key in step_bucket_keys(decodes))
                family.add_metric([topology, decodes], list(zip(bounds, counts, strict=True)), max(0.0, sum_s))
        return family

    def _gauges(self, metric: Metric, values: Mapping[tuple[str, ...], float]) -> Family:
        family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, value in values.items():
            family.add_metric([self._totals.topology, *labels], value)
        return family


def _counter(metric: Metric, values: Mapping[tuple[str, ...], float]) -> Family:
    family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
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
