"""What each Grafana board shows: one question a board, one row a part of its answer. `make.py` turns it into Grafana's JSON.

In a query `<E>` stands for the labels of engines (topology, replica, arm), `<F>` for those of requests at a Front (topology, arm),
`<A>` for the arm alone, `<V>` for those of vLLM's own metrics (replica, arm), and `<R>` for the window of a rate. Leaves out
alerts (`alerts.yaml`) and what a metric means (`docs/metrics.md`).
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Query:
    """A query and what its lines are called (`{{label}}` is filled in)."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One picture. `unit` is one of Grafana's. Green up to `good`, red from `bad` on; the other way round when `bad` is smaller."""

    title: str
    says: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Literal["timeseries", "stat"] = "timeseries"
    stacked: bool = False
    good: float | None = None
    bad: float | None = None


@dataclass(frozen=True)
class Row:
    """Panels beside each other."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """One question. `uid` never changes: links lead to it."""

    uid: str
    title: str
    says: str
    rows: tuple[Row, ...]


def rate(metric: str, labels: str, by: str = "") -> str:
    """The sum of a counter's increase a second."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{labels}}}[<R>]))"


def share(part: str, whole: str) -> str:
    """`part` of `whole`; 0 where there is nothing of either."""
    return f"{part} / clamp_min({whole}, 1e-9)"


def quantile(of: float, metric: str, labels: str, by: str) -> str:
    """A quantile of a histogram."""
    return f"histogram_quantile({of}, sum by (le, {by}) (rate({metric}_bucket{{{labels}}}[<R>])))"


def quantiles(metric: str, labels: str, by: str, legend: str) -> tuple[Query, ...]:
    """The median and the 99th percentile of a histogram."""
    return tuple(Query(quantile(of, metric, labels, by), f"p{of * 100:g} {legend}") for of in (0.5, 0.99))


# --- panels that stand on several boards ----------------------------------------------------------------------------

ENDED, STEPS, STEP_TOKENS = "orthrus_requests_total", "orthrus_engine_steps_total", "orthrus_engine_step_tokens_total"
FAILED = Panel(
    "Failed",
    "Share of requests that ended in an error of ours. Above 1 % somebody notices.",
    (Query(share(rate(ENDED, 'outcome="failed",<F>'), rate(ENDED, "<F>")), "failed"),),
    unit="percentunit", kind="stat", good=0.001, bad=0.01,
)  # fmt: skip
OLDEST = Panel(
    "Oldest waiting request",
    "For how long the request that waits longest for its first step has waited, on the worst replica. Without an end: more load "
    "than the replicas can take, or no room in the KV cache.",
    (Query("max by (kind) (orthrus_engine_oldest_wait_seconds{<E>})", "{{kind}}"),),
    unit="s", good=5, bad=30,
)  # fmt: skip
IMBALANCE = Panel(
    "Imbalance",
    "Remaining tokens of the busiest replica over the mean of those that serve the kind: 1 is even, the number of replicas is "
    "all on one. High for minutes under load: the router's rule, or reports that do not arrive.",
    (Query("max by (arm, kind) (orthrus_front_imbalance_ratio{<A>})", "{{arm}} {{kind}}"),),
    good=1.5, bad=2,
)  # fmt: skip
PARTS = Panel(
    "Tokens a second by part",
    "Tokens computed for decodes, for prompts of generations, and for embeddings.",
    (Query(rate(STEP_TOKENS, "<E>", "part"), "{{part}}"),),
    stacked=True,
)
KV_USAGE = Panel(
    "KV cache in use",
    "Share of the KV blocks in use. At 1, requests wait for memory or are preempted.",
    (Query("max by (replica) (orthrus_engine_kv_cache_usage_ratio{<E>})", "{{replica}}"),),
    unit="percentunit", good=0.8, bad=0.95,
)  # fmt: skip
PREEMPTIONS = Panel(
    "Preemptions",
    "Requests a second that lost their KV blocks and begin anew: work done twice.",
    (Query(rate("orthrus_engine_preemptions_total", "<E>", "replica"), "{{replica}}"),),
    good=0.01, bad=0.1,
)  # fmt: skip
FILL = Panel(
    "Fill and waste",
    "Of the tokens that steps could have held: how many they held, and for how many there was work that they did not hold.",
    (
        Query(share(rate(STEP_TOKENS, "<E>"), rate("orthrus_engine_step_budget_tokens_total", "<E>")), "filled"),
        Query(
            share(
                rate("orthrus_engine_wasted_tokens_total", "<E>"),
                rate("orthrus_engine_step_budget_tokens_total", "<E>"),
            ),
            "wasted",
        ),
    ),
    unit="percentunit",
)

