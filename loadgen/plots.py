# pyright: reportUnknownMemberType=false
# (matplotlib leaves the type of its `**kwargs` open, in every function)
"""The pictures of a report, as PNG bytes. Each answers one question, and says it in its title."""

import io
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from loadgen.compare import CompareReport, Ratio
from loadgen.intervals import Estimate, mean_of
from loadgen.records import Kind
from loadgen.summary import RunReport, StageSummary
from loadgen.wording import judgement, number

KIND_COLOURS: dict[Kind, str] = {"embed": "#2a6fbb", "generate": "#e07b28"}
TARGET_COLOURS = ("#7a7a7a", "#1b8a5a", "#b8336a", "#5b4bb7", "#c9a227")
VERDICT_COLOURS = {"better": "#1b8a5a", "worse": "#c0392b", "no difference shown": "#9a9a9a"}
DPI = 130
MAX_STAGES = 12
FOREST = (
    "sessions/s", "requests/s, both kinds", "embed requests/s", "generate requests/s", "session E2E p99", "embed E2E p99",
    "generate E2E p99", "generate TTFT p99", "generate TPOT p99", "time of the stage",
)  # fmt: skip


def run_pictures(report: RunReport) -> dict[str, bytes]:
    """By name, without the ending."""
    pictures = {"timeline": _timeline(report), "latency": _latency_of_run(report)}
    if len(report.stages) > 1:
        pictures = {"stages": _stages(report.stages), **pictures}
    return pictures


def compare_pictures(report: CompareReport) -> dict[str, bytes]:
    """By name, without the ending."""
    return {"verdict": _forest(report), "rates": _rates(report), "latency": _latency_of_targets(report)}


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    axes: list[Axes] = list(grid.ravel())
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(visible=True, alpha=0.25)
    return figure, axes


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _timeline(report: RunReport) -> bytes:
    """Answers per second over the run, the measured windows shaded."""
    figure, [ax] = _figure(10, 3.4)
    zero_s = min((stage.started_s for stage in report.stages), default=0.0)
    span_s = max((end for series in report.series for end in series.ended_s), default=zero_s + 1.0) - zero_s
    width_s = max(span_s / 60, 1e-3)
    bins = np.arange(0.0, span_s + 2 * width_s, width_s)
    for kind, colour in KIND_COLOURS.items():
        counts = np.zeros(len(bins) - 1)
        for series in (one for one in report.series if one.kind == kind):
            summary = next(stage for stage in report.stages if stage.name == series.stage).kind(kind)
            found, _ = np.histogram(np.array(series.ended_s) - zero_s, bins=bins)
            # Series are thinned: scale back to all requests of the stage.
            counts += found * _thinning(summary.measured if summary else 0, len(series.ended_s))
        if counts.any():
            ax.step(bins[:-1], counts / width_s, where="post", color=colour, label=kind, linewidth=1.6)
    for stage in report.stages:
        ax.axvspan(stage.window_begin_s - zero_s, stage.window_end_s - zero_s, color="#000000", alpha=0.05, linewidth=0)
    ax.set_title("Answers per second over the run (measured windows shaded)", loc="left")
    ax.set_xlabel("seconds")
    ax.set_ylim(bottom=0)
    if report.series:
        ax.legend(frameon=False, loc="upper right")
    return _png(figure)


def _thinning(measured: int, shown: int) -> float:
    return max(round(measured / shown), 1) if shown else 1.0


def _latency_of_run(report: RunReport) -> bytes:
    """Distribution of latencies per kind; one line per stage."""
    figure, axes = _figure(10, 3.8, columns=2)
    for ax, kind in zip(axes, KIND_COLOURS, strict=True):
        chosen = [series for series in report.series if series.kind == kind]
        for place, series in enumerate(chosen[:MAX_STAGES]):
            shade = 0.35 + 0.65 * (place + 1) / len(chosen)
            _cumulative(ax, series.e2e_s, KIND_COLOURS[kind], series.stage if len(chosen) > 1 else "E2E", alpha=shade)
            if kind == "generate" and series.ttft_s and len(chosen) == 1:
                _cumulative(ax, series.ttft_s, "#8c564b", "TTFT")
        _finish_cumulative(ax, f"{kind}: share of requests answered within …", empty=not chosen)
    return _png(figure)


