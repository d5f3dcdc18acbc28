"""Metrics as Prometheus text: those of the engine's reports, and many texts made one."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from orthrus_serve.policy.ledger import TokenLoadLedger
from orthrus_serve.serving.metrics_export import EngineReportCollector, FrontMetrics, outcome_of
from orthrus_serve.serving.metrics_merge import merge_metrics
from orthrus_serve.serving.topology_totals import TopologyTotals
from orthrus_serve.telemetry.catalog import CATALOG
from orthrus_serve.types import ReplicaId, RequestId, TopologyName

REPORT: dict[str, Any] = {
    "policy": "orthrus", "running": 3, "waiting": 2, "prompt_left": {"generate": 10, "embed": 70},
    "totals": {"steps": 9, "mixed_steps": 4, "decode_tokens": 5, "prefill_tokens": 6, "embed_tokens": 7, "budget_tokens": 90},
    "requests": {"a": (0, 10, 0, 16), "b": (0, 0, 4, 16), "c": (1, 70, 0, 0)},
}  # fmt: skip


def seen(report: dict[str, Any]) -> TopologyTotals:
    totals = TopologyTotals("orthrus")
    totals.see(report["totals"])
    return totals


def test_a_report_of_the_engine_becomes_the_metrics_of_the_catalogue() -> None:
    registry = CollectorRegistry()
    registry.register(EngineReportCollector(seen(REPORT), lambda: REPORT))
    lines = set(generate_latest(registry).decode().splitlines())
    assert lines >= {
        'orthrus_engine_steps_total{topology="orthrus"} 9.0',
        'orthrus_engine_mixed_steps_total{topology="orthrus"} 4.0',
        'orthrus_engine_step_tokens_total{part="prefill",topology="orthrus"} 6.0',
        'orthrus_engine_step_budget_tokens_total{topology="orthrus"} 90.0',
        'orthrus_engine_running_requests{topology="orthrus"} 3.0',
        'orthrus_engine_waiting_requests{topology="orthrus"} 2.0',
        'orthrus_engine_held_requests{kind="generate",topology="orthrus"} 2.0',
        'orthrus_engine_remaining_tokens{kind="generate",topology="orthrus"} 38.0',
        'orthrus_engine_remaining_tokens{kind="embed",topology="orthrus"} 70.0',
        'orthrus_engine_policy_info{policy="orthrus",topology="orthrus"} 1.0',
        'orthrus_engine_policy_info{policy="hetero_fcfs",topology="orthrus"} 0.0',
    }


def test_after_a_switch_old_counts_keep_their_topology_and_new_ones_have_the_new() -> None:
    totals, registry = seen(REPORT), CollectorRegistry()
    report = {**REPORT, "policy": "hetero_fcfs", "totals": {**REPORT["totals"], "steps": 14}}
    registry.register(EngineReportCollector(totals, lambda: report))
    totals.topology = "dedicated"
    totals.see(report["totals"])
    lines = set(generate_latest(registry).decode().splitlines())
    assert lines >= {
        'orthrus_engine_steps_total{topology="orthrus"} 9.0',
        'orthrus_engine_steps_total{topology="dedicated"} 5.0',
        'orthrus_engine_running_requests{topology="dedicated"} 3.0',
        'orthrus_engine_policy_info{policy="hetero_fcfs",topology="dedicated"} 1.0',
    }
    assert not any('running_requests{topology="orthrus"}' in line for line in lines)


def test_a_request_is_counted_under_the_arm_and_the_topology_where_it_began() -> None:
    metrics = FrontMetrics()
    began = metrics.began("embed", "a", "orthrus")
    metrics.ended("embed", began, "ok")
    lines = metrics.text().splitlines()
    assert 'orthrus_front_in_flight_requests{arm="a",kind="embed",topology="orthrus"} 0.0' in lines
    assert 'orthrus_requests_total{arm="a",kind="embed",outcome="ok",topology="orthrus"} 1.0' in lines


def test_what_a_front_has_charged_is_under_the_topology_in_force_only() -> None:
    topology: list[TopologyName] = ["orthrus"]
    ledger = TokenLoadLedger()
    metrics = FrontMetrics()
    metrics.follow("a", lambda: topology[-1], ledger)
    ledger.charge(RequestId("r"), ReplicaId("a"), 100)
    ledger.correct(ReplicaId("a"), {RequestId("r"): 30})
    assert 'orthrus_front_charged_tokens{arm="a",topology="orthrus"} 30.0' in metrics.text().splitlines()
    topology.append("dedicated")
    gauges = [line for line in metrics.text().splitlines() if line.startswith("orthrus_front_") and "tokens" in line]
    assert gauges == [
        'orthrus_front_charged_tokens{arm="a",topology="dedicated"} 30.0',
        'orthrus_front_drift_tokens{arm="a",topology="dedicated"} 70.0',
    ]


def test_before_its_first_report_an_engine_has_no_metrics() -> None:
    registry = CollectorRegistry()
    registry.register(EngineReportCollector(TopologyTotals("orthrus"), dict))
    assert generate_latest(registry) == b""


def test_every_metric_of_the_catalogue_is_published() -> None:
    registry = CollectorRegistry()
    registry.register(EngineReportCollector(seen(REPORT), lambda: REPORT))
    front = FrontMetrics()
    front.follow("", lambda: "orthrus", TokenLoadLedger())
    front.mirrored("a", "embed", "ok")
    front.ended("embed", front.began("embed", "", "orthrus"), "ok")
    front.refused("embed", "saturated")
    front.goal("embed", "e2e", "met")
    text = generate_latest(registry).decode() + front.text()
    assert [metric.name for metric in CATALOG if f"\n{metric.name}" not in text] == []


def test_merging_keeps_histograms_escapes_and_labels() -> None:
    metrics = FrontMetrics()
    metrics.ended("embed", metrics.began("embed", "", "orthrus"), "ok")
    odd = '# HELP m "a" \\\\ b\n# TYPE m gauge\nm{path="C:\\\\x\\"y\\nz",replica="own"} NaN\n'
    merged = merge_metrics({"f": metrics.text(), "r": odd})
    lines = merged.text.decode().splitlines()
    assert merged.unreadable == ()
    assert 'm{path="C:\\\\x\\"y\\nz",replica="own"} NaN' in lines
    assert (
        'orthrus_request_duration_seconds_bucket{arm="",kind="embed",le="+Inf",replica="f",topology="orthrus"} 1.0'
        in lines
    )
    assert 'orthrus_front_in_flight_requests{arm="",kind="embed",replica="f",topology="orthrus"} 0.0' in lines
    assert "_created" not in merged.text.decode()


@pytest.mark.parametrize(
    ("status", "is_cut", "has_left", "outcome"),
    [(200, False, False, "ok"), (200, True, False, "failed"), (200, False, True, "cancelled"), (None, False, False, "failed"),
     (None, False, True, "cancelled"), (400, False, False, "invalid"), (404, False, False, "invalid"),
     (429, False, False, "overloaded"), (503, False, False, "overloaded"), (500, False, False, "failed")],
)  # fmt: skip
def test_each_end_has_one_outcome(status: int | None, is_cut: bool, has_left: bool, outcome: str) -> None:
    assert outcome_of(status, is_cut=is_cut, has_left=has_left) == outcome