# --- the boards -----------------------------------------------------------------------------------------------------

HEALTH = Board(
    "orthrus-health",
    "Orthrus: is it healthy?",
    "The first row is green: nothing to do. The rows below say what to look at when it is not.",
    (
        Row("At a glance", (
            Panel("Answered", "Requests a second that were answered.",
                  (Query(rate(ENDED, 'outcome="ok",<F>'), "answered"),), unit="reqps", kind="stat"),
            FAILED,
            Panel("Refused", "Share of requests that were not let in, for want of room or of their key's limits.",
                  (Query(share(rate(ENDED, 'outcome="overloaded",<F>'), rate(ENDED, "<F>")), "refused"),),
                  unit="percentunit", kind="stat", good=0.01, bad=0.1),
            Panel("Replicas", "Engine replicas that run.",
                  (Query("max by (arm) (orthrus_front_replicas{<A>})", "running {{arm}}"),), kind="stat", good=1, bad=0),
            Panel("Out", "Replicas in quarantine, and those that did not answer the last scrape.",
                  (Query("max(orthrus_front_quarantined_replicas{<A>})", "in quarantine"),
                   Query("sum(orthrus_front_silent_replicas{<A>})", "silent")), kind="stat", good=0, bad=1),
        )),
        Row("What clients see", (
            Panel("Requests by outcome", "How requests ended, a second.",
                  (Query(rate(ENDED, "<F>", "outcome"), "{{outcome}}"),), unit="reqps", stacked=True),
            Panel("Whole answer", "From the arrival of a request to the last byte of its answer.",
                  quantiles("orthrus_request_duration_seconds", "<F>", "kind", "{{kind}}"), unit="s"),
            Panel("First token", "From the arrival of a request to the first part of a streamed answer.",
                  quantiles("orthrus_time_to_first_token_seconds", 'kind="generate",<F>', "kind", "{{kind}}"), unit="s"),
            Panel("Time per output token", "Of finished generations, as vLLM counts it: decode time over the tokens after the first.",
                  quantiles("vllm:request_time_per_output_token_seconds", "<V>", "replica", "{{replica}}"), unit="s"),
        )),
        Row("Where the time goes", (
            OLDEST,
            Panel("In the Front",
                  "From arrival to the choice of a replica. More than milliseconds: the Front is short of CPU, or no replica is up.",
                  quantiles("orthrus_front_wait_seconds", "<F>", "kind", "{{kind}}"), unit="s"),
            Panel("In the engine, by stage", "99th percentile of the time that requests spend in each stage.",
                  (Query(quantile(0.99, "orthrus_request_stage_seconds", "<V>", "kind, stage"), "{{kind}} {{stage}}"),), unit="s"),
        )),
        Row("Trouble", (
            Panel("Refusals by reason", "Why requests were not let in: their key's own limits, a goal that would not be met, or no "
                  "known key. Many unknown keys: somebody guesses, or a key that clients use was taken off the list.",
                  (Query(rate("orthrus_refusals_total", "", "kind, reason"), "{{kind}} {{reason}}"),
                   Query(rate("orthrus_unauthorized_requests_total", "", "key"), "401: {{key}} key")), unit="reqps", stacked=True),
            Panel("Goals missed", "Share of admitted requests with a goal that missed it.",
                  (Query(share(rate("orthrus_goals_total", 'result="missed"', "kind, goal"),
                               rate("orthrus_goals_total", "", "kind, goal")), "{{kind}} {{goal}}"),),
                  unit="percentunit", good=0.01, bad=0.05),
            Panel("Second tries and quarantines", "Requests sent to another replica, and replicas put out, a second.",
                  (Query(rate("orthrus_retries_total", "<A>", "kind"), "tried again: {{kind}}"),
                   Query(rate("orthrus_quarantines_total", "<A>"), "put out"))),
        )),
    ),
)  # fmt: skip

