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
Unit = Literal[
    "steps", "tokens", "requests", "seconds", "info", "refusals", "goals", "ratio", "flops", "flops_per_second", "preemptions",
    "states", "adapters", "places", "waits", "replicas", "quarantines", "retries", "handovers",
]  # fmt: skip

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
# What a request that was answered with a 401 carried.
BadKey = Literal["missing", "unknown"]
GoalName = Literal["ttft", "e2e"]
GoalResult = Literal["met", "missed"]
# What a token of a step was for.
StepPart = Literal["decode", "prefill", "embed"]
# Where a request's time goes in an engine: an embedding is computed as a whole, a generation prefills and then decodes.
Stage = Literal["queue", "prefill", "decode", "embed"]
# Whether a step held decodes, for which a time target counts.
Decodes = Literal["with", "without"]

STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
STAGE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
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

# What became of the first half of a generation that two replicas share: its KV was handed over · it had nothing to hand over ·
# it refused the request · it was lost or failed. And of a second half that was given KV: lost, and tried anew without.
Handed = Literal["over", "whole", "refused", "lost", "retried"]
# What an engine did with KV that it was told to fetch: takes it · was too late for what it had taken · would not.
Fetch = Literal["accepted", "late", "refused"]

# The values that each label may take; a label that is not here does not exist. `arm` takes the names of the configuration, or
# is empty where there are no arms; `adapter` takes those of the adapters; `target` is an engine replica's id, and ends with it.
LABEL_VALUES: Mapping[str, tuple[str, ...]] = {
    "kind": get_args(RequestKind),
    "key": get_args(BadKey),
    "goal": get_args(GoalName),
    "adapter": (),
    "arm": (),
    "decodes": get_args(Decodes),
    "fetch": get_args(Fetch),
    "handed": get_args(Handed),
    "outcome": get_args(Outcome),
    "copied": get_args(Copied),
    "part": get_args(StepPart),
    "policy": get_args(PolicyName),
    "reason": get_args(Refusal),
    "result": get_args(GoalResult),
    "stage": get_args(Stage),
    "target": (),
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
WASTED_TOKENS = Metric(
    "orthrus_engine_wasted_tokens_total",
    "counter",
    "tokens",
    ("topology",),
    "Tokens for which there was work and room in the steps, and which were not computed.",
)
STEP_DURATION = Metric(
    "orthrus_engine_step_duration_seconds",
    "histogram",
    "seconds",
    ("topology", "decodes"),
    "How long a step took, from its start or the end of the one before, whichever was later, to its results.",
    buckets=STEP_BUCKETS_S,
)
STEP_TARGET = Metric(
    "orthrus_engine_step_target_seconds",
    "gauge",
    "seconds",
    ("topology",),
    "Time target of steps that hold decodes (target_tpot_ms); missing where there is none.",
)
LATE_STEPS = Metric(
    "orthrus_engine_late_steps_total",
    "counter",
    "steps",
    ("topology",),
    "Steps with decodes that took longer than the target.",
)
BUSY = Metric("orthrus_engine_busy_seconds_total", "counter", "seconds", ("topology",), "Time with a step running.")
MODEL_FLOPS = Metric(
    "orthrus_engine_model_flops_total",
    "counter",
    "flops",
    ("topology",),
    "Floating-point operations that the model needed for the steps, on one device, without adapters and pooling.",
)
PEAK_FLOPS = Metric(
    "orthrus_engine_peak_flops_per_second",
    "gauge",
    "flops_per_second",
    ("topology",),
    "What one device can do at most (engine.peak_tflops, or by its name); missing where that is not known.",
)
PREEMPTIONS = Metric(
    "orthrus_engine_preemptions_total",
    "counter",
    "preemptions",
    ("topology",),
    "Requests that lost their KV blocks and begin anew.",
)
OLDEST_WAIT = Metric(
    "orthrus_engine_oldest_wait_seconds",
    "gauge",
    "seconds",
    ("topology", "kind"),
    "For how long the oldest waiting request of a kind has waited for its first step; 0 when none waits.",
)
POOLING_STATES = Metric(
    "orthrus_engine_pooling_states",
    "gauge",
    "states",
    ("topology",),
    "Embeddings of which a part is computed, and whose running pool is held.",
)
STREAM_GAP = Metric(
    "orthrus_stream_gap_seconds",
    "gauge",
    "seconds",
    ("topology",),
    "Least time between two chunks of a stream of this replica; what is made meanwhile goes together. It grows with the "
    "streams, and while Fronts answer late.",
)
KV_USAGE = Metric(
    "orthrus_engine_kv_cache_usage_ratio", "gauge", "ratio", ("topology",), "Share of the KV blocks that is in use."
)
USED_ADAPTERS = Metric(
    "orthrus_engine_used_adapters", "gauge", "adapters", ("topology",), "Adapters of running requests."
)
ADAPTER_PLACES = Metric(
    "orthrus_engine_adapter_places", "gauge", "places", ("topology",), "Adapters that one step can hold (max_loras)."
)
ADAPTER_REQUESTS = Metric(
    "orthrus_engine_adapter_requests_total", "counter", "requests", ("adapter",), "Requests that came for an adapter."
)
ADAPTER_WAITS = Metric(
    "orthrus_engine_adapter_waits_total",
    "counter",
    "waits",
    (),
    "How often the head of a lane was passed over in a step because no place was free for its adapter.",
)
STAGE = Metric(
    "orthrus_request_stage_seconds",
    "histogram",
    "seconds",
    ("kind", "stage"),
    "Time that a request spent in a stage of its engine; the stage before, in the Front, is orthrus_front_wait_seconds.",
    buckets=STAGE_BUCKETS_S,
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
FRONT_WAIT = Metric(
    "orthrus_front_wait_seconds",
    "histogram",
    "seconds",
    ("arm", "topology", "kind"),
    "From the arrival of a request at a Front to the choice of its replica: reading, admission, charge.",
    buckets=STAGE_BUCKETS_S,
)
FIRST_TOKEN = Metric(
    "orthrus_time_to_first_token_seconds",
    "histogram",
    "seconds",
    ("arm", "topology", "kind"),
    "From the arrival of a request at a Front to the first part of a streamed answer.",
    buckets=DURATION_BUCKETS_S,
)
RETRIES = Metric(
    "orthrus_retries_total",
    "counter",
    "retries",
    ("arm", "kind"),
    "Requests that were sent to another replica, since one was lost or failed before the first byte.",
)
ROUTED = Metric(
    "orthrus_routed_requests_total",
    "counter",
    "requests",
    ("arm", "kind", "target"),
    "Requests that a Front sent to a replica.",
)
REPLICA_LOAD = Metric(
    "orthrus_front_replica_load_tokens",
    "gauge",
    "tokens",
    ("arm", "target"),
    "Remaining tokens at a replica as a Front counts them, of everybody's requests.",
)
IMBALANCE = Metric(
    "orthrus_front_imbalance_ratio",
    "gauge",
    "ratio",
    ("arm", "kind"),
    "Remaining tokens of the busiest replica that serves a kind over the mean of all that do: 1 is even, and so is idle.",
)
REPLICAS = Metric(
    "orthrus_front_replicas", "gauge", "replicas", ("arm",), "Engine replicas that Serve tells a Front are running."
)
QUARANTINED = Metric(
    "orthrus_front_quarantined_replicas",
    "gauge",
    "replicas",
    ("arm",),
    "Replicas that run and get nothing from this Front.",
)
QUARANTINES = Metric(
    "orthrus_quarantines_total", "counter", "quarantines", ("arm",), "How often a Front put a replica out."
)
SILENT = Metric(
    "orthrus_front_silent_replicas",
    "gauge",
    "replicas",
    ("arm",),
    "Engine replicas that did not answer this scrape within its time limit.",
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
UNAUTHORIZED = Metric(
    "orthrus_unauthorized_requests_total",
    "counter",
    "requests",
    ("key",),
    "Requests of any kind that were answered with a 401 before they were read (api_keys), by what was wrong with their key.",
)
GOALS = Metric(
    "orthrus_goals_total",
    "counter",
    "goals",
    ("kind", "goal", "result"),
    "Goals of admitted requests, by whether they were met.",
)
HANDOVERS = Metric(
    "orthrus_handovers_total",
    "counter",
    "handovers",
    ("arm", "handed"),
    "Generations that two replicas share (disagg_pd), by what came of the first half: its KV handed over, nothing to hand "
    "over (whole), refused, lost; and, after a handover, the second half lost and computed anew (retried).",
)
FETCHES = Metric(
    "orthrus_engine_handovers_total",
    "counter",
    "handovers",
    ("fetch",),
    "Handovers that reached an engine: accepted; of these, too late to be fetched; and refused, as of another prompt or "
    "engine. What is not fetched is computed anew.",
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
    # what steps held, and how long they took
    STEPS, MIXED_STEPS, STEP_TOKENS, STEP_BUDGET_TOKENS, WASTED_TOKENS, STEP_DURATION, STEP_TARGET, LATE_STEPS, BUSY,
    MODEL_FLOPS, PEAK_FLOPS, PREEMPTIONS,
    # what an engine holds now
    RUNNING_REQUESTS, WAITING_REQUESTS, HELD_REQUESTS, REMAINING_TOKENS, OLDEST_WAIT, POOLING_STATES, KV_USAGE, POLICY_INFO,
    USED_ADAPTERS, ADAPTER_PLACES, ADAPTER_REQUESTS, ADAPTER_WAITS, STAGE, FETCHES, STREAM_GAP,
    # how requests went
    REQUESTS, REQUEST_DURATION, FIRST_TOKEN, FRONT_WAIT, IN_FLIGHT, RETRIES, HANDOVERS, MIRRORED, REFUSALS,
    UNAUTHORIZED, GOALS,
    # how they were routed
    ROUTED, REPLICA_LOAD, IMBALANCE, REPLICAS, QUARANTINED, QUARANTINES, SILENT, CHARGED_TOKENS, DRIFT_TOKENS,
)  # fmt: skip


def step_bucket_keys(decodes: str) -> tuple[str, ...]:
    """Under which names an engine's totals have the steps of each bucket of `STEP_DURATION`, the last without a bound."""
    return tuple(f"steps_{decodes}_decodes_{bucket}" for bucket in range(len(STEP_BUCKETS_S) + 1))
