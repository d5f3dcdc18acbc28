"""Works out a stage's numbers from its records. Pure: everything comes in as arguments, the bootstrap's randomness too.

Rates count the requests that ended well inside the window; latencies are those of the requests sent inside it, however late
they ended. An error is never in either. See docs/loadgen.md for each definition.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.client_verdict import ClientLimits, judge_client
from loadgen.doubts import doubts_about
from loadgen.intervals import Estimate, mean_by_blocks, mean_of, quantiles, rate
from loadgen.records import Kind, Record, SessionRecord, StageResult
from loadgen.stages import Stage
from loadgen.summary import Distribution, KindSummary, ServerSummary, SessionSummary, StageSummary

PERCENTILES = (0.5, 0.9, 0.95, 0.99)
MAX_ERROR_EXAMPLES = 8
OPEN_LOOP_FIRST = 0.05  # of an open loop's requests count as its first burst


@dataclass(frozen=True)
class Goals:
    """Latency goals in seconds; None is no goal."""

    embed_e2e_s: float | None = None
    generate_ttft_s: float | None = None
    generate_tpot_s: float | None = None
    generate_e2e_s: float | None = None
    session_e2e_s: float | None = None

    def has(self, kind: Kind) -> bool:
        """Whether there is any goal for this kind."""
        if kind == "embed":
            return self.embed_e2e_s is not None
        return any(goal is not None for goal in (self.generate_ttft_s, self.generate_tpot_s, self.generate_e2e_s))

    def met_by(self, record: Record) -> bool:
        """Whether a success met every goal of its kind; a latency that could not be measured meets no goal."""
        if not record.ok:
            return False
        if record.kind == "embed":
            return _within(record.e2e_s, self.embed_e2e_s)
        one_token = record.output_tokens is not None and record.output_tokens < 2
        return (
            _within(record.ttft_s, self.generate_ttft_s)
            and (one_token or _within(record.tpot_s, self.generate_tpot_s))
            and _within(record.e2e_s, self.generate_e2e_s)
        )


@dataclass(frozen=True)
class Window:
    """What is measured: from `begin_s` to `end_s`."""

    begin_s: float
    end_s: float

    def holds(self, time_s: float) -> bool:
        """Whether a time lies in [begin, end)."""
        return self.begin_s <= time_s < self.end_s


def summarise(
    stage: Stage,
    results: Sequence[StageResult],
    goals: Goals,
    limits: ClientLimits,
    server_in: Callable[[Window], ServerSummary],
    rng: np.random.Generator,
) -> StageSummary:
    """The summary of a stage from what all workers sent."""
    records = sorted((record for result in results for record in result.records), key=lambda record: record.sent_s)
    sessions = sorted((s for result in results for s in result.sessions), key=lambda session: session.started_s)
    window = window_of(stage, results, records, sessions)
    kinds = [_kind(kind, records, window, goals, rng) for kind in ("embed", "generate") if _occurs(kind, records)]
    completed = sum(summary.completed for summary in kinds)
    embedded = sum(summary.completed for summary in kinds if summary.kind == "embed")
    ended_s = [record.ended_s for record in records if record.ok]
    client = judge_client([result.health for result in results], limits)
    server = server_in(window)
    session_summary = _sessions(sessions, window, goals, rng) if sessions else None
    return StageSummary(
        name=stage.name,
        started_s=min(result.started_s for result in results),
        window_begin_s=window.begin_s,
        window_end_s=window.end_s,
        elapsed_s=max(result.ended_s for result in results) - min(result.started_s for result in results),
        stop_reason=", ".join(sorted({result.stop_reason for result in results})),
        in_flight_at_cut_off=sum(result.in_flight_at_cut_off for result in results),
        rate=rate(ended_s, window.begin_s, window.end_s),
        embed_share=embedded / completed if completed else None,
        kinds=kinds,
        sessions=session_summary,
        client=client,
        server=server,
        warnings=doubts_about(stage.steady, (window.begin_s, window.end_s), records, server, session_summary),
    )


def window_of(
    stage: Stage, results: Sequence[StageResult], records: Sequence[Record], sessions: Sequence[SessionRecord]
) -> Window:
    """The measured part of a stage. `records` and `sessions` in the order of their starts."""
    started_s = min(result.started_s for result in results)
    cut_off_s = max(result.cut_off_s for result in results)
    if not stage.steady:
        last_s = max((record.ended_s for record in records), default=cut_off_s)
        # A window leaves out its end: the last answer belongs into this one.
        return Window(started_s, max(math.nextafter(last_s, math.inf), cut_off_s))
    if stage.warmup_s is not None:
        return Window(min(started_s + stage.warmup_s, cut_off_s), cut_off_s)
    ends_s = [session.ended_s for session in sessions] or [record.ended_s for record in records]
    first = ends_s[: stage.clients or max(round(len(ends_s) * OPEN_LOOP_FIRST), 1)]
    # Never more than half of the stage: a warning then says that the window is short.
    return Window(min(max(first, default=started_s), (started_s + cut_off_s) / 2), cut_off_s)


def distribution(values: Sequence[float], rng: np.random.Generator) -> Distribution | None:
    """Of values in the order of their times; None of no values."""
    if not values:
        return None
    p50, p90, p95, p99 = quantiles(values, PERCENTILES, rng)
    return Distribution(
        count=len(values), mean=mean_by_blocks(values, rng), p50=p50, p90=p90, p95=p95, p99=p99, max=max(values)
    )


def _kind(kind: Kind, records: Sequence[Record], window: Window, goals: Goals, rng: np.random.Generator) -> KindSummary:
    mine = [record for record in records if record.kind == kind]
    ended = [record for record in mine if record.ok and window.holds(record.ended_s)]
    sent = [record for record in mine if record.ok and window.holds(record.sent_s)]
    ends_s = [record.ended_s for record in ended]
    good = [record.ended_s for record in ended if goals.met_by(record)]
    asked = [record for record in sent if record.asked_output_tokens is not None and record.output_tokens is not None]
    errors = [record.error for record in mine if record.error is not None and not record.unfinished]
    judged = [record for record in mine if window.holds(record.sent_s) and not record.unfinished]

    def per_s(weights: list[float]) -> Estimate:
        return rate(ends_s, window.begin_s, window.end_s, weights)

    return KindSummary(
        kind=kind,
        completed=len(ended),
        measured=len(sent),
        errors=len(errors),
        unfinished=sum(record.unfinished for record in mine),
        error_examples=dict(Counter(errors).most_common(MAX_ERROR_EXAMPLES)),
        rate=rate(ends_s, window.begin_s, window.end_s),
        prompt_tokens_per_s=per_s([float(record.prompt_tokens or 0) for record in ended]),
        output_tokens_per_s=per_s([float(record.output_tokens or 0) for record in ended]),
        mean_prompt_tokens=_mean(record.prompt_tokens for record in sent),
        mean_output_tokens=_mean(record.output_tokens for record in sent),
        short_answers=sum((r.output_tokens or 0) < (r.asked_output_tokens or 0) for r in asked),
        e2e=distribution([record.e2e_s for record in sent], rng),
        ttft=distribution([record.ttft_s for record in sent if record.ttft_s is not None], rng),
        tpot=distribution([record.tpot_s for record in sent if record.tpot_s is not None], rng),
        itl=distribution([gap for record in sent for gap in record.gaps_s], rng),
        tokens_per_event=_tokens_per_event(sent),
        goodput=rate(good, window.begin_s, window.end_s) if goals.has(kind) else None,
        goodput_ratio=_mean(goals.met_by(record) for record in judged) if goals.has(kind) else None,
    )


def _sessions(
    sessions: Sequence[SessionRecord], window: Window, goals: Goals, rng: np.random.Generator
) -> SessionSummary:
    ended_s = [session.ended_s for session in sessions if session.ok and window.holds(session.ended_s)]
    sent = [session for session in sessions if session.ok and window.holds(session.started_s)]
    goal_s = goals.session_e2e_s
    good_s = [s.ended_s for s in sessions if s.ok and window.holds(s.ended_s) and _within(s.e2e_s, goal_s)]
    answers = [session for session in sent if session.f1 is not None]
    retrievals = [session for session in sent if session.recall_any_hop is not None]
    return SessionSummary(
        completed=len(ended_s),
        errors=sum(not session.ok and not session.unfinished for session in sessions),
        unfinished=sum(session.unfinished for session in sessions),
        rate=rate(ended_s, window.begin_s, window.end_s),
        e2e=distribution([session.e2e_s for session in sent], rng),
        mean_hops=_mean(session.hops for session in sent) or 0.0,
        retrieval=distribution([time_s for session in sent for time_s in session.retrieval_s], rng),
        embed_s=_estimate(session.embed_s for session in sent),
        generate_s=_estimate(session.generate_s for session in sent),
        goodput=None if goal_s is None else rate(good_s, window.begin_s, window.end_s),
        scored_answers=len(answers),
        exact_match=_share(session.exact_match for session in answers),
        f1=_share(session.f1 for session in answers),
        contains_answer=_share(session.contains_answer for session in answers),
        scored_retrievals=len(retrievals),
        recall_first_hop=_share(session.recall_first_hop for session in retrievals),
        recall_any_hop=_share(session.recall_any_hop for session in retrievals),
        distinct_questions=len({session.question_id for session in sessions}),
    )


def _tokens_per_event(records: Sequence[Record]) -> float | None:
    """Output tokens per content event: above 1, a gap is the time between events and not between tokens."""
    streamed = [record for record in records if record.first_token_s is not None and record.output_tokens is not None]
    events = sum(len(record.gaps_s) + 1 for record in streamed)
    return sum(record.output_tokens or 0 for record in streamed) / events if events else None


def _occurs(kind: Kind, records: Sequence[Record]) -> bool:
    return any(record.kind == kind for record in records)


def _within(value_s: float | None, goal_s: float | None) -> bool:
    return goal_s is None or (value_s is not None and value_s <= goal_s)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _share(values: Iterable[float | None]) -> Estimate | None:
    """A mean of values from 0 to 1, whose interval does not leave that range either."""
    found = _estimate(values)
    if found is None or found.low is None or found.high is None:
        return found
    return Estimate(found.value, max(found.low, 0.0), min(found.high, 1.0))


def _estimate(values: Iterable[float | None]) -> Estimate | None:
    known = [value for value in values if value is not None]
    return mean_of(known) if known else None
