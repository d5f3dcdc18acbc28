"""Turns settings into stages: the workloads, one small function each. Pure, but for the trace file, which is read here."""

from pathlib import Path

import msgspec

from loadgen import arrivals as arriving
from loadgen import lengths, settings
from loadgen.corpus import read_jsonl
from loadgen.errors import SettingsError
from loadgen.records import Kind
from loadgen.stages import Listed, Mix, Sessions, Stage, Stream, Work
from loadgen.stop import StopRule

DEFAULT_DURATION_S = 60.0


class TraceLine(msgspec.Struct, frozen=True):
    """One recorded request. `timestamp` in seconds; only differences count."""

    timestamp: float
    kind: Kind
    prompt_tokens: int
    output_tokens: int = 0


def stages_of(run: settings.Settings) -> tuple[Stage, ...]:
    """The stages of a run.

    Raises:
        SettingsError: settings that contradict each other, or a trace that cannot be read.
    """
    workload = run.workload
    match workload:
        case settings.RatioSettings():
            return _levels(run, workload, workload.embed_share)
        case settings.SingleSettings():
            return _levels(run, workload, 1.0 if workload.kind == "embed" else 0.0)
        case settings.PoolsSettings():
            return _pools(run, workload)
        case settings.PhasesSettings():
            return _phases(run, workload)
        case settings.BlockSettings():
            return _block(run, workload)
        case settings.IterRetGenSettings():
            return _iter_retgen(run, workload)
        case settings.TraceSettings():
            return _trace(run, workload)


def length_of(value: settings.LengthSettings) -> lengths.Length:
    """The inner form of a length."""
    match value:
        case settings.UniformSettings():
            return lengths.Uniform(value.low, value.high)
        case settings.LogNormalSettings():
            return lengths.LogNormal(value.median, value.sigma, value.low, value.high)
        case int():
            return lengths.Fixed(value)


def arrivals_of(value: settings.ArrivalSettings) -> arriving.Arrivals:
    """The inner form of arrivals."""
    match value:
        case settings.ClosedSettings():
            return arriving.ClosedLoop(value.clients, value.ramp_s)
        case settings.RateSettings():
            return arriving.Constant(value.rate) if value.kind == "constant" else arriving.Poisson(value.rate)
        case settings.GammaSettings():
            return arriving.Gamma(value.rate, value.variation)
        case settings.RampSettings():
            return arriving.Ramp(value.steps)


def _steady_stage(run: settings.Settings, name: str, *streams: Stream) -> Stage:
    return Stage(name, streams, _steady_stop(run), run.warmup_s, _drain_s(run), run.timeout_s)


def _whole_stage(run: settings.Settings, name: str, stream: Stream, max_requests: int | None = None) -> Stage:
    """For workloads that end by themselves: time is a limit only if the user set one."""
    stop = StopRule(max_requests or run.stop.max_requests, run.stop.max_duration_s, run.stop.max_error_ratio)
    return Stage(name, (stream,), stop, 0.0, _drain_s(run), run.timeout_s, steady=False)


def _drain_s(run: settings.Settings) -> float:
    return run.timeout_s if run.stop.drain_s is None else run.stop.drain_s


def _ends_by_itself(arrivals: settings.ArrivalSettings) -> bool:
    return isinstance(arrivals, settings.RampSettings)


def _steady_stop(run: settings.Settings) -> StopRule:
    """The user's stop rule; a minute where neither a time nor a number was given."""
    stop = run.stop
    limited = stop.max_requests is not None or stop.max_duration_s is not None
    duration_s = stop.max_duration_s if limited else DEFAULT_DURATION_S
    return StopRule(stop.max_requests, duration_s, stop.max_error_ratio)


def _mix(run: settings.Settings, embed_share: float) -> Mix:
    prompts = run.prompts
    return Mix(
        embed_share,
        length_of(prompts.embed_tokens),
        length_of(prompts.generate_tokens),
        length_of(prompts.output_tokens),
    )


