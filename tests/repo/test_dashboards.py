"""Boards, alerts, the runbook and the page of metrics agree with the catalogue and with each other."""

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from orthrus_serve.ops.metrics_page import metrics_page
from orthrus_serve.telemetry.catalog import CATALOG

ROOT = Path(__file__).parents[2]
DASHBOARDS = ROOT / "dashboards"
RULES = yaml.safe_load((DASHBOARDS / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
RULE_TESTS = yaml.safe_load((ROOT / "tests/repo/alerts_test.yaml").read_text(encoding="utf-8"))
RUNBOOK = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
FILES = sorted(DASHBOARDS.glob("*.json"))
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (Debian: apt-get install prometheus)"
)


def boards() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in FILES:
        yield file.name, json.loads(file.read_text(encoding="utf-8"))


def queries() -> Iterator[str]:
    for _, board in boards():
        for panel in board["panels"]:
            yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (rule["expr"] for rule in RULES)


def made() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("dashboards_make", DASHBOARDS / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.files()


def test_the_page_of_metrics_is_what_the_catalogue_makes() -> None:
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert text == metrics_page(), "run: .venv/bin/python -m orthrus_serve.ops.metrics_page > docs/metrics.md"


def test_the_boards_are_what_their_description_makes() -> None:
    texts = {file.name: file.read_text(encoding="utf-8") for file in FILES}
    assert texts == made(), "run: .venv/bin/python dashboards/make.py"


def test_boards_have_ids_that_stay_and_the_same_variables() -> None:
    variables = {name: [one["name"] for one in board["templating"]["list"]] for name, board in boards()}
    assert {tuple(names) for names in variables.values()} == {("datasource", "topology", "arm", "replica")}
    assert {board["uid"] for _, board in boards()} == {file.stem for file in FILES} == {
        "orthrus-health", "orthrus-batch", "orthrus-router", "orthrus-arms", "orthrus-capacity"
    }  # fmt: skip


def test_every_panel_says_what_it_shows_in_a_unit_and_asks_the_chosen_prometheus() -> None:
    for name, board in boards():
        for panel in (panel for panel in board["panels"] if panel["type"] != "row"):
            where = f"{name}: {panel['title']}"
            assert panel["description"].endswith("."), where
            assert panel["fieldConfig"]["defaults"]["unit"], where
            assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}, where


def test_queries_name_only_metrics_of_the_catalogue_and_labels_that_these_have() -> None:
    labels = {metric.name: {*metric.labels, "replica", "arm"} for metric in CATALOG}
    for metric in CATALOG:
        if metric.kind == "histogram":
            labels[f"{metric.name}_bucket"] = labels[metric.name] | {"le"}
    for query in queries():
        for name, selector in re.findall(r"(orthrus_\w+)(?:\{([^}]*)\})?", query):
            assert name in labels, query
            assert set(re.findall(r"(\w+)=", selector)) <= labels[name], query


def test_every_metric_stands_on_a_board_or_in_an_alert() -> None:
    text = " ".join(queries())
    assert [metric.name for metric in CATALOG if metric.name not in text and metric.name not in UNSEEN] == []


# Metrics that answer no question of a board: what they would show stands there by another.
UNSEEN = {"orthrus_engine_held_requests"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_has_a_runbook_section_that_says_what_to_do(rule: dict[str, Any]) -> None:
    name = rule["alert"]
    assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"
    assert rule["labels"]["severity"] in ("page", "ticket")
    (section,) = re.findall(rf"^## {name}\n\n(.*?)(?=^## |\Z)", RUNBOOK, re.DOTALL | re.MULTILINE)
    assert "**Look:**" in section
    assert "**Do:**" in section


def test_every_alert_is_tested_to_fire_and_not_to() -> None:
    cases = [case for test in RULE_TESTS["tests"] for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in cases if case["exp_alerts"]}
    waits = {case["alertname"] for case in cases if not case["exp_alerts"]}
    assert fires == {rule["alert"] for rule in RULES}
    assert waits == fires


@needs_promtool
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    rules = [{key: value for key, value in rule.items() if key != "annotations"} for rule in RULES]
    (tmp_path / "alerts.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "orthrus", "rules": rules}]}), encoding="utf-8"
    )
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(RULE_TESTS), encoding="utf-8")
    tested = subprocess.run(
        ["promtool", "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
