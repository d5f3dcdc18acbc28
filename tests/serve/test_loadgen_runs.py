"""Whole runs of the load generator against a scripted server: command line, worker processes, what is written. No Ray.

Bounds are wide: others may use the machine.
"""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen.cli import CLIENT_BOTTLENECK, NO_RESULT, OK, TARGET_FAILED, main
from loadgen.compare import CompareReport
from loadgen.mock_server import MockServer, Script, start
from loadgen.report_files import read_report
from loadgen.summary import RunReport

SMALL = ["--embed-tokens", "40", "--generate-tokens", "40", "--output-tokens", "5", "--timeout", "60"]
# The machine may be busy: these runs are not about lag.
LENIENT = [
    argument
    for key in ("schedule_lag_p99_s", "loop_lag_p99_s", "turnaround_p99_s", "cpu_ratio")
    for argument in ("--set", f"client_limits.{key}=100")
]


def whole_run(out: Path, *further: str) -> list[str]:
    """What all runs have in common; `further` wins over it."""
    return ["--warmup", "0", "--out", str(out), *SMALL, *LENIENT, *further]


class Running:
    """A scripted server in a thread of its own."""

    def __init__(self, script: Script) -> None:
        self.server: MockServer
        self.url = ""
        self._script = script
        self._up = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._up.wait(30)

    def _run(self) -> None:
        self.server, runner, self.url = self._loop.run_until_complete(start(self._script))
        self._up.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@pytest.fixture
def quick() -> Iterator[Running]:
    running = Running(Script(ttft_s=0.02, itl_s=0.01, embed_s=0.03))
    yield running
    running.stop()


def report_in(folder: Path) -> RunReport:
    report = read_report(folder / "report.json")
    assert isinstance(report, RunReport)
    return report


def test_two_processes_send_exactly_what_was_asked_and_the_numbers_match_the_script(
    quick: Running, tmp_path: Path
) -> None:
    arguments = ["run", "ratio", "--base-url", quick.url, "--clients", "4", "--requests", "60", "--processes", "2"]
    code = main([*arguments, *whole_run(tmp_path)])
    assert code == OK
    report = report_in(tmp_path)
    [stage] = report.stages
    embed, generate = stage.kind("embed"), stage.kind("generate")
    assert embed is not None
    assert generate is not None
    # 60 requests, and one or two before the load for the check and the sizes of prompts
    assert embed.measured + generate.measured >= 56  # those sent just at the cut-off are outside
    assert quick.server.seen.embeds + quick.server.seen.generations <= 60 + 4
    assert quick.server.seen.peak_in_flight <= 4
    assert embed.e2e is not None
    assert generate.ttft is not None
    assert generate.tpot is not None
    # Never faster than the script: 30 ms an embedding, 20 ms to the first token, 10 ms a token (timers may round by 1 ms).
    assert embed.e2e.p50.value >= 0.029
    assert generate.ttft.p50.value >= 0.019
    assert generate.tpot.p50.value >= 0.008
    assert generate.mean_output_tokens == 5.0
    assert (embed.mean_prompt_tokens, generate.mean_prompt_tokens) == (40.0, 40.0)
    assert (stage.server.prefix_hit_ratio, stage.server.step_fill) == (0.0, pytest.approx(0.95))
    assert report.provenance.seed == json.loads((tmp_path / "report.json").read_text())["settings"]["seed"]


def test_reports_need_nothing_beside_themselves_and_can_be_made_again(quick: Running, tmp_path: Path) -> None:
    arguments = ["run", "phases", "--base-url", quick.url, "--clients", "4", "--set", "workload.requests_per_phase=12"]
    assert main([*arguments, "--out", str(tmp_path / "a"), *SMALL, *LENIENT]) == OK
    page = (tmp_path / "a" / "report.html").read_text()
    assert "phase 3: 90% embed" in page
    assert 'src="data:image/png' in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert main(["report", str(tmp_path / "a" / "report.json"), "--out", str(tmp_path / "b")]) == OK
    names = sorted(file.name for file in (tmp_path / "b").iterdir())
    assert names == ["latency.png", "report.html", "report.json", "stages.png", "timeline.png"]
    assert (tmp_path / "b" / "report.json").read_bytes() == (tmp_path / "a" / "report.json").read_bytes()


def test_a_run_whose_client_was_the_bottleneck_fails_with_3_and_says_so_everywhere(
    quick: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "embed", "--base-url", quick.url, "--clients", "2", "--requests", "10"]
    code = main([*arguments, *whole_run(tmp_path, "--set", "client_limits.loop_lag_p99_s=0.0000001")])
    assert code == CLIENT_BOTTLENECK
    assert "THE CLIENT WAS THE BOTTLENECK" in capsys.readouterr().out
    assert "THE CLIENT WAS THE BOTTLENECK" in (tmp_path / "report.html").read_text()
    assert report_in(tmp_path).bottlenecks


def test_a_comparison_takes_turns_and_reports_ratios_and_the_bound(quick: Running, tmp_path: Path) -> None:
    slow = Running(Script(ttft_s=0.1, itl_s=0.05, embed_s=0.15))
    try:
        targets = ["--target", f"slow={slow.url}", "--target", f"quick={quick.url}", "--rounds", "2"]
        load = whole_run(tmp_path, "--clients", "4", "--requests", "40")
        code = main(["compare", "ratio", *targets, *load, "--set", "compare.bound={split: [1, 1], rates_from: quick}"])
    finally:
        slow.stop()
    assert code == OK
    report = read_report(tmp_path / "report.json")
    assert isinstance(report, CompareReport)
    assert [one.target for one in report.runs] == ["slow", "quick", "quick", "slow"]
    total = next(ratio for ratio in report.ratios if ratio.measure == "requests/s, both kinds")
    assert total.ratio.value > 1.5  # 5 times by the script; a busy machine may eat most of it
    assert [bound.split for bound in report.bounds] == [(1, 1)]
    assert report.bounds[0].bound >= 1.0
    prompts = quick.server.seen.prompts
    assert len({prompt for prompt in prompts if len(prompt.split()) == 40}) == sum(
        len(p.split()) == 40 for p in prompts
    )


def test_a_server_that_fails_every_request_fails_the_run(tmp_path: Path) -> None:
    # The first embedding is the check before the load; every later one is refused.
    running = Running(Script(embed_faults=dict.fromkeys(range(1, 5000), "http_503"), fault_every=5000))
    try:
        arguments = ["run", "embed", "--base-url", running.url, "--clients", "2", "--duration", "20"]
        code = main([*arguments, "--out", str(tmp_path), *SMALL, *LENIENT])
    finally:
        running.stop()
    assert code == TARGET_FAILED
    [stage] = report_in(tmp_path).stages
    assert stage.kinds[0].error_examples == {"HTTP 503: scripted refusal": stage.kinds[0].errors}
    assert stage.stop_reason == "errors"


def test_no_server_or_a_wrong_setting_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "embed", "--base-url", "http://127.0.0.1:9", "--out", str(tmp_path)]) == NO_RESULT
    assert "a first embed request to http://127.0.0.1:9 failed" in capsys.readouterr().out
    assert main(["run", "ratio", "--set", "prompts.embed_token=3"]) == NO_RESULT
    assert "prompts.embed_token: unknown key; did you mean 'embed_tokens'" in capsys.readouterr().out
