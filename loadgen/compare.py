"""Compares targets fairly: the same load on each in turn, round by round, and ratios from the pairs of a round.

Whatever drifts over the hours (a warm cache, a neighbour on the machine) hits all targets alike; the order turns round every
round. With `compare.bound`, each kind alone is measured in the same rounds and the load-balance bound worked out.
"""

import asyncio
import subprocess
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Literal

import msgspec

from loadgen import settings as user
from loadgen.bound import Bound, load_balance_bound
from loadgen.errors import SettingsError, TargetError
from loadgen.intervals import Estimate, mean_of, ratio_of_pairs
from loadgen.plan import stages_of
from loadgen.records import Kind
from loadgen.run import Prepared, Watcher, prepare, run, target_of
from loadgen.summary import Distribution, RunReport, StageSummary

COMPARE_SCHEMA = "loadgen-compare-1"
PREPARE_TIMEOUT_S = 600.0
SEED_STRIDE = 10_000  # turns of one comparison


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """One measure of one target against the baseline: means over the rounds, and the ratio with its interval."""

    stage: str
    measure: str
    better: Literal["higher", "lower"]
    target: str
    value: float
    baseline: float
    ratio: Estimate


class CompareReport(msgspec.Struct, frozen=True, kw_only=True):
    """All rounds of a comparison. `runs` are in the order in which they ran; pictures are kept for the last round only."""

    schema: str
    workload: str
    baseline: str
    targets: list[str]
    rounds: int
    ratios: list[Ratio]
    bounds: list[Bound]
    runs: list[RunReport]
    alone: list[RunReport]  # each kind alone, for the bound

    @property
    def bottlenecks(self) -> list[str]:
        """Why the client's numbers cannot be trusted; empty if they can."""
        return list(
            dict.fromkeys(f"{one.target}: {line}" for one in [*self.runs, *self.alone] for line in one.bottlenecks)
        )

    def runs_of(self, target: str) -> list[RunReport]:
        """The runs of one target, by rounds."""
        return [one for one in self.runs if one.target == target]


MEASURES: tuple[tuple[str, Literal["higher", "lower"], Callable[[StageSummary], float | None]], ...] = (
    ("requests/s, both kinds", "higher", lambda stage: stage.rate.value),
    ("embed requests/s", "higher", lambda stage: _rate(stage, "embed")),
    ("generate requests/s", "higher", lambda stage: _rate(stage, "generate")),
    ("sessions/s", "higher", lambda stage: stage.sessions.rate.value if stage.sessions else None),
    ("embed goodput/s", "higher", lambda stage: _goodput(stage, "embed")),
    ("generate goodput/s", "higher", lambda stage: _goodput(stage, "generate")),
    ("embed E2E p50", "lower", lambda stage: _point(_kind_e2e(stage, "embed"), "p50")),
    ("embed E2E p99", "lower", lambda stage: _point(_kind_e2e(stage, "embed"), "p99")),
    ("generate E2E p50", "lower", lambda stage: _point(_kind_e2e(stage, "generate"), "p50")),
    ("generate E2E p99", "lower", lambda stage: _point(_kind_e2e(stage, "generate"), "p99")),
    ("generate TTFT p99", "lower", lambda stage: _point(_of_generate(stage, "ttft"), "p99")),
    ("generate TPOT p99", "lower", lambda stage: _point(_of_generate(stage, "tpot"), "p99")),
    ("generate ITL p99", "lower", lambda stage: _point(_of_generate(stage, "itl"), "p99")),
    ("session E2E p50", "lower", lambda stage: _point(stage.sessions.e2e if stage.sessions else None, "p50")),
    ("session E2E p99", "lower", lambda stage: _point(stage.sessions.e2e if stage.sessions else None, "p99")),
    ("time of the stage", "lower", lambda stage: None if "time" in stage.stop_reason else stage.elapsed_s),
)


def compare(settings: user.Settings, watcher: Watcher) -> CompareReport:
    """Runs all rounds.

    Raises:
        SettingsError, TargetError, WorkerError: there is no result.
    """
    plan = settings.compare
    if plan is None:
        raise SettingsError("compare: needs targets (compare.targets, or --target NAME=URL twice)")
    prepared: dict[str, Prepared] = {}
    runs: list[RunReport] = []
    alone: list[RunReport] = []
    # Never the same prompts twice: two targets may be one server that is switched between its turns.
    seeds = count((settings.seed or 0) * SEED_STRIDE)
    for number in range(plan.rounds):
        order = plan.targets if number % 2 == 0 else plan.targets[::-1]
        for target in order:
            watcher.say(f"round {number + 1} of {plan.rounds}: {target.name}")
            turn = settings.model_copy(update={"target": target, "seed": next(seeds)})
            _get_ready(target)
            if target.name not in prepared:
                prepared[target.name] = asyncio.run(prepare(turn, target_of(target), stages_of(turn), watcher))
            report = run(turn, watcher, prepared[target.name])
            runs.append(report if number == plan.rounds - 1 else msgspec.structs.replace(report, series=[]))
            if plan.bound is not None and target.name == plan.bound.rates_from:
                alone += _measure_alone(turn, watcher, seeds)
    names = [target.name for target in plan.targets]
    return CompareReport(
        schema=COMPARE_SCHEMA,
        workload=settings.workload.kind,
        baseline=names[0],
        targets=names,
        rounds=plan.rounds,
        ratios=ratios_of(runs, names),
        bounds=[] if plan.bound is None else bounds_of(runs, names[0], plan.bound, alone),
        runs=runs,
        alone=alone,
    )