BATCH = Board(
    "orthrus-batch",
    "Orthrus: what is in a batch?",
    "What steps hold, whether they are full, and how long they take.",
    (
        Row("What steps hold", (
            PARTS,
            Panel("Tokens of a mean step", "The same, for each step.",
                  (Query(f"{rate(STEP_TOKENS, '<E>', 'part')} / ignoring (part) group_left () clamp_min({rate(STEPS, '<E>')}, 1e-9)",
                         "{{part}}"),), stacked=True),
            Panel("Mixed steps", "Share of steps that held tokens of both kinds.",
                  (Query(share(rate("orthrus_engine_mixed_steps_total", "<E>", "replica"), rate(STEPS, "<E>", "replica")),
                         "{{replica}}"),), unit="percentunit"),
        )),
        Row("Whether they are full", (
            FILL,
            Panel("Waiting and running", "Requests in the running batch, and those that wait for a place.",
                  (Query("sum(orthrus_engine_running_requests{<E>})", "running"),
                   Query("sum(orthrus_engine_waiting_requests{<E>})", "waiting"))),
            Panel("Remaining tokens by kind", "What is left to compute for the requests that the engines hold.",
                  (Query("sum by (kind) (orthrus_engine_remaining_tokens{<E>})", "{{kind}}"),), stacked=True),
            Panel("Held pools", "Embeddings of which a part is computed: their running pools are in device memory.",
                  (Query("sum by (replica) (orthrus_engine_pooling_states{<E>})", "{{replica}}"),)),
        )),
        Row("How long they take", (
            Panel("Steps with decodes, against the target",
                  "Every running generation gets its next token at the end of such a step. The target is target_tpot_ms.",
                  (*quantiles("orthrus_engine_step_duration_seconds", 'decodes="with",<E>', "decodes", "{{decodes}} decodes"),
                   Query("min(orthrus_engine_step_target_seconds{<E>})", "target")), unit="s"),
            Panel("Late steps", "Share of all steps that held decodes and took longer than the target.",
                  (Query(share(rate("orthrus_engine_late_steps_total", "<E>", "replica"), rate(STEPS, "<E>", "replica")),
                         "{{replica}}"),), unit="percentunit", good=0.01, bad=0.1),
            Panel("Steps without decodes", "They may take the whole budget: nobody waits for their end.",
                  quantiles("orthrus_engine_step_duration_seconds", 'decodes="without",<E>', "decodes", "{{decodes}} decodes"),
                  unit="s"),
            OLDEST,
        )),
        Row("Memory and policy", (
            KV_USAGE,
            PREEMPTIONS,
            Panel("Policy in force", "Replicas by the policy of their steps.",
                  (Query("sum by (policy) (orthrus_engine_policy_info{<E>})", "{{policy}}"),), stacked=True),
        )),
    ),
)  # fmt: skip

