"""Ray's autoscaler with our policy: what it is given, what it remembers, and what it is told about the deployment."""

from types import SimpleNamespace
from typing import Any

from orthrus_serve.config.schema import AutoscalingSpec
from orthrus_serve.serving.autoscaling import METRIC, TokenLoadPolicy, autoscaling_config, report_environment

SPEC = AutoscalingSpec(max_replicas=4, target_tokens_per_replica=1000, upscale_delay_s=3.0, downscale_delay_s=6.0)


def context(loads: dict[str, list[float]], num_wanted: int, now_s: float, state: dict[str, Any]) -> Any:
    series = {replica: [SimpleNamespace(value=value) for value in values] for replica, values in loads.items()}
    return SimpleNamespace(
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
        target_num_replicas=num_wanted,
        running_replicas=list(loads),
        raw_metrics={METRIC: series},
        policy_state=state,
        current_time=now_s,
    )


def make_policy() -> TokenLoadPolicy:
    config = autoscaling_config(SPEC, 1)
    return config.policy.get_policy()(**config.policy.policy_kwargs)


def test_the_last_reports_are_added_up_and_the_call_is_remembered_between_ticks() -> None:
    policy, state = make_policy(), {}
    for now_s, expected in [(100.0, 1), (102.0, 1), (103.0, 3)]:
        wanted, state = policy(context({"a": [9.0, 2500.0]}, 1, now_s, state))
        assert wanted == expected
    assert state == {}


def test_while_a_report_is_missing_nobody_is_removed() -> None:
    policy, state = make_policy(), {}
    for now_s in range(100):
        wanted, state = policy(context({"a": [0.0], "b": []}, 2, float(now_s), state))
        assert wanted == 2
    state = {}
    for now_s in range(7):
        wanted, state = policy(context({"a": [0.0], "b": [0.0]}, 2, float(now_s), state))
    assert wanted == 1


def test_before_any_report_nothing_changes() -> None:
    empty = context({}, 2, 0.0, {})
    empty.raw_metrics = {}
    assert make_policy()(empty) == (2, {})


def test_serve_adds_no_delay_of_its_own() -> None:
    config = autoscaling_config(SPEC, 2)
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (1, 2, 4)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (0.0, 0.0)


def test_reports_come_several_times_within_the_shorter_delay() -> None:
    gap_s = float(report_environment(SPEC)["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"])
    assert gap_s == SPEC.upscale_delay_s / 3
