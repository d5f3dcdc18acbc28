"""A real Prometheus scrapes the running product: every query has an answer, and a lost replica raises an alarm."""

import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ray import serve

from orthrus_serve.app import compose
from orthrus_serve.cli import main
from orthrus_serve.config.load import parse_args
from orthrus_serve.telemetry.catalog import CATALOG
from tests.serve.conftest import FAKE_ARGS, App
from tests.serve.fakes import start_fake
from tests.serve.prometheus import (
    DASHBOARDS,
    Prometheus,
    board_queries,
    needs_prometheus,
    rule_queries,
    running_prometheus,
)
from tests.serve.test_fake_app import until

pytestmark = [needs_prometheus, pytest.mark.timeout(600)]

# Queries that have no answer where these tests run, and why.
UNANSWERED: dict[str, str] = {}
LOAD_S = 12.0
QUERIES = [*board_queries(), *rule_queries()]


@pytest.fixture(scope="module")
def arms(serve_url: str) -> Iterator[App]:
    """Two arms over fake engines, one of which mirrors the other; two Fronts."""
    shared = {key: value for key, value in FAKE_ARGS.items() if key not in ("topology", "num_replicas")}
    each = {"old": {"topology": "hetero_fcfs"}, "new": {"topology": "orthrus", "num_replicas": 2}}
    args = parse_args({**shared, "arms": each, "front": {"num_replicas": 2}})
    serve.run(compose(args, start_fake), name="seen", route_prefix="/seen")
    app = App("seen", f"{serve_url}/seen")
    until(lambda: len(app.info("Front")) == 2, limit_s=60)
    mirror = {"mirror": {"from": "old", "to": "new", "share": 0.5}}
    serve.get_deployment_handle("Front", app.name).broadcast("reconfigure", mirror).results(timeout_s=10)
    yield app
    serve.delete("seen", _blocking=False)


