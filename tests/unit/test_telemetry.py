"""Metric declarations keep the naming rules; log events stay on one line."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.telemetry import catalog
from orthrus_serve.telemetry.catalog import CATALOG, LABEL_VALUES, Metric
from orthrus_serve.telemetry.log import event_log, format_event

SUFFIXES = {
    "seconds": "_seconds",
    "info": "_info",
    "tokens": "_tokens",
    "requests": "_requests",
    "steps": "_steps",
    "refusals": "_refusals",
    "goals": "_goals",
}


@pytest.mark.parametrize("metric", CATALOG, ids=lambda metric: metric.name)
def test_a_metric_is_named_by_the_rules(metric):
    assert metric.name.startswith("orthrus_")
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.name.removesuffix("_total").endswith(SUFFIXES[metric.unit])
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
