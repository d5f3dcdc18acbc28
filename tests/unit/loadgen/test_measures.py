"""Numbers from records made by hand."""

import numpy as np
import pytest

from loadgen.client_verdict import judge_client
from loadgen.measures import Goals, Window, summarise
from loadgen.records import ClientHealth, Record, StageResult
from loadgen.stages import Stage
from loadgen.summary import ServerSummary, StageSummary
from tests.unit.loadgen.builders import LIMITS, record, result, session, stage


def summary_of(
    what: Stage, *results: StageResult, goals: Goals | None = None, server: ServerSummary | None = None
) -> StageSummary:
    def server_in(window: Window) -> ServerSummary:
        return server or ServerSummary()

    return summarise(what, results, goals or Goals(), LIMITS, server_in, np.random.default_rng(0))


def generation(sent_s: float, ttft_s: float, gap_s: float, tokens: int, **fields: object) -> Record:
    last_s = sent_s + ttft_s + gap_s * (tokens - 1)
    return record(
        sent_s,
        last_s + 0.5,
        kind="generate",
        first_token_s=sent_s + ttft_s,
        last_token_s=last_s,
        gaps_s=[gap_s] * (tokens - 1),
        output_tokens=tokens,
        prompt_tokens=100,
        **fields,
    )


def test_a_rate_counts_what_ended_inside_the_window_and_latency_what_was_sent_inside() -> None:
    records = [
        record(0.0, 5.0, prompt_tokens=10),  # sent before the window, ended inside: a rate, no latency
        record(11.0, 13.0, prompt_tokens=10),  # both
        record(19.0, 29.0, prompt_tokens=10),  # ended after the cut-off: a latency, no rate
        record(1.0, 2.0, prompt_tokens=10),  # warm-up: neither
    ]
    summary = summary_of(stage(warmup_s=4.0), result(records, cut_off_s=20.0))
    embed = summary.kind("embed")
    assert embed is not None
    assert (summary.window_begin_s, summary.window_end_s) == (4.0, 20.0)
    assert (embed.completed, embed.measured) == (2, 2)
    assert embed.rate.value == pytest.approx(2 / 16)
    assert embed.prompt_tokens_per_s.value == pytest.approx(20 / 16)
    assert embed.e2e is not None
    assert embed.e2e.mean.value == pytest.approx((2.0 + 10.0) / 2)
    assert embed.e2e.max == 10.0


def test_ttft_itl_and_tpot_by_hand() -> None:
    records = [generation(0.0, 1.0, 0.5, 5), generation(0.0, 3.0, 0.25, 5)]
    generate = summary_of(stage(), result(records, cut_off_s=100.0)).kind("generate")
    assert generate is not None
    assert generate.ttft is not None
    assert generate.ttft.p50.value == pytest.approx(2.0)
    assert generate.itl is not None
    assert (generate.itl.count, generate.itl.mean.value) == (8, pytest.approx(0.375))
    assert generate.tpot is not None
    assert generate.tpot.max == pytest.approx(0.5)  # (last token - first token) ÷ 4
    assert generate.output_tokens_per_s.value == pytest.approx(10 / 100)
    assert generate.tokens_per_event == pytest.approx(1.0)


def test_errors_are_in_no_rate_and_no_latency_and_are_told_apart_from_unfinished_requests() -> None:
    records = [
        record(1.0, 2.0),
        record(1.0, 90.0, error="HTTP 500: x"),
        record(1.0, 90.0, error="HTTP 500: x"),
        record(1.0, 99.0, error="unfinished"),
    ]
    summary = summary_of(stage(), result(records, cut_off_s=100.0))
    embed = summary.kind("embed")
    assert embed is not None
    assert (embed.completed, embed.errors, embed.unfinished) == (1, 2, 1)
    assert embed.error_examples == {"HTTP 500: x": 2}
    assert embed.e2e is not None
    assert embed.e2e.max == 1.0
    assert "2 of 4 requests failed" in summary.warnings[0]
    assert "1 requests were still open" in summary.warnings[1]


def test_goodput_counts_requests_that_met_every_goal_of_their_kind() -> None:
    goals = Goals(embed_e2e_s=1.5, generate_ttft_s=1.0, generate_tpot_s=0.3)
    records = [
        record(0.0, 1.0),  # met
        record(0.0, 2.0),  # too slow
        record(0.0, 1.0, error="x"),  # an error meets no goal
        generation(0.0, 0.9, 0.2, 3),  # met
        generation(0.0, 0.9, 0.4, 3),  # TPOT missed
        generation(0.0, 1.1, 0.2, 3),  # TTFT missed
        generation(0.0, 0.5, 0.0, 1),  # one token: there is no TPOT to miss
    ]
    summary = summary_of(stage(), result(records, cut_off_s=10.0), goals=goals)
    embed, generate = summary.kind("embed"), summary.kind("generate")
    assert embed is not None
    assert generate is not None
    assert (embed.goodput_ratio, generate.goodput_ratio) == (pytest.approx(1 / 3), pytest.approx(0.5))
    assert embed.goodput is not None
    assert embed.goodput.value == pytest.approx(0.1)


