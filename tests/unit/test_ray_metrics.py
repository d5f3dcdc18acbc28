"""What is handed to Ray adds up to what was counted."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from orthrus_serve.policy.balance import imbalance_ratio
from orthrus_serve.serving.ray_metrics import Buckets, RayCopy, histograms_of, values_between
from orthrus_serve.telemetry.device_peaks import peak_flops

BOUNDS = (0.1, 1.0, 10.0)


class FakeRay:
    """Stands for `ray.serve.metrics`: remembers every value by name and labels."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], list[float]] = {}

    def _made(self, name: str, *_: Any) -> Any:
        ray = self

        class Made:
            def add(self, value: float, tags: dict[str, str]) -> None:
                ray.values.setdefault((name, ",".join(tags.values())), []).append(value)

            inc = set = observe = add

        return Made()

    Counter = Gauge = Histogram = _made


def test_counters_are_handed_on_by_their_increase_and_gauges_as_they_are() -> None:
    registry, ray = CollectorRegistry(), FakeRay()
    counter = Counter("orthrus_x_total", "X.", ["kind"], registry=registry)
    gauge = Gauge("vllm:y", "Y.", ["kind"], registry=registry)
    Gauge("python_z", "Z.", registry=registry)
    copy = RayCopy(registry.collect, ray)
    counter.labels("embed").inc(3)
    gauge.labels("embed").set(7)
    list(copy.copy())
    counter.labels("embed").inc(2)
    gauge.remove("embed")
    list(copy.copy())
    assert ray.values == {("orthrus_x_total", "embed"): [3.0, 2.0], ("vllm_y", "embed"): [7.0, 0.0]}


def test_a_value_for_every_token_is_not_handed_on() -> None:
    registry, ray = CollectorRegistry(), FakeRay()
    Histogram("vllm:inter_token_latency_seconds", "I.", registry=registry).observe(1.0)
    list(RayCopy(registry.collect, ray).copy())
    assert ray.values == {}


@given(st.lists(st.lists(st.floats(0.001, 9.99), max_size=20), min_size=1, max_size=3))
def test_a_histogram_in_ray_has_the_same_counts_and_the_same_sum(batches: list[list[float]]) -> None:
    registry, ray = CollectorRegistry(), FakeRay()
    histogram = Histogram("orthrus_h_seconds", "H.", registry=registry, buckets=BOUNDS)
    copied = Histogram("copied", "H.", registry=CollectorRegistry(), buckets=BOUNDS)
    copy = RayCopy(registry.collect, ray)
    for batch in batches:
        for value in batch:
            histogram.observe(value)
        list(copy.copy())
    for value in ray.values.get(("orthrus_h_seconds", ""), []):
        copied.observe(value)
    (there,) = histograms_of(next(iter(histogram.collect()))).values()
    (here,) = histograms_of(next(iter(copied.collect()))).values()
    assert here.counts == there.counts
    assert here.sum == pytest.approx(there.sum, rel=1e-3, abs=1e-3)


def test_values_beyond_the_last_bound_stay_beyond_it() -> None:
    new = Buckets([0.1, 1.0, float("inf")], [0, 0, 2], 6.0)
    values = list(values_between(Buckets(new.bounds, [0, 0, 0], 0.0), new))
    assert len(values) == 2
    assert min(values) > 1.0


@pytest.mark.parametrize(
    ("loads", "ratio"), [([5, 5], 1.0), ([0, 0, 0], 1.0), ([9, 0, 0], 3.0), ([3, 1], 1.5), ([7], 1.0)]
)
def test_imbalance_is_the_busiest_over_the_mean(loads: list[int], ratio: float) -> None:
    assert imbalance_ratio(loads) == ratio


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA A100-SXM4-80GB", 312.0), ("Tesla T4", 65.0),
     ("NVIDIA L40S", 362.0), ("NVIDIA H200", 989.4), ("NVIDIA H20", 148.0)],
)  # fmt: skip
def test_a_device_is_known_by_its_name(name: str, tflops: float) -> None:
    assert peak_flops(name) == tflops * 1e12


@pytest.mark.parametrize("name", ["cpu", "", "NVIDIA T400"])
def test_an_unknown_device_has_no_peak(name: str) -> None:
    assert peak_flops(name) is None