def ratios_of(runs: Sequence[RunReport], names: Sequence[str]) -> list[Ratio]:
    """Every measure that both have, of every target but the first against the first, stage by stage."""
    by_target = {name: [one for one in runs if one.target == name] for name in names}
    baseline_runs = by_target[names[0]]
    stages = [stage.name for stage in baseline_runs[0].stages]
    ratios: list[Ratio] = []
    for place, stage in enumerate(stages):
        for name in names[1:]:
            for measure, better, of in MEASURES:
                pairs = [
                    (of(mine.stages[place]), of(base.stages[place]))
                    for mine, base in zip(by_target[name], baseline_runs, strict=True)
                    if place < len(mine.stages) and place < len(base.stages)
                ]
                found = _ratio(stage, measure, better, name, pairs)
                ratios += [found] if found is not None else []
    return ratios


def bounds_of(
    runs: Sequence[RunReport], baseline: str, plan: user.BoundSettings, alone: Sequence[RunReport]
) -> list[Bound]:
    """The bound for every stage of the runs that mixes both kinds, at the mix that was offered (from the other targets)."""
    embed_rate, generate_rate = _rate_per_card("embed", plan, alone), _rate_per_card("generate", plan, alone)
    mixed = [one for one in runs if one.target != baseline] or list(runs)
    bounds: list[Bound] = []
    for place, stage in enumerate(mixed[0].stages):
        seen = [one.stages[place].embed_share for one in mixed if place < len(one.stages)]
        shares = [share for share in seen if share is not None]
        if not shares or not 0 < sum(shares) < len(shares):
            continue
        share = sum(shares) / len(shares)
        bounds.append(
            Bound(
                stage=stage.name,
                embed_share=share,
                split=plan.split,
                embed_rate=embed_rate,
                generate_rate=generate_rate,
                bound=load_balance_bound(share, plan.split, embed_rate.value, generate_rate.value),
            )
        )
    return bounds


def _measure_alone(turn: user.Settings, watcher: Watcher, seeds: Iterator[int]) -> list[RunReport]:
    """Each kind alone, at the same number of clients."""
    reports: list[RunReport] = []
    kinds: tuple[Kind, Kind] = ("embed", "generate")
    for kind in kinds:
        watcher.say(f"{turn.target.name}: {kind} alone, for the bound")
        workload = user.SingleSettings(kind=kind, arrivals=_saturating(turn.workload))
        report = run(turn.model_copy(update={"workload": workload, "seed": next(seeds)}), watcher)
        reports.append(msgspec.structs.replace(report, series=[]))
    return reports


def _rate_per_card(kind: Kind, plan: user.BoundSettings, alone: Sequence[RunReport]) -> Estimate:
    num_embed, num_generate = plan.split
    part = num_embed if kind == "embed" else num_generate
    cards = num_embed + num_generate if plan.rates == "shared" else part
    return mean_of([one.stages[0].rate.value / cards for one in alone if one.workload == kind])


def _saturating(workload: user.WorkloadSettings) -> user.ClosedSettings:
    """A closed loop with as many clients as the workload has in all."""
    match workload:
        case user.PhasesSettings():
            return user.ClosedSettings(clients=workload.clients)
        case user.PoolsSettings():
            both = (workload.embed, workload.generate)
            closed = [arrivals.clients for arrivals in both if isinstance(arrivals, user.ClosedSettings)]
            return user.ClosedSettings(clients=sum(closed) or 64)
        case user.RatioSettings() | user.SingleSettings() | user.IterRetGenSettings():
            arrivals = workload.arrivals
            return arrivals if isinstance(arrivals, user.ClosedSettings) else user.ClosedSettings()
        case _:
            return user.ClosedSettings()


def _get_ready(target: user.TargetSettings) -> None:
    if target.prepare is None:
        return
    done = subprocess.run(
        target.prepare, shell=True, capture_output=True, text=True, timeout=PREPARE_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        reason = " ".join((done.stderr or done.stdout).split())[-300:]
        raise TargetError(f"{target.name}: its prepare command ended with {done.returncode}: {reason}")


def _ratio(
    stage: str,
    measure: str,
    better: Literal["higher", "lower"],
    target: str,
    pairs: Sequence[tuple[float | None, float | None]],
) -> Ratio | None:
    known = [(value, base) for value, base in pairs if value is not None and base is not None]
    if not known:
        return None
    values, bases = [value for value, _ in known], [base for _, base in known]
    ratio = ratio_of_pairs(values, bases)
    if ratio is None:
        return None
    return Ratio(
        stage=stage,
        measure=measure,
        better=better,
        target=target,
        value=sum(values) / len(values),
        baseline=sum(bases) / len(bases),
        ratio=ratio,
    )


def _rate(stage: StageSummary, kind: Kind) -> float | None:
    summary = stage.kind(kind)
    return None if summary is None else summary.rate.value


def _goodput(stage: StageSummary, kind: Kind) -> float | None:
    summary = stage.kind(kind)
    return None if summary is None or summary.goodput is None else summary.goodput.value


def _kind_e2e(stage: StageSummary, kind: Kind) -> Distribution | None:
    summary = stage.kind(kind)
    return None if summary is None else summary.e2e


def _of_generate(stage: StageSummary, name: Literal["ttft", "tpot", "itl"]) -> Distribution | None:
    summary = stage.kind("generate")
    if summary is None:
        return None
    return {"ttft": summary.ttft, "tpot": summary.tpot, "itl": summary.itl}[name]


def _point(distribution: Distribution | None, name: Literal["p50", "p99"]) -> float | None:
    if distribution is None:
        return None
    return (distribution.p50 if name == "p50" else distribution.p99).value
