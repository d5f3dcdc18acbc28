"""Metrics as Prometheus text: those of the engine's reports, and many texts made one."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from orthrus_serve.policy.routed_request import RoutedRequest
from orthrus_serve.serving.engine_metrics import EngineReportCollector
from orthrus_serve.serving.exchange import Exchange
from orthrus_serve.serving.metrics_export import FrontMetrics, outcome_of, silent_text
from orthrus_serve.serving.metrics_merge import merge_metrics
from orthrus_serve.serving.router_state import RouterState
from orthrus_serve.serving.topology_totals import TopologyTotals
from orthrus_serve.telemetry.catalog import CATALOG
from orthrus_serve.types import ReplicaId, RequestId, TopologyName

REPORT: dict[str, Any] = {
    "policy": "orthrus", "running": 3, "waiting": 2, "prompt_left": {"generate": 10, "embed": 70},
    "totals": {"steps": 9, "mixed_steps": 4, "decode_tokens": 5, "prefill_tokens": 6, "embed_tokens": 7, "budget_tokens": 90},
    "requests": {"a": (0, 10, 0, 16), "b": (0, 0, 4, 16), "c": (1, 70, 0, 0)},
    "oldest_wait_s": {"generate": 0.0, "embed": 2.5}, "pooling_states": 1, "kv_free_blocks": 30, "kv_blocks": 40,
    "target_s": 0.05, "peak_flops": 2e5, "adapters": 1, "adapter_places": 2, "adapter_requests": {"e5": 8}, "adapter_waits": 3,
    "handovers": {"accepted": 5, "late": 1, "refused": 0},
}  # fmt: skip
DURATIONS = {"busy_s": 1.5, "busy_with_decodes_s": 0.5, "steps_with_decodes_0": 2, "steps_with_decodes_15": 1}


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
    state = RouterState()
    ledger = state.ledger
    metrics = FrontMetrics()
    metrics.follow("a", lambda: topology[-1], state)
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
    registry.register(EngineReportCollector(seen(REPORT), lambda: REPORT, ["e5"]))
    front = FrontMetrics()
    front.follow("a", lambda: "orthrus", RouterState(replicas=(ReplicaId("r"),)))
    text = generate_latest(registry).decode() + front.text() + silent_text({"": 0})
    elsewhere = {"orthrus_request_stage_seconds"}  # by the engine, see tests/engine
    names = {metric.name for metric in CATALOG} - elsewhere
    assert [name for name in names if f"\n{name}" not in text] == []


def test_counts_with_fixed_labels_are_there_before_anything_is_counted() -> None:
    front = FrontMetrics()
    front.follow("a", lambda: "orthrus", RouterState())
    lines = front.text().splitlines()
    assert 'orthrus_requests_total{arm="a",kind="embed",outcome="failed",topology="orthrus"} 0.0' in lines
    assert 'orthrus_refusals_total{kind="embed",reason="saturated"} 0.0' in lines
    assert 'orthrus_unauthorized_requests_total{key="unknown"} 0.0' in lines
    assert 'orthrus_goals_total{goal="ttft",kind="generate",result="missed"} 0.0' in lines
    assert 'orthrus_front_wait_seconds_count{arm="a",kind="generate",topology="orthrus"} 0.0' in lines


def test_steps_are_told_by_their_duration_and_whether_they_held_decodes() -> None:
    registry = CollectorRegistry()
    report = {**REPORT, "totals": {**REPORT["totals"], **DURATIONS}}
    registry.register(EngineReportCollector(seen(report), lambda: report))
    name, labels = "orthrus_engine_step_duration_seconds", 'topology="orthrus"'
    lines = set(generate_latest(registry).decode().splitlines())
    assert lines >= {
        f'{name}_bucket{{decodes="with",le="0.001",{labels}}} 2.0',
        f'{name}_bucket{{decodes="with",le="2.5",{labels}}} 2.0',
        f'{name}_bucket{{decodes="with",le="+Inf",{labels}}} 3.0',
        f'{name}_sum{{decodes="with",{labels}}} 0.5',
        f'{name}_sum{{decodes="without",{labels}}} 1.0',
        f'{name}_count{{decodes="without",{labels}}} 0.0',
    }


def test_what_an_engine_holds_is_told_by_kind_and_unknown_targets_are_left_out() -> None:
    registry, unknown = CollectorRegistry(), CollectorRegistry()
    registry.register(EngineReportCollector(seen(REPORT), lambda: REPORT, ["e5", "idle"]))
    lines = set(generate_latest(registry).decode().splitlines())
    assert lines >= {
        'orthrus_engine_oldest_wait_seconds{kind="embed",topology="orthrus"} 2.5',
        'orthrus_engine_pooling_states{topology="orthrus"} 1.0',
        'orthrus_engine_kv_cache_usage_ratio{topology="orthrus"} 0.25',
        'orthrus_engine_step_target_seconds{topology="orthrus"} 0.05',
        'orthrus_engine_peak_flops_per_second{topology="orthrus"} 200000.0',
        'orthrus_engine_adapter_requests_total{adapter="e5"} 8.0',
        'orthrus_engine_adapter_requests_total{adapter="idle"} 0.0',
        "orthrus_engine_adapter_waits_total 3.0",
        'orthrus_engine_handovers_total{fetch="accepted"} 5.0',
        'orthrus_engine_handovers_total{fetch="late"} 1.0',
    }
    report = {**REPORT, "target_s": None, "peak_flops": None}
    unknown.register(EngineReportCollector(seen(report), lambda: report))
    text = generate_latest(unknown).decode()
    assert "orthrus_engine_step_target_seconds" not in text
    assert "peak_flops" not in text


def test_routing_is_told_by_replica_and_ends_with_it() -> None:
    one, two = ReplicaId("one"), ReplicaId("two")
    state = RouterState(replicas=(one, two), quarantined={two: "sick"})
    metrics = FrontMetrics()
    metrics.follow("", lambda: "orthrus", state)
    for number in range(3):
        state.choose_and_charge(RoutedRequest(str(number), "embed", charge=40), [one])
    lines = metrics.text().splitlines()
    assert 'orthrus_routed_requests_total{arm="",kind="embed",target="one"} 3.0' in lines
    assert 'orthrus_front_replica_load_tokens{arm="",target="one"} 120.0' in lines
    assert 'orthrus_front_imbalance_ratio{arm="",kind="embed"} 2.0' in lines
    assert 'orthrus_front_quarantined_replicas{arm=""} 1.0' in lines
    state.replicas = (two,)
    assert 'target="one"' not in metrics.text()


async def test_a_request_tells_when_it_was_placed_when_it_began_to_be_answered_and_how_often_it_was_tried() -> None:
    async def nowhere(_: Any) -> None:
        pass

    metrics, exchange = FrontMetrics(), Exchange(nowhere)
    began = metrics.began("generate", "", "orthrus")
    exchange.tried(None, None)
    exchange.tried(ReplicaId("one"), began.at_s + 0.002)
    exchange.tried(ReplicaId("two"), began.at_s + 9.0)
    await exchange({"type": "http.response.body", "body": b"x", "more_body": True})
    metrics.ended("generate", began, "ok", exchange)
    lines = metrics.text().splitlines()
    labels = 'arm="",kind="generate",{}topology="orthrus"'
    assert f'orthrus_front_wait_seconds_bucket{{{labels.format("""le="0.0025",""")}}} 1.0' in lines
    assert f"orthrus_time_to_first_token_seconds_count{{{labels.format('')}}} 1.0" in lines
    assert 'orthrus_retries_total{arm="",kind="generate"} 1.0' in lines


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