ROUTER = Board(
    "orthrus-router",
    "Orthrus: is the router fair?",
    "Whether the replicas have the same left to do, and whether the Fronts know it.",
    (
        Row("Load", (
            IMBALANCE,
            Panel("Busiest and idlest replica", "Remaining tokens, as the Fronts count them.",
                  (Query("max(orthrus_front_replica_load_tokens{<A>})", "busiest"),
                   Query("min(orthrus_front_replica_load_tokens{<A>})", "idlest"))),
            Panel("Remaining tokens by replica, as the Fronts count them", "Of everybody's requests; the largest of all Fronts.",
                  (Query("max by (target) (orthrus_front_replica_load_tokens{<A>})", "{{target}}"),)),
            Panel("Remaining tokens by replica, as the engines count them", "The truth that the Fronts are told.",
                  (Query("sum by (replica) (orthrus_engine_remaining_tokens{<E>})", "{{replica}}"),)),
        )),
        Row("Decisions", (
            Panel("Requests sent to each replica", "A second, all Fronts together.",
                  (Query(rate("orthrus_routed_requests_total", "<A>", "target, kind"), "{{target}} {{kind}}"),), unit="reqps",
                  stacked=True),
            Panel("Replicas that get requests, and those that do not", "Running ones, and those among them that are in quarantine.",
                  (Query("max by (arm) (orthrus_front_replicas{<A>})", "running {{arm}}"),
                   Query("max by (arm) (orthrus_front_quarantined_replicas{<A>})", "in quarantine {{arm}}"))),
            Panel("Second tries", "Requests a second that were sent to another replica.",
                  (Query(rate("orthrus_retries_total", "<A>", "arm, kind"), "{{arm}} {{kind}}"),), unit="reqps"),
        )),
        Row("Handovers (disagg_pd)", (
            Panel("First halves", "What came of prompts that one replica computes for another: handed over, nothing to hand over, "
                  "refused, lost; and second halves that were lost and computed anew (retried).",
                  (Query(rate("orthrus_handovers_total", "<A>", "handed"), "{{handed}}"),), unit="reqps", stacked=True),
            Panel("Fetches", "Handovers that reached an engine; those that were refused or came too late are computed anew.",
                  (Query(rate("orthrus_engine_handovers_total", "<V>", "fetch"), "{{fetch}}"),), unit="reqps"),
            Panel("Prompts that were computed twice", "Share of handed-over prompts whose KV was not used: late, refused, or lost.",
                  (Query(share("(" + rate("orthrus_engine_handovers_total", 'fetch!="accepted"')
                               + " + " + rate("orthrus_handovers_total", 'handed="retried"') + ")",
                               rate("orthrus_handovers_total", 'handed="over"')), "computed twice"),),
                  unit="percentunit", good=0.01, bad=0.05),
        )),
        Row("What the ledgers know", (
            Panel("Charged and drift", "Tokens that the Fronts count for their open requests, and by how much the last reports moved that.",
                  (Query("sum(orthrus_front_charged_tokens{<F>})", "charged"),
                   Query("sum(orthrus_front_drift_tokens{<F>})", "drift"))),
            Panel("Drift over charge", "Above 1 for long: estimates far from what requests cost, or reports that come late.",
                  (Query(share("sum(orthrus_front_drift_tokens{<F>})", "sum(orthrus_front_charged_tokens{<F>})"), "drift"),),
                  good=0.5, bad=1),
            Panel("Time between two chunks of a stream", "At least, by replica: grows with its streams, and while Fronts answer late.",
                  (Query("max by (replica) (orthrus_stream_gap_seconds{<E>})", "{{replica}}"),), unit="s"),
            Panel("Open requests of each Front", "Uneven: the proxies in front of them do not spread connections.",
                  (Query("sum by (replica) (orthrus_front_in_flight_requests{<F>})", "{{replica}}"),)),
        )),
    ),
)  # fmt: skip