@pytest.fixture(scope="module")
def prometheus(arms: App, real: App, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Has scraped both for some seconds under load. Its alerts are the product's, without the time that they wait."""
    folder = tmp_path_factory.mktemp("prometheus")
    rules = yaml.safe_load((DASHBOARDS / "alerts.yaml").read_text(encoding="utf-8"))
    for rule in rules["groups"][0]["rules"]:
        rule.pop("for", None)
    (folder / "alerts.yaml").write_text(yaml.safe_dump(rules), encoding="utf-8")
    pages = {app.name: f"{app.url}/metrics" for app in (arms, real)}
    with running_prometheus(folder, pages, [folder / "alerts.yaml"]) as server:
        under_load([arms, real], LOAD_S)
        yield server


def under_load(apps: list[App], duration_s: float) -> None:
    """Chats, streams and embeddings for each application, several at once."""
    end_s = time.monotonic() + duration_s

    def ask(app: App, number: int) -> None:
        prompt = {"model": "orthrus", "prompt": f"the sea {number} ", "max_tokens": 12}
        with httpx.Client(base_url=app.url, timeout=60) as client:
            while time.monotonic() < end_s:
                client.post("/v1/completions", json=prompt)
                client.post("/v1/completions", json={**prompt, "stream": True})
                client.post("/v1/embeddings", json={"input": "the quiet hill " * 9, "model": "orthrus-embed"})

    threads = [threading.Thread(target=ask, args=(app, number)) for app in apps for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_every_query_has_an_answer_under_load(prometheus: Prometheus) -> None:
    empty = [place for place, expr in QUERIES if not prometheus.numbers(expr)]
    assert sorted(empty) == sorted(UNANSWERED)


def test_every_metric_of_the_catalogue_is_scraped(prometheus: Prometheus) -> None:
    missing = [metric.name for metric in CATALOG if not prometheus.ask(f'{{__name__=~"{metric.name}(_count)?"}}')]
    assert missing == []


def test_queries_name_only_metrics_that_exist(prometheus: Prometheus) -> None:
    names = {name for _, expr in QUERIES for name in re.findall(r"\b(?:orthrus_|vllm:)\w+", expr)}
    unknown = [name for name in sorted(names) if not prometheus.ask(name)]
    assert unknown == []


def test_rules_load_and_none_fires_while_all_is_well(prometheus: Prometheus) -> None:
    rules = prometheus.rules()
    assert {rule["health"] for rule in rules} == {"ok"}
    assert len(rules) == len(
        yaml.safe_load((DASHBOARDS / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    )
    assert [name for name, state in prometheus.alerts().items() if state == "firing"] == []


def test_one_page_has_the_counts_of_all_fronts(prometheus: Prometheus, arms: App) -> None:
    fronts = {info["front"] for info in arms.info("Front")}
    told = {sample["metric"]["replica"] for sample in prometheus.ask('orthrus_front_replicas{job="seen"}')}
    assert told == fronts
    assert len(fronts) == 2


def test_the_engine_counts_what_was_asked(prometheus: Prometheus) -> None:
    ended = prometheus.numbers('sum(orthrus_requests_total{job="real",outcome="ok",kind="generate"})')[0]
    staged = prometheus.numbers('sum(orthrus_request_stage_seconds_count{job="real",kind="generate",stage="decode"})')[
        0
    ]
    assert staged >= ended > 0  # others may have used the same engine before
    assert prometheus.numbers('sum(orthrus_engine_model_flops_total{job="real"})')[0] > 0
    fill = "sum(orthrus_engine_step_tokens_total) / sum(orthrus_engine_step_budget_tokens_total)"
    assert 0 < prometheus.numbers(fill.replace("_total", '_total{job="real"}'))[0] <= 1
    steps = prometheus.numbers('sum(orthrus_engine_steps_total{job="real"})')[0]
    timed = prometheus.numbers('sum(orthrus_engine_step_duration_seconds_count{job="real"})')[0]
    assert abs(timed - steps) <= 2


@pytest.mark.parametrize("which", ["arms", "real"])
def test_promtool_finds_nothing_to_say_of_our_metrics(which: str, request: pytest.FixtureRequest) -> None:
    app: Any = request.getfixturevalue(which)
    text = httpx.get(f"{app.url}/metrics", timeout=30).text
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert checked.returncode in (0, 3), checked.stderr  # 3: it has something to say of vLLM's or Python's
    assert [line for line in (checked.stdout + checked.stderr).splitlines() if line.startswith("orthrus_")] == []


def test_ray_publishes_our_metrics_and_vllms_with_its_own_labels(prometheus: Prometheus, ray_metrics_port: int) -> None:
    def published() -> str:
        return httpx.get(f"http://127.0.0.1:{ray_metrics_port}/metrics", timeout=30).text

    wanted = (
        "ray_orthrus_requests_total",
        "ray_orthrus_engine_step_duration_seconds_bucket",
        "ray_vllm_prompt_tokens_total",
    )
    until(lambda: all(f"\n{name}{{" in published() for name in wanted), limit_s=60)
    line = next(line for line in published().splitlines() if line.startswith("ray_orthrus_requests_total{"))
    assert {'deployment="Front"', 'application="'} <= set(re.findall(r'(deployment="Front"|application=")', line))


@pytest.mark.parametrize("which", ["arms", "real"])
def test_top_shows_each_kind_of_each_replica(
    which: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    app: Any = request.getfixturevalue(which)
    loading = threading.Thread(target=under_load, args=([app], 3.0))
    loading.start()
    assert main(["top", "--once", "--interval", "2", "--base-url", app.url]) == 0
    loading.join()
    header, *lines, total = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["replica", "kind", "held"]
    assert [line.split()[1] for line in lines] == ["generate", "embed"] * {"arms": 3, "real": 1}[which]
    assert total.startswith("requests a second: ")
    if which == "real":
        assert "decode" in lines[0]
        assert "–" not in lines[1].split("embed", 1)[1].split("embed")[0]


def test_an_alert_fires_when_a_replica_is_killed(prometheus: Prometheus, arms: App) -> None:
    body = {"model": "orthrus", "prompt": "x", "max_tokens": 2, "fake": {"what": "exit"}}
    httpx.post(f"{arms.url}/v1/completions", json=body, headers={"X-Orthrus-Arm": "old"}, timeout=60)
    until(
        lambda: "firing" in {prometheus.alerts().get(name) for name in ("OrthrusReplicaLost", "OrthrusNoReplica")},
        limit_s=60,
    )


def test_the_files_rules_are_checked_by_promtool() -> None:
    subprocess.run(
        ["promtool", "check", "rules", str(Path(DASHBOARDS) / "alerts.yaml")], check=True, capture_output=True
    )