def _latency_of_targets(report: CompareReport) -> bytes:
    """E2E of each target in the last round, all stages together."""
    figure, axes = _figure(10, 3.8, columns=2)
    colours = dict(zip(report.targets, cycle(TARGET_COLOURS), strict=False))
    for ax, kind in zip(axes, KIND_COLOURS, strict=True):
        empty = True
        for target in report.targets:
            last = report.runs_of(target)[-1]
            values = [value for series in last.series if series.kind == kind for value in series.e2e_s]
            if values:
                empty = False
                _cumulative(ax, values, colours[target], target)
        _finish_cumulative(ax, f"{kind} E2E: further left is better", empty=empty)
    return _png(figure)


def _cumulative(ax: Axes, values: Sequence[float], colour: str, label: str, alpha: float = 1.0) -> None:
    ordered = np.sort(np.array(values))
    shares = np.arange(1, len(ordered) + 1) / len(ordered)
    # A staircase from nought: also right where there are only a few answers.
    ax.step([ordered[0], *ordered], [0.0, *shares], where="post", color=colour, label=label, alpha=alpha)


def _finish_cumulative(ax: Axes, title: str, *, empty: bool) -> None:
    ax.set_title(title, loc="left", fontsize=10)
    if empty:
        ax.text(0.5, 0.5, "none sent", transform=ax.transAxes, ha="center", color="#888888")
        ax.set_xticks([])
        return
    ax.set_xlabel("seconds")
    ax.set_xlim(left=0)
    ax.set_ylim(0, 1.01)
    for share in (0.5, 0.99):
        ax.axhline(share, color="#000000", alpha=0.25, linewidth=0.8, linestyle=":")
    ax.yaxis.set_major_formatter(FuncFormatter(_as_percent))
    ax.legend(frameon=False, fontsize=8, loc="lower right")


def _as_percent(value: float, place: int) -> str:
    del place
    return f"{value:.0%}"


def _stages(stages: Sequence[StageSummary]) -> bytes:
    """Rate and slowest percent of every stage of a run."""
    figure, axes = _figure(10, 0.9 + 0.55 * len(stages), columns=2)
    places = np.arange(len(stages))
    for offset, (kind, colour) in zip((-0.2, 0.2), KIND_COLOURS.items(), strict=True):
        summaries = [stage.kind(kind) for stage in stages]
        rates = [0.0 if summary is None else summary.rate.value for summary in summaries]
        p99s = [0.0 if summary is None or summary.e2e is None else summary.e2e.p99.value for summary in summaries]
        for ax, values in zip(axes, (rates, p99s), strict=True):
            bars = ax.barh(places + offset, values, height=0.36, color=colour, label=kind)
            ax.bar_label(bars, labels=[number(value) if value else "" for value in values], fontsize=8, padding=2)
    for ax, title in zip(axes, ("requests per second", "E2E p99, seconds"), strict=True):
        ax.set_yticks(places, [stage.name for stage in stages] if ax is axes[0] else [""] * len(stages))
        ax.invert_yaxis()
        ax.set_title(title, loc="left", fontsize=10)
        ax.margins(x=0.15)
    axes[0].legend(frameon=False, fontsize=8)
    return _png(figure)


