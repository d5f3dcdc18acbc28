"""The command line: `loadgen run | compare | report | mock-server`. Parses arguments; each verb is one call.

Exit codes: 0 · 1 the target failed (every request of a kind, or more errors than allowed) · 2 wrong settings, no such target,
a worker died · 3 the client was the bottleneck, so the numbers are not the server's · 130 interrupted.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel

from loadgen import mock_server
from loadgen.compare import CompareReport, compare
from loadgen.errors import LoadgenError, SettingsError
from loadgen.live import LiveWatcher
from loadgen.provenance import VERSION
from loadgen.report_files import Report, read_report, write_all
from loadgen.run import run
from loadgen.settings_file import overlay, parse_assignment, parse_settings, read_yaml
from loadgen.summary import RunReport
from loadgen.tables import compare_table, stage_table
from loadgen.wording import BOTTLENECK, compare_headlines

WORKLOADS = ("ratio", "embed", "generate", "pools", "phases", "block", "iter_retgen", "trace")
WIDTH = 150  # where the output is no terminal
OK, TARGET_FAILED, NO_RESULT, CLIENT_BOTTLENECK, INTERRUPTED = 0, 1, 2, 3, 130

# Flag → place in the settings. Everything else is reached by --set.
FLAGS: tuple[tuple[str, str, str], ...] = (
    ("--base-url", "target.base_url", "address of the server (http://127.0.0.1:8000)"),
    ("--embeddings-url", "target.embeddings_url", "address for embeddings, if it differs"),
    ("--generation-url", "target.generation_url", "address for generations, if it differs"),
    ("--embed-model", "target.embed_model", "model name in embedding requests"),
    ("--generate-model", "target.generate_model", "model name in generation requests"),
    ("--api", "target.api", "completions or chat"),
    ("--api-key-file", "target.api_key_file", "file that holds the API key"),
    ("--embed-share", "workload.embed_share", "share of embeddings, 0 to 1 (ratio)"),
    ("--embed-tokens", "prompts.embed_tokens", "tokens of a text to embed"),
    ("--generate-tokens", "prompts.generate_tokens", "tokens of a prompt to answer"),
    ("--output-tokens", "prompts.output_tokens", "tokens of an answer"),
    ("--duration", "stop.max_duration_s", "seconds until the cut-off"),
    ("--requests", "stop.max_requests", "requests until the cut-off"),
    ("--warmup", "warmup_s", "seconds at the start that are not measured"),
    ("--timeout", "timeout_s", "seconds that one request may take"),
    ("--processes", "processes", "worker processes"),
    ("--seed", "seed", "seed of all random numbers"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    options = _parser().parse_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    try:
        match options.verb:
            case "run":
                return _run(options, console)
            case "compare":
                return _compare(options, console)
            case "report":
                return _report(options, console)
            case _:
                return _mock_server(options, console)
    except LoadgenError as error:
        console.print(f"[bold red]loadgen:[/] {error}", highlight=False, markup=True)
        return NO_RESULT
    except KeyboardInterrupt:
        console.print("interrupted: nothing is reported")
        return INTERRUPTED


def _run(options: argparse.Namespace, console: Console) -> int:
    settings = parse_settings(_data(options))
    if settings.compare is not None:
        raise SettingsError("compare: these settings name several targets; use `loadgen compare`")
    report = run(settings, LiveWatcher(console))
    return _finish(report, options.out, console)


def _compare(options: argparse.Namespace, console: Console) -> int:
    data = _data(options)
    if options.target:
        common = data.get("target", {})
        data = overlay(data, {"compare": {"targets": [{**common, **_target(text)} for text in options.target]}})
    if options.rounds is not None:
        data = overlay(data, {"compare": {"rounds": options.rounds}})
    report = compare(parse_settings(data), LiveWatcher(console))
    return _finish(report, options.out, console)


def _report(options: argparse.Namespace, console: Console) -> int:
    report = read_report(options.file)
    if isinstance(report, RunReport):
        for stage in report.stages:
            console.print(stage_table(stage))
    return _finish(report, options.out, console)


def _mock_server(options: argparse.Namespace, console: Console) -> int:
    script = mock_server.Script(
        ttft_s=options.ttft, itl_s=options.itl, embed_s=options.embed, slots=options.slots, trivial=options.trivial
    )

    async def serve() -> None:
        _, runner, url = await mock_server.start(script, options.port)
        console.print(f"scripted server at {url}")
        try:
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    asyncio.run(serve())
    return OK


def _finish(report: Report, out: Path, console: Console) -> int:
    """Prints the verdict, writes the files, and says by the exit code whether the numbers may be used."""
    if isinstance(report, CompareReport):
        console.print(compare_table(report))
        for line in compare_headlines(report):
            console.print(line, highlight=False, markup=False)
    files = write_all(report, out)
    console.print(f"written to {out}: {', '.join(file.name for file in files)}", highlight=False)
    if report.bottlenecks:
        lines = "\n".join([BOTTLENECK, *(f"· {line}" for line in report.bottlenecks)])
        console.print(Panel(lines, style="bold red"))
        return CLIENT_BOTTLENECK
    return TARGET_FAILED if _target_failed(report) else OK


def _target_failed(report: Report) -> bool:
    runs = [report] if isinstance(report, RunReport) else report.runs
    stages = [stage for one in runs for stage in one.stages]
    nothing = any(kind.completed == 0 and kind.errors > 0 for stage in stages for kind in stage.kinds)
    return nothing or any("errors" in stage.stop_reason for stage in stages)


def _data(options: argparse.Namespace) -> dict[str, Any]:
    """File, then flags, then --set."""
    data: dict[str, Any] = {} if options.config is None else read_yaml(options.config)
    if options.workload is not None:
        data = overlay(data, {"workload": {"kind": options.workload}})
    for flag, place, _ in FLAGS:
        value = getattr(options, flag[2:].replace("-", "_"))
        if value is not None:
            data = overlay(data, parse_assignment(f"{place}={value}"))
    if options.clients is not None and options.rate is not None:
        raise SettingsError("--clients and --rate: a closed loop has clients, an open loop has a rate; give one")
    if options.clients is not None:
        data = overlay(data, {"workload": _closed(data, options.clients)})
    if options.rate is not None:
        data = overlay(data, {"workload": {"arrivals": {"kind": "poisson", "rate": options.rate}}})
    for text in options.set:
        data = overlay(data, parse_assignment(text))
    if "workload" not in data:
        raise SettingsError(f"workload: name one of {', '.join(WORKLOADS)}, or give --config with one")
    return data


def _closed(data: dict[str, Any], clients: int) -> dict[str, Any]:
    if data.get("workload", {}).get("kind") == "phases":
        return {"clients": clients}
    return {"arrivals": {"kind": "closed", "clients": clients}}


def _target(text: str) -> dict[str, str]:
    """`name=URL`, or `name=URL,key=value,…` with the keys of a target; `embeddings` and `generation` stand for their URLs."""
    head, *rest = text.split(",")
    name, equals, url = head.partition("=")
    if not equals:
        raise SettingsError(f"--target {text}: must be NAME=URL")
    target = {"name": name, "base_url": url}
    for item in rest:
        key, equals, value = item.partition("=")
        if not equals:
            raise SettingsError(f"--target {text}: {item!r} must be key=value")
        target[f"{key}_url" if key in ("embeddings", "generation") else key] = value
    return target


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadgen", description="Honest load for servers that embed and generate, over the OpenAI API."
    )
    parser.add_argument("--version", action="version", version=VERSION)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("run", help="load one server and write a report")
    many = verbs.add_parser("compare", help="load several servers in turns and report ratios")
    for verb in (one, many):
        _add_run_arguments(verb)
    many.add_argument(
        "--target", action="append", default=[], metavar="NAME=URL", help="a server; the first one is the baseline"
    )
    many.add_argument("--rounds", type=int, help="how often each server has its turn (5)")
    again = verbs.add_parser("report", help="make tables, HTML and pictures from a report.json again")
    again.add_argument("file", type=Path)
    again.add_argument("--out", type=Path, default=Path("loadgen-report"), metavar="DIR")
    _add_mock_arguments(verbs.add_parser("mock-server", help="a scripted server with known timing"))
    return parser


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", nargs="?", choices=WORKLOADS, help="what to send")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in YAML; flags win over it")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any setting, e.g. goals.embed_e2e_s=1"
    )
    parser.add_argument("--out", type=Path, default=Path("loadgen-report"), metavar="DIR", help="folder for the report")
    parser.add_argument("--clients", type=int, metavar="N", help="closed loop with N clients")
    parser.add_argument("--rate", type=float, metavar="R", help="open loop, R Poisson arrivals per second")
    for flag, place, text in FLAGS:
        parser.add_argument(flag, metavar=place.rpartition(".")[2].upper(), help=text)


def _add_mock_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft", type=float, default=0.05, metavar="S", help="seconds to the first token")
    parser.add_argument("--itl", type=float, default=0.01, metavar="S", help="seconds between tokens")
    parser.add_argument("--embed", type=float, default=0.02, metavar="S", help="seconds per embedding request")
    parser.add_argument("--slots", type=int, default=1_000_000, metavar="N", help="requests served at once")
    parser.add_argument("--trivial", action="store_true", help="answer at once: for measuring the client")


def entry() -> None:
    """Console script."""
    sys.exit(main())
