"""How numbers and verdicts are written, the same in the terminal and in the HTML report. Pure."""

from loadgen.compare import CompareReport, Ratio
from loadgen.intervals import Estimate
from loadgen.summary import Distribution, RunReport, StageSummary

BOTTLENECK = "THE CLIENT WAS THE BOTTLENECK: these numbers say more about the load generator than about the server."


def number(value: float) -> str:
    """Three significant digits, whole numbers from 100 on."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def estimate(value: Estimate | None) -> str:
    """`12.3 (11.8–12.9)`."""
    if value is None:
        return "–"
    if value.low is None or value.high is None:
        return number(value.value)
    return f"{number(value.value)} ({number(value.low)}–{number(value.high)})"


def seconds(value: float | None) -> str:
    """`8.21 ms` below a second, `1.23 s` above."""
    if value is None:
        return "–"
    return f"{number(value * 1000)} ms" if abs(value) < 1 else f"{number(value)} s"


def seconds_estimate(value: Estimate | None) -> str:
    """A time with its interval, both in one unit."""
    if value is None:
        return "–"
    if value.low is None or value.high is None:
        return seconds(value.value)
    unit, scale = ("ms", 1000.0) if abs(value.value) < 1 else ("s", 1.0)
    return f"{number(value.value * scale)} ({number(value.low * scale)}–{number(value.high * scale)}) {unit}"


def percentiles(distribution: Distribution | None) -> tuple[str, str, str]:
    """p50, p95 and p99 with intervals."""
    if distribution is None:
        return "–", "–", "–"
    return (
        seconds_estimate(distribution.p50),
        seconds_estimate(distribution.p95),
        seconds_estimate(distribution.p99),
    )


def percent(value: float | None) -> str:
    """`12.3 %`, or what stands for an unknown."""
    return "not published" if value is None else f"{value:.1%}".replace("%", " %")


def run_headlines(report: RunReport) -> list[str]:
    """What a reader should know first, one sentence per stage."""
    return [_stage_headline(stage) for stage in report.stages]


def _stage_headline(stage: StageSummary) -> str:
    parts: list[str] = []
    if stage.sessions is not None:
        p99 = stage.sessions.e2e.p99.value if stage.sessions.e2e else None
        parts.append(f"{number(stage.sessions.rate.value)} sessions/s, E2E p99 {seconds(p99)}")
    for kind in stage.kinds:
        p99 = kind.e2e.p99.value if kind.e2e else None
        parts.append(f"{kind.kind} {number(kind.rate.value)}/s, E2E p99 {seconds(p99)}")
    return f"{stage.name}: {'; '.join(parts) or 'nothing was answered'}"


def compare_headlines(report: CompareReport) -> list[str]:
    """The verdicts: throughput first, then the slowest percent, per stage and target."""
    wanted = ("sessions/s", "requests/s, both kinds", "session E2E p99", "embed E2E p99", "generate E2E p99")
    lines: list[str] = []
    for name in report.targets[1:]:
        for stage in dict.fromkeys(ratio.stage for ratio in report.ratios):
            chosen = [r for r in report.ratios if r.stage == stage and r.target == name and r.measure in wanted]
            chosen.sort(key=lambda ratio: wanted.index(ratio.measure))
            lines += [f"{stage}: {verdict(ratio, report.baseline)}" for ratio in chosen]
    return lines


def verdict(ratio: Ratio, baseline: str) -> str:
    """`requests/s: b 12.1, a 8.5, ratio 1.42 (1.38–1.46): better` — or says that the data cannot tell."""
    return (
        f"{ratio.measure}: {ratio.target} {measured(ratio, ratio.value)}, {baseline} {measured(ratio, ratio.baseline)}, "
        f"ratio {estimate(ratio.ratio)}: {judgement(ratio)}"
    )


def measured(ratio: Ratio, value: float) -> str:
    """A value of the ratio's measure, with its unit if that is a time."""
    is_time = ratio.better == "lower"  # all that should be low are times
    return seconds(value) if is_time else number(value)


def judgement(ratio: Ratio) -> str:
    """`better`, `worse`, or `no difference shown` where the interval holds 1 or is missing."""
    low, high = ratio.ratio.low, ratio.ratio.high
    if low is None or high is None or low <= 1 <= high:
        return "no difference shown"
    above = ratio.ratio.value > 1
    return "better" if above == (ratio.better == "higher") else "worse"