def _rates(report: CompareReport) -> bytes:
    """Requests per second of each target, embeddings and generations stacked."""
    stages = report.runs_of(report.baseline)[0].stages
    figure, axes = _figure(10, 0.9 + 0.5 * len(report.targets) * len(stages), rows=len(stages))
    for place, (ax, stage) in enumerate(zip(axes, stages, strict=True)):
        left = np.zeros(len(report.targets))
        for kind, colour in KIND_COLOURS.items():
            means = [_mean_rate(report, target, place, kind) for target in report.targets]
            values = np.array(means)
            bars = ax.barh(report.targets, values, left=left, color=colour, label=kind)
            labels = [number(value) if value else "" for value in values]
            ax.bar_label(bars, labels=labels, label_type="center", color="white", fontsize=9)
            left += values
        totals = [_mean_total(report, target, place) for target in report.targets]
        errors = [0.0 if total.high is None else total.high - total.value for total in totals]
        ax.errorbar(left, report.targets, xerr=errors, fmt="none", ecolor="#333333", capsize=4)
        ax.invert_yaxis()
        ax.set_title(f"{stage.name}: requests per second, mean of {report.rounds} rounds", loc="left", fontsize=10)
        ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _png(figure)


def _mean_rate(report: CompareReport, target: str, place: int, kind: Kind) -> float:
    found = [one.stages[place].kind(kind) for one in report.runs_of(target) if place < len(one.stages)]
    rates = [summary.rate.value for summary in found if summary is not None]
    return sum(rates) / len(rates) if rates else 0.0


def _mean_total(report: CompareReport, target: str, place: int) -> Estimate:
    return mean_of([one.stages[place].rate.value for one in report.runs_of(target) if place < len(one.stages)])


def _forest(report: CompareReport) -> bytes:
    """Every measure as a factor, turned so that right is better; the load-balance bound as a dashed mark."""
    rows = [ratio for ratio in report.ratios if ratio.measure in FOREST]
    figure, [ax] = _figure(10, 1.4 + 0.34 * len(rows))
    labels: list[str] = []
    for place, ratio in enumerate(rows):
        value, low, high = _improvement(ratio)
        colour = VERDICT_COLOURS[judgement(ratio)]
        if low is not None and high is not None:
            ax.plot([low, high], [place, place], color=colour, linewidth=2.5, solid_capstyle="butt")
        ax.plot([value], [place], marker="o", color=colour, markersize=7)
        ax.annotate(
            f"{number(value)}×", (value, place), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8
        )
        labels.append(_row_label(report, ratio))
        bound = next((one.bound for one in report.bounds if one.stage == ratio.stage), None)
        if bound is not None and ratio.measure == "requests/s, both kinds":
            ax.plot([bound, bound], [place - 0.32, place + 0.32], color="#000000", linewidth=1.5, linestyle="--")
            ax.annotate("bound", (bound, place + 0.3), xytext=(3, -3), textcoords="offset points", fontsize=7)
    ax.axvline(1.0, color="#000000", linewidth=1)
    ax.set_yticks(range(len(rows)), labels, fontsize=8)
    ax.set_ylim(len(rows) - 0.4, -0.8)
    ax.set_xscale("log")
    ax.margins(x=0.12)
    ax.xaxis.set_major_formatter(FuncFormatter(_as_factor))
    ax.xaxis.set_minor_formatter(FuncFormatter(_as_factor) if _is_narrow(ax) else NullFormatter())
    others = " / ".join(report.targets[1:])
    ax.set_title(f"{others} against {report.baseline}: right of 1 is better (95 % intervals)", loc="left")
    return _png(figure)


def _row_label(report: CompareReport, ratio: Ratio) -> str:
    many_targets = len(report.targets) > 2
    many_stages = len({one.stage for one in report.ratios}) > 1
    parts = [ratio.measure, *([ratio.target] if many_targets else []), *([ratio.stage] if many_stages else [])]
    return " · ".join(parts)


def _improvement(ratio: Ratio) -> tuple[float, float | None, float | None]:
    value, low, high = ratio.ratio.value, ratio.ratio.low, ratio.ratio.high
    if ratio.better == "higher":
        return value, low, high
    return 1 / value, None if high is None else 1 / high, None if low is None else 1 / low


def _is_narrow(ax: Axes) -> bool:
    left, right = ax.get_xlim()
    return right / left < 8


def _as_factor(value: float, place: int) -> str:
    del place
    return f"{value:.2g}×"