def test_a_whole_stage_is_measured_to_its_last_answer() -> None:
    records = [record(0.0, 4.0), record(0.1, 8.0)]
    summary = summary_of(stage(steady=False), result(records, cut_off_s=0.1))
    assert summary.rate.value == pytest.approx(2 / 8)
    assert summary.elapsed_s == pytest.approx(8.0)


def test_an_automatic_warm_up_ends_when_the_first_burst_has_been_answered() -> None:
    records = [record(0.0, 3.0), record(0.0, 7.0), record(3.0, 4.0), record(7.0, 9.0)]
    summary = summary_of(stage(warmup_s=None), result(records, cut_off_s=60.0))  # two clients
    assert summary.window_begin_s == 7.0


def test_an_automatic_warm_up_never_takes_more_than_half_and_a_short_window_is_named() -> None:
    summary = summary_of(stage(warmup_s=None), result([record(0.0, 9.0), record(0.0, 9.5)], cut_off_s=10.0))
    assert summary.window_begin_s == 5.0
    assert any("less than 3 times the slowest request" in warning for warning in summary.warnings)


def test_a_rate_that_drifts_is_named() -> None:
    records = [record(t / 20, t / 20 + 0.01) for t in range(200)] + [
        record(10 + t / 5, 10.01 + t / 5) for t in range(50)
    ]
    summary = summary_of(stage(), result(records, cut_off_s=20.0))
    assert any("not steady" in warning for warning in summary.warnings)


def test_cache_hits_and_steps_that_were_not_full_are_named() -> None:
    server = ServerSummary(prefix_hit_ratio=0.3, step_fill=0.5)
    summary = summary_of(stage(), result([record(0.0, 1.0)], cut_off_s=10.0), server=server)
    assert any("30.0% of the prompt tokens came from the server's prefix cache" in line for line in summary.warnings)
    assert any("steps were 50% full" in line for line in summary.warnings)


def test_lengths_that_were_not_what_was_asked_are_named() -> None:
    records = [generation(0.0, 1.0, 0.1, 3, asked_output_tokens=5, asked_prompt_tokens=200)]
    warnings = summary_of(stage(), result(records, cut_off_s=10.0)).warnings
    assert any("100.0 tokens on average, 200.0 were asked for" in line for line in warnings)
    assert any("1 of 1 answers were shorter" in line for line in warnings)


def test_sessions_by_hand() -> None:
    sessions = [
        session(
            0.0, 4.0, retrieval_s=[0.1, 0.3], embed_s=1.0, generate_s=2.0, f1=0.5, exact_match=0.0, recall_any_hop=1.0
        ),
        session(0.0, 8.0, retrieval_s=[0.2], embed_s=3.0, generate_s=4.0, f1=1.0, exact_match=1.0, recall_any_hop=0.5),
        session(0.0, 5.0, error="hop 1, answer: HTTP 500"),
        session(0.0, 9.0, error="unfinished"),
    ]
    goals = Goals(session_e2e_s=5.0)
    found = summary_of(stage(), result([record(0.0, 1.0)], 10.0, sessions), goals=goals).sessions
    assert found is not None
    assert (found.completed, found.errors, found.unfinished) == (2, 1, 1)
    assert found.rate.value == pytest.approx(0.2)
    assert found.goodput is not None
    assert found.goodput.value == pytest.approx(0.1)
    assert found.e2e is not None
    assert found.e2e.p50.value == pytest.approx(6.0)
    assert found.retrieval is not None
    assert (found.retrieval.count, found.retrieval.mean.value) == (3, pytest.approx(0.2))
    assert found.f1 is not None
    assert (found.f1.value, found.scored_answers) == (0.75, 2)
    assert found.embed_s is not None
    assert found.embed_s.value == 2.0


@pytest.mark.parametrize(
    ("health", "word"),
    [
        (ClientHealth(worker=0, schedule_lag_s=[0.001] * 90 + [0.2] * 10), "schedule lag"),
        (ClientHealth(worker=0, loop_lag_s=[0.3] * 10), "event-loop lag"),
        (ClientHealth(worker=0, turnaround_s=[0.3] * 10), "turnaround"),
        (ClientHealth(worker=0, cpu_ratio=0.97), "more --processes"),
    ],
)
def test_a_client_that_could_not_keep_up_is_named_as_the_bottleneck(health: ClientHealth, word: str) -> None:
    fine = ClientHealth(worker=1, schedule_lag_s=[0.001] * 10, loop_lag_s=[0.001], cpu_ratio=0.2)
    verdict = judge_client([fine, health], LIMITS)
    assert len(verdict.bottlenecks) == 1
    assert word in verdict.bottlenecks[0]
    assert judge_client([fine], LIMITS).bottlenecks == []