def _levels(
    run: settings.Settings, workload: settings.RatioSettings | settings.SingleSettings, embed_share: float
) -> tuple[Stage, ...]:
    mix = _mix(run, embed_share)
    name = workload.kind if isinstance(workload, settings.SingleSettings) else f"embed share {embed_share:g}"
    if not workload.levels:
        stream = Stream(arrivals_of(workload.arrivals), mix)
        whole = _ends_by_itself(workload.arrivals)
        return ((_whole_stage if whole else _steady_stage)(run, name, stream),)
    stages: list[Stage] = []
    for level in workload.levels:
        arrivals, label = _at_level(workload.arrivals, level)
        stages.append(_steady_stage(run, f"{name}, {label}", Stream(arrivals, mix)))
    return tuple(stages)


def _at_level(arrivals: settings.ArrivalSettings, level: float) -> tuple[arriving.Arrivals, str]:
    if isinstance(arrivals, settings.RampSettings):
        raise SettingsError("workload.levels: a ramp has its own steps; use one or the other")
    if isinstance(arrivals, settings.ClosedSettings):
        if level != int(level):
            raise SettingsError(f"workload.levels: {level:g} clients is not a whole number")
        return arriving.ClosedLoop(int(level), arrivals.ramp_s), f"{level:g} clients"
    return arrivals_of(arrivals.model_copy(update={"rate": level})), f"{level:g}/s"


def _pools(run: settings.Settings, workload: settings.PoolsSettings) -> tuple[Stage, ...]:
    embed = Stream(arrivals_of(workload.embed), _mix(run, 1.0))
    generate = Stream(arrivals_of(workload.generate), _mix(run, 0.0))
    return (_steady_stage(run, "pools", embed, generate),)


def _phases(run: settings.Settings, workload: settings.PhasesSettings) -> tuple[Stage, ...]:
    loop = arriving.ClosedLoop(workload.clients)
    return tuple(
        _whole_stage(run, f"phase {n}: {share:.0%} embed", Stream(loop, _mix(run, share)), workload.requests_per_phase)
        for n, share in enumerate(workload.embed_shares, start=1)
    )


def _block(run: settings.Settings, workload: settings.BlockSettings) -> tuple[Stage, ...]:
    rng_free = (run.prompts.embed_tokens, run.prompts.generate_tokens, run.prompts.output_tokens)
    if not all(isinstance(length, int) for length in rng_free):
        raise SettingsError("prompts: the block workload takes fixed lengths only")
    embed_tokens, generate_tokens, output_tokens = (int(length) for length in rng_free if isinstance(length, int))
    generations = tuple(Work("generate", generate_tokens, output_tokens) for _ in range(workload.num_generate))
    embeddings = tuple(Work("embed", embed_tokens) for _ in range(workload.num_embed))
    works = generations + embeddings
    stream = Stream(arriving.Burst(len(works), workload.send_per_s), Listed(works))
    return (_whole_stage(run, "block", stream),)


def _iter_retgen(run: settings.Settings, workload: settings.IterRetGenSettings) -> tuple[Stage, ...]:
    sessions = Sessions(length_of(workload.hops), length_of(workload.documents), length_of(workload.output_tokens))
    stream = Stream(arrivals_of(workload.arrivals), sessions)
    whole = _ends_by_itself(workload.arrivals)
    return ((_whole_stage if whole else _steady_stage)(run, f"iter_retgen, {workload.variant}", stream),)


def _trace(run: settings.Settings, workload: settings.TraceSettings) -> tuple[Stage, ...]:
    lines = sorted(read_trace(workload.path), key=lambda line: line.timestamp)
    if not lines:
        raise SettingsError(f"workload.path: {workload.path} has no requests")
    times_s = tuple(line.timestamp - lines[0].timestamp for line in lines)
    works = tuple(Work(line.kind, line.prompt_tokens, line.output_tokens) for line in lines)
    stream = Stream(arriving.Replay(times_s, workload.speed), Listed(works))
    return (_whole_stage(run, f"trace {workload.path.name}", stream),)


def read_trace(path: Path) -> list[TraceLine]:
    """The requests of a trace file.

    Raises:
        SettingsError: it cannot be read, a line does not fit, or a number of tokens is not positive.
    """
    lines = read_jsonl(path.expanduser(), TraceLine)
    for number, line in enumerate(lines, start=1):
        if line.prompt_tokens < 1 or (line.kind == "generate" and line.output_tokens < 1):
            raise SettingsError(f"{path}, request {number}: prompt_tokens and output_tokens must be at least 1")
    return lines
