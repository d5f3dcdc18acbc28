"""Metric declarations keep the naming rules; log events stay on one line."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.telemetry import catalog
from orthrus_serve.telemetry.catalog import CATALOG, LABEL_VALUES, Metric
from orthrus_serve.telemetry.log import configure, event_log, format_event


@pytest.mark.parametrize("metric", CATALOG, ids=lambda metric: metric.name)
def test_a_metric_is_named_by_the_rules(metric):
    assert metric.name.startswith("orthrus_")
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.name.removesuffix("_total").endswith(f"_{metric.unit}")
    assert metric.help.endswith(".")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))


@pytest.mark.parametrize("metric", CATALOG, ids=lambda metric: metric.name)
def test_labels_are_bounded_and_leave_rays_own_to_ray(metric):
    assert set(metric.labels) <= set(LABEL_VALUES)
    assert not set(metric.labels) & {"application", "deployment", "replica", "route"}


def test_every_declared_metric_is_in_the_catalogue_once():
    declared = [value for value in vars(catalog).values() if isinstance(value, Metric)]
    assert sorted(metric.name for metric in declared) == sorted(metric.name for metric in CATALOG)
    assert len({metric.name for metric in CATALOG}) == len(CATALOG)


def test_an_event_is_its_name_and_fields(caplog):
    with caplog.at_level(logging.INFO, "orthrus_serve.test"):
        event_log("orthrus_serve.test").info("request_rejected", request_id="r1", load=4096, wait_s=0.1234567891)
    (record,) = caplog.records
    assert record.getMessage() == "request_rejected request_id=r1 load=4096 wait_s=0.123457"
    assert record.filename == "test_telemetry.py"


@given(st.text(max_size=20))
def test_whatever_a_field_holds_the_event_stays_on_one_line_and_can_be_read_back(value):
    line = format_event("e", {"a": value, "b": 1})
    assert len(line.splitlines()) == 1
    written = line.removeprefix("e a=").removesuffix(" b=1")
    assert (json.loads(written) if written.startswith('"') else written) == value


@pytest.fixture
def own_logger():
    name = "orthrus_serve_test_configured"
    yield name
    logging.getLogger(name).handlers.clear()


def test_a_configured_process_writes_events_of_its_level_as_words(own_logger, capsys):
    configure("info", as_json=False, root=own_logger)
    event_log(f"{own_logger}.x").info("request_ended", request_id="r1", took_s=0.5)
    event_log(f"{own_logger}.x").debug("unheard")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"INFO {own_logger}.x request_ended request_id=r1 took_s=0.5")


def test_or_as_json_with_numbers_as_numbers(own_logger, capsys):
    configure("warning", as_json=True, root=own_logger)
    try:
        raise ValueError("no")
    except ValueError:
        event_log(own_logger).exception("failed", replica=None, tries=2, cause=ValueError("a b"))
    told = json.loads(capsys.readouterr().err)
    assert {key: told[key] for key in ("level", "event", "replica", "tries", "cause")} == {
        "level": "error", "event": "failed", "replica": None, "tries": 2, "cause": "a b"
    }  # fmt: skip
    assert "ValueError: no" in told["exception"]


def test_configuring_again_writes_each_event_once(own_logger, capsys):
    for _ in range(2):
        configure("info", as_json=False, root=own_logger)
    event_log(own_logger).info("once")
    assert len(capsys.readouterr().err.splitlines()) == 1
