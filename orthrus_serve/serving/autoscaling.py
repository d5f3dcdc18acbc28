"""How many replicas run, by load in tokens: Ray Serve's autoscaler, with our measure and our decision.

Each replica tells Serve its remaining tokens (`record_autoscaling_stats`); Serve's controller calls `TokenLoadPolicy` with them
several times a second. Serve pickles this module by value, so it holds no state: what must be remembered goes through Serve's
`policy_state`. Leaves out the decision (`policy/autoscale.py`).
"""

from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from orthrus_serve.config.schema import AutoscalingSpec
from orthrus_serve.policy.autoscale import AutoscaleLimits, Call, decide

METRIC = "remaining_tokens"
POLICY = "orthrus_serve.serving.autoscaling:TokenLoadPolicy"
# Serve's own look-back is not used, and must be longer than an interval of its own that nobody needs.
LOOK_BACK_S = 30.0
LONGEST_REPORT_GAP_S = 10.0


class TokenLoadPolicy:
    """Called by Serve's controller. The delays are ours: Serve would add its own to them, so its own are zero."""

    def __init__(self, target_tokens_per_replica: int, upscale_delay_s: float, downscale_delay_s: float) -> None:
        self._target = target_tokens_per_replica
        self._up_s, self._down_s = upscale_delay_s, downscale_delay_s

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas that are to run, and what to remember."""
        limits = AutoscaleLimits(
            min_replicas=context.capacity_adjusted_min_replicas,
            max_replicas=context.capacity_adjusted_max_replicas,
            target_tokens_per_replica=self._target,
            upscale_delay_s=self._up_s,
            downscale_delay_s=self._down_s,
        )
        known = [series[-1].value for series in ((context.raw_metrics or {}).get(METRIC) or {}).values() if series]
        num_replicas, call = decide(
            round(sum(known)),
            context.target_num_replicas,
            limits,
            _remembered(context.policy_state),
            context.current_time or 0.0,
            is_whole=len(known) == len(context.running_replicas) == context.target_num_replicas,
        )
        return num_replicas, {} if call is None else {"called": call.num_replicas, "since_s": call.since_s}


def _remembered(state: Mapping[str, Any]) -> Call | None:
    return Call(state["called"], state["since_s"]) if "called" in state else None


def autoscaling_config(spec: AutoscalingSpec, num_replicas: int) -> AutoscalingConfig:
    """What Serve is told about a deployment that starts with so many replicas."""
    policy: Any = AutoscalingPolicy
    config: Any = AutoscalingConfig
    return config(
        min_replicas=spec.min_replicas,
        max_replicas=spec.max_replicas,
        initial_replicas=num_replicas,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        look_back_period_s=LOOK_BACK_S,
        policy=policy(
            policy_function=POLICY,
            policy_kwargs={
                "target_tokens_per_replica": spec.target_tokens_per_replica,
                "upscale_delay_s": spec.upscale_delay_s,
                "downscale_delay_s": spec.downscale_delay_s,
            },
        ),
    )


def report_environment(spec: AutoscalingSpec) -> dict[str, str]:
    """Environment of the replicas: how often they tell Serve their load. Often enough to notice a short lull."""
    gap_s = min(LONGEST_REPORT_GAP_S, max(0.5, spec.upscale_delay_s / 3))
    return {
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": f"{gap_s:g}",
        "RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR": f"{gap_s / LOOK_BACK_S:g}",
    }
