"""Every metric that Orthrus publishes, declared once: name, kind, unit, labels, help.

Guards: names begin with `orthrus_` and carry their base unit, counters end in `_total`. No metric declares the labels that
say where a sample comes from (`replica`, `deployment`, `application`): whoever exports adds them, and Ray refuses metrics that
declare them. Leaves out who counts and how it is exported (`serving/`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from orthrus_serve.types import PolicyName, RequestKind, TopologyName

MetricKind = Literal["counter", "gauge", "histogram"]
Unit = Literal["steps", "tokens", "requests", "seconds", "info", "refusals", "goals"]

# How a request ended: answered · refused by a 4xx · refused for lack of room · the client left · an error of ours.
Outcome = Literal["ok", "invalid", "overloaded", "cancelled", "failed"]
# Why a request was not let in: its key's own limit, that its goal would not be met, or that it named no arm there is.
Refusal = Literal[
    "requests_per_minute",
    "tokens_per_minute",
    "in_flight_tokens",
    "saturated",
    "warming_up",
    "goal_unreachable",
    "unknown_arm",
]
GoalName = Literal["ttft", "e2e"]
GoalResult = Literal["met", "missed"]
# What a token of a step was for.
StepPart = Literal["decode", "prefill", "embed"]

DURATION_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)


@dataclass(frozen=True)
class Metric:
    """A metric's declaration. `buckets` are upper bounds in the unit, for histograms only."""

    name: str
    kind: MetricKind
    unit: Unit
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


# What became of a copy that was made for another arm: as a request ends, or not made for want of room.
Copied = Literal["ok", "invalid", "overloaded", "cancelled", "failed", "dropped"]

# The values that each label may take; a label that is not here does not exist. `arm` takes the names of the configuration, or
# is empty where there are no arms.
LABEL_VALUES: Mapping[str, tuple[str, ...]] = {
    "kind": get_args(RequestKind),
    "goal": get_args(GoalName),
    "arm": (),
    "outcome": get_args(Outcome),
    "copied": get_args(Copied),
    "part": get_args(StepPart),
    "policy": get_args(PolicyName),
    "reason": get_args(Refusal),
    "result": get_args(GoalResult),
    "topology": get_args(TopologyName),
}

STEPS = Metric("orthrus_engine_steps_total", "counter", "steps", ("topology",), "Steps (forward passes) run.")
MIXED_STEPS = Metric(
    "orthrus_engine_mixed_steps_total", "counter", "steps", ("topology",), "Steps that held tokens of both kinds."
)
STEP_TOKENS = Metric(
    "orthrus_engine_step_tokens_total", "counter", "tokens", ("topology", "part"), "Tokens computed in steps, by part."
)
STEP_BUDGET_TOKENS = Metric(
    "orthrus_engine_step_budget_tokens_total",
    "counter",
    "tokens",
    ("topology",),
    "Tokens that the steps could have held; step tokens over this is the step fill over any window.",
)
RUNNING_REQUESTS = Metric(
    "orthrus_engine_running_requests", "gauge", "requests", ("topology",), "Requests in the running batch, both kinds."
)
WAITING_REQUESTS = Metric(
    "orthrus_engine_waiting_requests", "gauge", "requests", ("topology",), "Requests waiting for a place, both kinds."
)
HELD_REQUESTS = Metric(
    "orthrus_engine_held_requests", "gauge", "requests", ("topology", "kind"), "Requests running or waiting, by kind."
)
REMAINING_TOKENS = Metric(
    "orthrus_engine_remaining_tokens",
    "gauge",
    "tokens",
    ("topology", "kind"),
    "Tokens still to be computed for the requests that the engine holds.",
)
POLICY_INFO = Metric(
    "orthrus_engine_policy_info",
    "gauge",
    "info",
    ("topology", "policy"),
    "1 for the scheduler policy in force, else 0.",
)
REQUESTS = Metric(
    "orthrus_requests_total",
    "counter",
    "requests",
    ("arm", "topology", "kind", "outcome"),
    "Requests ended, by outcome.",
)
REQUEST_DURATION = Metric(
    "orthrus_request_duration_seconds",
    "histogram",
    "seconds",
    ("arm", "topology", "kind"),
    "From the arrival of a request at a Front to the last byte of its answer.",
    buckets=DURATION_BUCKETS_S,
)
IN_FLIGHT = Metric(
    "orthrus_front_in_flight_requests",
    "gauge",
    "requests",
    ("arm", "topology", "kind"),
    "Requests that a Front has open.",
)
MIRRORED = Metric(
    "orthrus_mirrored_requests_total",
    "counter",
    "requests",
    ("arm", "kind", "copied"),
    "Copies of requests made for an arm, by what became of them.",
)

REFUSALS = Metric(
    "orthrus_refusals_total", "counter", "refusals", ("kind", "reason"), "Requests that were not let in, by reason."
)
GOALS = Metric(
    "orthrus_goals_total",
    "counter",
    "goals",
    ("kind", "goal", "result"),
    "Goals of admitted requests, by whether they were met.",
)
CHARGED_TOKENS = Metric(
    "orthrus_front_charged_tokens",
    "gauge",
    "tokens",
    ("arm", "topology"),
    "Remaining tokens that a Front counts for the requests it has open, as the replicas' reports correct them.",
)
DRIFT_TOKENS = Metric(
    "orthrus_front_drift_tokens",
    "gauge",
    "tokens",
    ("arm", "topology"),
    "By how much the last report of each replica moved what the Front had counted, up or down.",
)

CATALOG: tuple[Metric, ...] = (
    STEPS,
    MIXED_STEPS,
    STEP_TOKENS,
    STEP_BUDGET_TOKENS,
    RUNNING_REQUESTS,
    WAITING_REQUESTS,
    HELD_REQUESTS,
    REMAINING_TOKENS,
    POLICY_INFO,
    REQUESTS,
    REQUEST_DURATION,
    IN_FLIGHT,
    REFUSALS,
    GOALS,
    CHARGED_TOKENS,
    DRIFT_TOKENS,
    MIRRORED,
)
