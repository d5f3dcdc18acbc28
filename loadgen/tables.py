"""The result of a stage and of a comparison as tables for the terminal."""

from rich.table import Table

from loadgen.compare import CompareReport
from loadgen.summary import StageSummary
from loadgen.wording import estimate, judgement, measured, number, percent, percentiles, seconds


def stage_table(stage: StageSummary) -> Table:
    """One row per kind and latency."""
    window_s = stage.window_end_s - stage.window_begin_s
    table = Table(title=f"{stage.name} — measured for {window_s:.1f} s", title_justify="left")
    for column in ("", "req/s (95 %)", "ok", "errors", "latency", "p50", "p95", "p99"):
        table.add_column(column)
    for kind in stage.kinds:
        named = {"E2E": kind.e2e, "TTFT": kind.ttft, "TPOT": kind.tpot, "ITL": kind.itl}
        first = (kind.kind, estimate(kind.rate), str(kind.completed), str(kind.errors + kind.unfinished))
        for place, (name, distribution) in enumerate((n, d) for n, d in named.items() if d is not None):
            table.add_row(*(first if place == 0 else ("", "", "", "")), name, *percentiles(distribution))
        if all(distribution is None for distribution in named.values()):
            table.add_row(*first, "–", "–", "–", "–")
    sessions = stage.sessions
    if sessions is not None:
        failed = str(sessions.errors + sessions.unfinished)
        table.add_row(
            "sessions", estimate(sessions.rate), str(sessions.completed), failed, "E2E", *percentiles(sessions.e2e)
        )
        table.add_row("", "", "", "", "retrieval", *percentiles(sessions.retrieval))
    table.caption = _caption(stage)
    table.caption_justify = "left"
    return table


def _caption(stage: StageSummary) -> str:
    client, server = stage.client, stage.server
    parts = [
        f"in flight at the cut-off {stage.in_flight_at_cut_off}",
        f"event-loop lag p99 {seconds(client.loop_lag_p99_s)}",
        f"schedule lag p99 {seconds(client.schedule_lag_p99_s)}",
        f"prefix hits {percent(server.prefix_hit_ratio)}",
        f"step fill {percent(server.step_fill)}",
    ]
    sessions = stage.sessions
    if sessions is not None and sessions.recall_any_hop is not None:
        parts.append(f"recall {number(sessions.recall_any_hop.value)}")
    if sessions is not None and sessions.f1 is not None and sessions.exact_match is not None:
        parts.append(f"EM {number(sessions.exact_match.value)}, F1 {number(sessions.f1.value)}")
    return " · ".join(parts)


def compare_table(report: CompareReport) -> Table:
    """One row per measure."""
    table = Table(title=f"{report.rounds} rounds against {report.baseline}", title_justify="left")
    for column in ("stage", "measure", report.baseline, "target", "its value", "ratio (95 %)", "verdict"):
        table.add_column(column)
    colours = {"better": "green", "worse": "red", "no difference shown": "dim"}
    for ratio in report.ratios:
        word = judgement(ratio)
        table.add_row(
            ratio.stage,
            ratio.measure,
            measured(ratio, ratio.baseline),
            ratio.target,
            measured(ratio, ratio.value),
            estimate(ratio.ratio),
            f"[{colours[word]}]{word}[/]",
        )
    bounds = [f"{bound.stage}: load-balance bound {number(bound.bound)}" for bound in report.bounds]
    table.caption = " · ".join(bounds) or None
    return table
