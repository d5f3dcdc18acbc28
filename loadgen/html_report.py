"""One HTML file that needs nothing beside itself: verdict first, then pictures, tables, doubts, and where it all comes from."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape

import msgspec

from loadgen.compare import CompareReport
from loadgen.summary import KindSummary, Provenance, RunReport, SessionSummary, StageSummary
from loadgen.wording import (
    BOTTLENECK,
    compare_headlines,
    estimate,
    judgement,
    measured,
    number,
    percent,
    percentiles,
    run_headlines,
    seconds,
)

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; margin: 0 auto; max-width: 1060px; padding: 24px; }
h1 { font-size: 25px; margin: 0 0 2px; } h2 { font-size: 18px; margin: 34px 0 8px; } .sub { color: #666; margin: 0 0 16px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 13.5px; }
th { text-align: left; color: #555; font-weight: 600; border-bottom: 2px solid #ccc; padding: 5px 10px 5px 0; }
td { border-bottom: 1px solid #e6e6e6; padding: 5px 10px 5px 0; vertical-align: top; }
img { max-width: 100%; margin: 6px 0; } .note { color: #666; font-size: 13px; }
.alarm { background: #c0392b; color: #fff; padding: 12px 16px; border-radius: 6px; font-weight: 600; margin: 12px 0; }
.alarm ul, .warn ul { margin: 4px 0 0; font-weight: 400; }
.warn { background: #fff5dc; border-left: 4px solid #e0a800; padding: 8px 14px; margin: 12px 0; }
.head { background: #eef4f0; border-left: 4px solid #1b8a5a; padding: 10px 16px; margin: 12px 0; font-size: 16px; }
.head p { margin: 4px 0; } .head p:first-child { font-size: 19px; font-weight: 600; }
.better { color: #1b8a5a; font-weight: 600; } .worse { color: #c0392b; font-weight: 600; }
.none { color: #888; } pre { background: #f6f6f6; padding: 12px; overflow-x: auto; font-size: 12.5px; }
"""
CAPTIONS = {
    "verdict": "Factors over all rounds. Green: better; red: worse; grey: the interval holds 1.",
    "rates": "Whiskers: 95 % interval of the sum, between rounds.",
    "latency": "Dotted lines: half and 99 % of the requests.",
    "timeline": "",
    "stages": "",
}


def run_page(report: RunReport, pictures: Mapping[str, bytes]) -> str:
    """The page of one run."""
    body = [
        f"<h1>{escape(report.target)}: {escape(report.workload)}</h1>",
        f'<p class="sub">{escape(report.provenance.started_at)} · {escape(report.prompts)}</p>',
        _alarm(report.bottlenecks),
        _headline(run_headlines(report)),
        _warnings((f"{stage.name}: {line}", 1) for stage in report.stages for line in stage.warnings),
        _pictures(pictures),
        *(_stage(stage) for stage in report.stages),
        _provenance(report.provenance),
        _settings(report.settings),
    ]
    return _page(f"{report.target}: {report.workload}", body)


def compare_page(report: CompareReport, pictures: Mapping[str, bytes]) -> str:
    """The page of a comparison."""
    title = f"{' / '.join(report.targets[1:])} against {report.baseline}"
    first = report.runs[0]
    counted: dict[str, int] = {}
    for one in report.runs:
        for line in (f"{one.target}, {stage.name}: {text}" for stage in one.stages for text in stage.warnings):
            counted[line] = counted.get(line, 0) + 1
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">{escape(report.workload)} · {report.rounds} interleaved rounds · '
        f"{escape(first.provenance.started_at)} · {escape(first.prompts)}</p>",
        _alarm(report.bottlenecks),
        _headline(compare_headlines(report)),
        _bounds(report),
        _pictures(pictures),
        _ratios(report),
        _warnings(counted.items()),
        "<h2>The last round in full</h2>",
    ]
    for target in report.targets:
        last = report.runs_of(target)[-1]
        body += [f"<h2>{escape(target)}</h2>", *(_stage(stage) for stage in last.stages)]
    body += [_provenance(first.provenance), _settings(first.settings)]
    return _page(title, body)


