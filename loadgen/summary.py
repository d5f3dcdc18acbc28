"""What a run amounts to: the values that reports show and the JSON file holds. Times in seconds, rates per second.

Only shapes. How each number is worked out is in `measures.py`, what it means in docs/loadgen.md.
"""

import msgspec

from loadgen.intervals import Estimate
from loadgen.records import Kind

SCHEMA = "loadgen-report-1"


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Of one latency: how many values, mean, percentiles, maximum."""

    count: int
    mean: Estimate
    p50: Estimate
    p90: Estimate
    p95: Estimate
    p99: Estimate
    max: float


class KindSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of requests in one stage.

    `completed` requests ended well inside the window and make the rates. `measured` requests were sent inside it and make the
    latencies. `errors` and `unfinished` count over the whole stage.
    """

    kind: Kind
    completed: int
    measured: int
    errors: int
    unfinished: int
    error_examples: dict[str, int]
    rate: Estimate
    prompt_tokens_per_s: Estimate
    output_tokens_per_s: Estimate
    mean_prompt_tokens: float | None
    mean_output_tokens: float | None
    short_answers: int
    e2e: Distribution | None
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    tokens_per_event: float | None
    goodput: Estimate | None
    goodput_ratio: float | None


class SessionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Iter-RetGen sessions of one stage. Quality is a mean over the sessions whose questions allow it, with their number."""

    completed: int
    errors: int
    unfinished: int
    rate: Estimate
    e2e: Distribution | None
    mean_hops: float
    retrieval: Distribution | None
    embed_s: Estimate | None
    generate_s: Estimate | None
    goodput: Estimate | None
    scored_answers: int
    exact_match: Estimate | None
    f1: Estimate | None
    contains_answer: Estimate | None
    scored_retrievals: int
    recall_first_hop: Estimate | None
    recall_any_hop: Estimate | None
    distinct_questions: int


class ClientSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How the load generator itself fared. `bottlenecks` is empty when it kept up; each entry says what did not."""

    bottlenecks: list[str]
    schedule_lag_p50_s: float | None
    schedule_lag_p99_s: float | None
    loop_lag_p99_s: float | None
    turnaround_p99_s: float | None
    max_cpu_ratio: float
    peak_in_flight: int


class ServerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """From the server's metrics over the window; None where it does not publish them."""

    prefix_hit_ratio: float | None = None
    step_fill: float | None = None
    mixed_step_ratio: float | None = None
    mean_running: float | None = None
    mean_waiting: float | None = None


class StageSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One stage. The window is what was measured; `elapsed_s` goes from the first request to the last answer."""

    name: str
    started_s: float
    window_begin_s: float
    window_end_s: float
    elapsed_s: float
    stop_reason: str
    in_flight_at_cut_off: int
    rate: Estimate
    embed_share: float | None
    kinds: list[KindSummary]
    sessions: SessionSummary | None
    client: ClientSummary
    server: ServerSummary
    warnings: list[str]

    def kind(self, kind: Kind) -> KindSummary | None:
        """The summary of one kind, if it occurred."""
        return next((summary for summary in self.kinds if summary.kind == kind), None)


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """For pictures: per stage and kind, end times and latencies of the successes (thinned to a few thousand points)."""

    stage: str
    kind: Kind
    sent_s: list[float]
    ended_s: list[float]
    e2e_s: list[float]
    ttft_s: list[float]


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Where a report comes from."""

    started_at: str
    loadgen_version: str
    git_commit: str
    python: str
    platform: str
    packages: dict[str, str]
    command: str
    seed: int
    processes: int
    server: dict[str, str]


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run against one target."""

    schema: str
    target: str
    workload: str
    prompts: str
    provenance: Provenance
    settings: dict[str, object]
    stages: list[StageSummary]
    series: list[Series]

    @property
    def bottlenecks(self) -> list[str]:
        """Why the client's numbers cannot be trusted; empty if they can."""
        return [f"{stage.name}: {line}" for stage in self.stages for line in stage.client.bottlenecks]
