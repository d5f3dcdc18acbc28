"""Percentiles and confidence intervals against samples whose answer is known."""

import numpy as np
import pytest

from loadgen.bound import load_balance_bound
from loadgen.intervals import mean_of, quantiles, rate, ratio_of_pairs
from loadgen.quality import contains, exact_match, f1, recall, short_answer
from loadgen.server_metrics import Reading, parse_page, window


def test_the_interval_of_a_mean_is_student_s() -> None:
    estimate = mean_of([1.0, 2.0, 3.0])
    assert estimate.value == 2.0
    assert estimate.low == pytest.approx(2.0 - 4.303 / np.sqrt(3))
    assert mean_of([5.0]).low is None


def test_a_steady_rate_has_no_spread_and_a_bursty_one_has() -> None:
    steady = rate([(tick + 0.5) / 10 for tick in range(1000)], 0.0, 100.0)
    assert steady.value == pytest.approx(10.0)
    assert steady.low == pytest.approx(steady.high)
    bursty = rate([0.01 * tick for tick in range(1000)], 0.0, 100.0)
    assert bursty.low is not None
    assert bursty.high is not None
    assert bursty.value == pytest.approx(10.0)
    assert bursty.high - bursty.low > 5


def test_neighbours_that_are_alike_make_a_quantile_less_sure() -> None:
    rng = np.random.default_rng(0)
    independent = rng.exponential(size=2000)
    alike = np.repeat(rng.exponential(size=40), 50)
    [sure] = quantiles(independent.tolist(), [0.5], np.random.default_rng(1))
    [unsure] = quantiles(alike.tolist(), [0.5], np.random.default_rng(1))
    assert sure.low is not None
    assert sure.high is not None
    assert unsure.low is not None
    assert unsure.high is not None
    assert unsure.high - unsure.low > 2 * (sure.high - sure.low)
    assert sure.low < np.log(2) < sure.high


def test_a_quantile_with_too_few_values_beyond_it_has_no_interval() -> None:
    p50, p99 = quantiles([float(value) for value in range(100)], [0.5, 0.99], np.random.default_rng(0))
    assert p50.low is not None
    assert (p99.value, p99.low) == (pytest.approx(98.01), None)


def test_a_ratio_comes_from_the_pairs_of_rounds() -> None:
    ratio = ratio_of_pairs([20.0, 40.0, 80.0], [10.0, 20.0, 40.0])  # everything doubles between rounds, the ratio stays
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == (pytest.approx(2.0),) * 3
    assert ratio_of_pairs([0.0], [1.0]) is None


@pytest.mark.parametrize(
    ("share", "split", "expected"),
    [
        (0.9, (1, 1), 1.76),
        (0.5, (1, 1), 1.11),
        (0.1, (1, 1), 1.84),
        (0.9, (1, 3), 3.51),
        (0.5, (1, 3), 1.78),
        (0.1, (1, 3), 1.22),
    ],
)
def test_the_load_balance_bound_of_the_measured_single_kind_rates(
    share: float, split: tuple[int, int], expected: float
) -> None:
    """Rates of one H200: 53.4 embeddings or 42.7 generations per second."""
    assert load_balance_bound(share, split, 53.4, 42.7) == pytest.approx(expected, abs=0.006)


def test_answers_are_scored_as_squad_does() -> None:
    assert exact_match("The  Port of Spain!", "port of spain") == 1.0
    assert f1("Port of Spain, Trinidad", "Port of Spain") == pytest.approx(2 * (3 / 4) * 1 / (3 / 4 + 1))
    assert f1("yes it is", "yes") == 0.0
    assert contains("He died on 20 March 851 in Tours.", "20 March 851") == 1.0
    assert contains("Corky", "Cork") == 0.0
    assert short_answer("\n Answer: Cork\nBecause") == "Cork"
    assert recall(["a", "b", "b"], ["b", "c"]) == 0.5


PAGE = """# HELP x y
vllm:prefix_cache_queries_total{engine="0"} 100.0
vllm:prefix_cache_queries_total{engine="1"} 50
ray_vllm_prefix_cache_hits_total{WorkerId="a"} 3e1
vllm:external_prefix_cache_hits_total{engine="0"} 7
ray_orthrus_engine_step_tokens_total{part="decode"} 10
ray_orthrus_engine_step_tokens_total{part="embed"} 80
orthrus_engine_step_budget_tokens_total 100
orthrus_engine_steps_total 4
orthrus_engine_mixed_steps_total 3
vllm:num_requests_running{engine="0"} 6
broken line
"""


def test_server_counters_are_summed_over_labels_whoever_exports_them() -> None:
    values = {name: sum(series.values()) for name, series in parse_page(PAGE).items()}
    assert values["prefix_queries"] == 150
    assert values["prefix_hits"] == 30
    assert values["step_tokens"] == 90
    assert (values["steps"], values["mixed_steps"]) == (4, 3)


def reading(at_s: float, **values: float | dict[str, float]) -> Reading:
    return Reading(at_s, {name: value if isinstance(value, dict) else {"": value} for name, value in values.items()})


def test_only_what_the_server_counted_during_the_window_is_reported() -> None:
    readings = [
        reading(0.0, prefix_queries=100.0, prefix_hits=100.0, step_tokens=0.0, step_budget_tokens=0.0),
        reading(5.0, prefix_queries=200.0, prefix_hits=100.0, step_tokens=90.0, step_budget_tokens=100.0),
        reading(9.0, prefix_queries=900.0, prefix_hits=900.0, step_tokens=99.0, step_budget_tokens=999.0),
    ]
    found = window(readings, 0.5, 4.5)
    assert (found.prefix_hit_ratio, found.step_fill) == (0.0, pytest.approx(0.9))
    assert found.mixed_step_ratio is None
    assert window([], 0.0, 1.0).step_fill is None


@pytest.mark.parametrize("missing_at_s", [2.0, 6.0])
def test_a_replica_that_a_page_lacked_once_does_not_count_with_its_whole_history(missing_at_s: float) -> None:
    readings = [
        reading(at_s, steps={"a": 10 * at_s, "b": 1e6 + 10 * at_s}, mixed_steps={"a": 5 * at_s, "b": 1e6})
        for at_s in (0.0, 2.0, 4.0, 6.0, 8.0)
    ]
    for of_both in next(r for r in readings if r.at_s == missing_at_s).values.values():
        del of_both["b"]
    found = window(readings, 2.5, 5.5)
    assert found.mixed_step_ratio is not None
    assert 0.15 < found.mixed_step_ratio < 0.3  # half of a's steps, none of b's