def _page(title: str, body: Iterable[str]) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _alarm(bottlenecks: Sequence[str]) -> str:
    return f'<div class="alarm">{escape(BOTTLENECK)}{_list(bottlenecks)}</div>' if bottlenecks else ""


def _headline(lines: Sequence[str]) -> str:
    return f'<div class="head">{"".join(f"<p>{_coloured(line)}</p>" for line in lines)}</div>'


def _coloured(line: str) -> str:
    text, colon, last = line.rpartition(": ")
    styles = {"better": "better", "worse": "worse", "no difference shown": "none"}
    if not colon or last not in styles:
        return escape(line)
    return f'{escape(text)}: <span class="{styles[last]}">{escape(last)}</span>'


def _warnings(lines: Iterable[tuple[str, int]]) -> str:
    found = [f"{line} ({count} times)" if count > 1 else line for line, count in lines]
    return f'<div class="warn"><b>Mind when reading</b>{_list(found)}</div>' if found else ""


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _pictures(pictures: Mapping[str, bytes]) -> str:
    parts: list[str] = []
    for name, png in pictures.items():
        data = base64.b64encode(png).decode()
        parts.append(f'<img alt="{escape(name)}" src="data:image/png;base64,{data}">')
        parts.append(f'<p class="note">{escape(CAPTIONS[name])}</p>' if CAPTIONS.get(name) else "")
    return "".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    header = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{header}</tr>{lines}</table>"


def _ratios(report: CompareReport) -> str:
    styles = {"better": "better", "worse": "worse", "no difference shown": "none"}
    rows = [
        (
            escape(ratio.stage),
            escape(ratio.measure),
            measured(ratio, ratio.baseline),
            f"{escape(ratio.target)}: {measured(ratio, ratio.value)}",
            estimate(ratio.ratio),
            f'<span class="{styles[judgement(ratio)]}">{judgement(ratio)}</span>',
        )
        for ratio in report.ratios
    ]
    return "<h2>All measures</h2>" + _table(
        ("stage", "measure", report.baseline, "target", "ratio (95 %)", "verdict"), rows
    )


def _bounds(report: CompareReport) -> str:
    if not report.bounds:
        return ""
    rows = [
        (
            escape(bound.stage),
            f"{bound.embed_share:.1%}",
            f"{bound.split[0]}:{bound.split[1]}",
            estimate(bound.embed_rate),
            estimate(bound.generate_rate),
            f"<b>{number(bound.bound)}</b>",
        )
        for bound in report.bounds
    ]
    head = ("stage", "embed share", "split", "embed alone, per card", "generate alone, per card", "bound")
    return (
        "<h2>What load balance alone could gain</h2>"
        + _table(head, rows)
        + '<p class="note">The most that sharing all cards can gain over splitting them, from the rates of each kind alone in '
        "the same rounds. What a ratio has above it comes from mixing itself.</p>"
    )


def _stage(stage: StageSummary) -> str:
    client, server = stage.client, stage.server
    window_s = stage.window_end_s - stage.window_begin_s
    facts = [
        f"measured for {window_s:.1f} s of {stage.elapsed_s:.1f} s, ended by: {stage.stop_reason}",
        f"in flight at the cut-off: {stage.in_flight_at_cut_off}; peak in flight: {client.peak_in_flight}",
        f"client: schedule lag p99 {seconds(client.schedule_lag_p99_s)}, event-loop lag p99 "
        f"{seconds(client.loop_lag_p99_s)}, turnaround p99 {seconds(client.turnaround_p99_s)}, busiest process "
        f"{client.max_cpu_ratio:.0%} of a core",
        f"server: prefix-cache hits {percent(server.prefix_hit_ratio)}, step fill {percent(server.step_fill)}, "
        f"mixed steps {percent(server.mixed_step_ratio)}",
    ]
    head = ("", "requests/s", "prompt tok/s", "output tok/s", "ok", "errors", "open", "goodput/s", "tokens in/out")
    table = _table(head, [_kind_row(kind) for kind in stage.kinds])
    latency = _table(("", "latency", "p50", "p95", "p99", "max", "n"), _latency_rows(stage))
    errors = [f"{kind.kind}: {count} × {text}" for kind in stage.kinds for text, count in kind.error_examples.items()]
    return "".join(
        [
            f"<h2>{escape(stage.name)}</h2>",
            table,
            latency,
            _sessions(stage.sessions) if stage.sessions is not None else "",
            f'<div class="warn"><b>Errors</b>{_list(errors)}</div>' if errors else "",
            f'<p class="note">{"<br>".join(escape(fact) for fact in facts)}</p>',
        ]
    )