ARMS = Board(
    "orthrus-arms",
    "Orthrus: which arm is better?",
    "The arms of an A/B test beside each other. Differences may be chance: `orthrus-serve ab report` says how sure one can be.",
    (
        Row("What clients see", (
            Panel("Requests", "A second, by arm.", (Query(rate(ENDED, "<F>", "arm"), "{{arm}}"),), unit="reqps", stacked=True),
            Panel("Failed or refused", "Share of an arm's requests.",
                  (Query(share(rate(ENDED, 'outcome=~"failed|overloaded",<F>', "arm"), rate(ENDED, "<F>", "arm")), "{{arm}}"),),
                  unit="percentunit", good=0.01, bad=0.05),
            Panel("Copies of the mirror", "Requests copied to an arm, by what became of them; clients never see their answers.",
                  (Query(rate("orthrus_mirrored_requests_total", "<A>", "arm, copied"), "{{arm}} {{copied}}"),), unit="reqps",
                  stacked=True),
        )),
        Row("How long it takes", (
            Panel("Whole generation", "From arrival to the last byte.",
                  quantiles("orthrus_request_duration_seconds", 'kind="generate",<F>', "arm", "{{arm}}"), unit="s"),
            Panel("Embedding", "From arrival to the last byte.",
                  quantiles("orthrus_request_duration_seconds", 'kind="embed",<F>', "arm", "{{arm}}"), unit="s"),
            Panel("First token", "Of streamed answers.",
                  quantiles("orthrus_time_to_first_token_seconds", 'kind="generate",<F>', "arm", "{{arm}}"), unit="s"),
        )),
        Row("What it takes", (
            Panel("Tokens a second for each replica", "Computed by an arm's engines, over its running replicas.",
                  (Query(f"{rate(STEP_TOKENS, '<E>', 'arm')} / clamp_min(max by (arm) (orthrus_front_replicas{{<A>}}), 1)", "{{arm}}"),)),
            Panel("Late steps", "Share of an arm's steps that took longer than the target.",
                  (Query(share(rate("orthrus_engine_late_steps_total", "<E>", "arm"), rate(STEPS, "<E>", "arm")), "{{arm}}"),),
                  unit="percentunit"),
            Panel("Remaining tokens", "What is left to compute, by arm.",
                  (Query("sum by (arm) (orthrus_engine_remaining_tokens{<E>})", "{{arm}}"),)),
        )),
    ),
)  # fmt: skip

CAPACITY = Board(
    "orthrus-capacity",
    "Orthrus: how much more can it take?",
    "What is used of what there is. More replicas help when the first row is near its top.",
    (
        Row("Used", (
            Panel("Busy", "Share of the time that an engine had a step running.",
                  (Query("sum by (replica) (rate(orthrus_engine_busy_seconds_total{<E>}[<R>]))", "{{replica}}"),),
                  unit="percentunit", good=0.8, bad=0.98),
            KV_USAGE,
            FILL,
            Panel("Backlog", "How long the engines would take for what they hold, at their speed of the last minutes.",
                  (Query(share("sum(orthrus_engine_remaining_tokens{<E>})", rate(STEP_TOKENS, "<E>")), "backlog"),),
                  unit="s", good=10, bad=60),
        )),
        Row("Done", (
            PARTS,
            Panel("Model FLOP utilisation", "Operations that the model needed, over what one device can do at most.",
                  (Query(f"{rate('orthrus_engine_model_flops_total', '<E>', 'replica')} / max by (replica) "
                         "(orthrus_engine_peak_flops_per_second{<E>})", "{{replica}}"),), unit="percentunit"),
            Panel("Prefix cache hits", "Share of prompt tokens that were found in the prefix cache.",
                  (Query(share(rate("vllm:prefix_cache_hits_total", "<V>"), rate("vllm:prefix_cache_queries_total", "<V>")), "hits"),),
                  unit="percentunit"),
            PREEMPTIONS,
        )),
        Row("Adapters", (
            Panel("Requests by adapter", "A second.",
                  (Query(rate("orthrus_engine_adapter_requests_total", "<V>", "adapter"), "{{adapter}}"),), unit="reqps", stacked=True),
            Panel("Places for adapters", "Adapters of running requests, and how many a step can hold (max_loras).",
                  (Query("max by (replica) (orthrus_engine_used_adapters{<E>})", "in use {{replica}}"),
                   Query("max by (replica) (orthrus_engine_adapter_places{<E>})", "places {{replica}}"))),
            Panel("Waits for a place", "How often a second a request was passed over since no place was free for its adapter.",
                  (Query(rate("orthrus_engine_adapter_waits_total", "<V>", "replica"), "{{replica}}"),)),
        )),
    ),
)  # fmt: skip

BOARDS = (HEALTH, BATCH, ROUTER, ARMS, CAPACITY)
