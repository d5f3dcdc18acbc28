"""Decides whether the load generator kept up, or was itself the bottleneck. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.records import ClientHealth
from loadgen.summary import ClientSummary


@dataclass(frozen=True)
class ClientLimits:
    """Above any of these, what was measured is the client and not the server. See docs/loadgen.md."""

    schedule_lag_p99_s: float
    loop_lag_p99_s: float
    turnaround_p99_s: float
    cpu_ratio: float


def judge_client(healths: Sequence[ClientHealth], limits: ClientLimits) -> ClientSummary:
    """The verdict on all workers of a stage together; for CPU, on the busiest."""
    schedule = [lag for health in healths for lag in health.schedule_lag_s]
    loop = [lag for health in healths for lag in health.loop_lag_s]
    turnaround = [wait for health in healths for wait in health.turnaround_s]
    cpu_ratio = max((health.cpu_ratio for health in healths), default=0.0)
    bottlenecks = [
        *_over("schedule lag p99", _quantile(schedule, 0.99), limits.schedule_lag_p99_s, "requests left late"),
        *_over("event-loop lag p99", _quantile(loop, 0.99), limits.loop_lag_p99_s, "answers were read late"),
        *_over(
            "turnaround p99", _quantile(turnaround, 0.99), limits.turnaround_p99_s, "clients idled between requests"
        ),
    ]
    if cpu_ratio > limits.cpu_ratio:
        bottlenecks.append(
            f"a worker used {cpu_ratio:.0%} of a core (limit {limits.cpu_ratio:.0%}): use more --processes"
        )
    return ClientSummary(
        bottlenecks=bottlenecks,
        schedule_lag_p50_s=_quantile(schedule, 0.5),
        schedule_lag_p99_s=_quantile(schedule, 0.99),
        loop_lag_p99_s=_quantile(loop, 0.99),
        turnaround_p99_s=_quantile(turnaround, 0.99),
        max_cpu_ratio=cpu_ratio,
        peak_in_flight=sum(health.peak_in_flight for health in healths),
    )


def _over(what: str, value_s: float | None, limit_s: float, meaning: str) -> list[str]:
    if value_s is None or value_s <= limit_s:
        return []
    return [f"{what} {value_s * 1000:.0f} ms (limit {limit_s * 1000:.0f} ms): {meaning}"]


def _quantile(values: Sequence[float], share: float) -> float | None:
    return float(np.quantile(np.asarray(values, dtype=np.float64), share)) if values else None