def _kind_row(kind: KindSummary) -> tuple[str, ...]:
    goodput = "no goal set" if kind.goodput is None else f"{estimate(kind.goodput)}, {percent(kind.goodput_ratio)}"
    tokens = " / ".join(
        "–" if value is None else f"{value:.1f}" for value in (kind.mean_prompt_tokens, kind.mean_output_tokens)
    )
    return (
        kind.kind,
        estimate(kind.rate),
        number(kind.prompt_tokens_per_s.value),
        number(kind.output_tokens_per_s.value),
        str(kind.completed),
        str(kind.errors),
        str(kind.unfinished),
        goodput,
        tokens,
    )


def _latency_rows(stage: StageSummary) -> Iterable[tuple[str, ...]]:
    for kind in stage.kinds:
        for name, distribution in (("E2E", kind.e2e), ("TTFT", kind.ttft), ("TPOT", kind.tpot), ("ITL", kind.itl)):
            if distribution is not None:
                yield (
                    kind.kind,
                    name,
                    *percentiles(distribution),
                    seconds(distribution.max),
                    str(distribution.count),
                )


def _sessions(sessions: SessionSummary) -> str:
    latency = [
        ("whole session", *percentiles(sessions.e2e)),
        ("one retrieval (client side, apart from the server)", *percentiles(sessions.retrieval)),
    ]
    facts = [
        ("sessions/s", estimate(sessions.rate)),
        ("completed / failed / open", f"{sessions.completed} / {sessions.errors} / {sessions.unfinished}"),
        ("goodput/s", "no goal set" if sessions.goodput is None else estimate(sessions.goodput)),
        ("hops per session", number(sessions.mean_hops)),
        ("embedding, seconds per session", estimate(sessions.embed_s)),
        ("generation, seconds per session", estimate(sessions.generate_s)),
        (f"exact match ({sessions.scored_answers} answers)", estimate(sessions.exact_match)),
        ("F1", estimate(sessions.f1)),
        ("answer occurs in the text", estimate(sessions.contains_answer)),
        (f"recall, first hop ({sessions.scored_retrievals} sessions)", estimate(sessions.recall_first_hop)),
        ("recall, all hops", estimate(sessions.recall_any_hop)),
    ]
    return (
        "<h2>Sessions</h2>"
        + _table(("", "p50", "p95", "p99"), latency)
        + _table(("", ""), [(escape(name), escape(value)) for name, value in facts])
    )


def _provenance(provenance: Provenance) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in provenance.packages.items())
    server = ", ".join(f"{name}: {value}" for name, value in provenance.server.items()) or "tells nothing about itself"
    rows = [
        ("started", provenance.started_at),
        ("command", provenance.command),
        ("loadgen", f"{provenance.loadgen_version}, commit {provenance.git_commit}"),
        (
            "client machine",
            f"{provenance.platform}, Python {provenance.python}; {provenance.processes} worker processes",
        ),
        ("installed beside it", packages),
        ("server", server),
        ("seed", str(provenance.seed)),
    ]
    return "<h2>Where this comes from</h2>" + _table(("", ""), [(escape(a), escape(b)) for a, b in rows])


def _settings(settings: Mapping[str, object]) -> str:
    text = msgspec.json.format(msgspec.json.encode(settings), indent=2).decode()
    return f"<h2>Settings</h2><pre>{escape(text)}</pre>"
