"""The report tells a planted difference from none, and says how much longer it needs."""

import math
import random

import pytest

from orthrus_serve.policy.ab_report import Ratio, Row, Size, compare, rate, t_quantile
from orthrus_serve.policy.slices import SLICE_S, Ended, SliceLog, Told, merge_told

SIZES = {"a": Size(2, 2.0), "b": Size(2, 2.0)}


def measured(
    num_slices: int, seed: int = 1, *, slower: float = 1.0, per_slice: tuple[int, int] = (90, 90), busy: float = 0.3
) -> Told:
    """Log-normal latencies; each slice has a load of its own, which slows both arms."""
    rng, log = random.Random(seed), SliceLog(-1.0)
    for index in range(num_slices):
        load = math.exp(rng.gauss(0, busy))
        for arm, count, factor in (("a", per_slice[0], 1.0), ("b", per_slice[1], slower)):
            for _ in range(round(count * rng.uniform(0.9, 1.1))):
                took_s = 0.1 * load * factor * math.exp(rng.gauss(0, 0.5))
                at_s = (index + 0.999) * SLICE_S
                log.add(Ended(arm, "embed", max(at_s - took_s, -1.0), at_s, is_ok=True, num_tokens=100))
    return merge_told([log.told(num_slices * SLICE_S)])


def row(rows: list[Row], measure: str) -> Row:
    return next(row for row in rows if row.measure == measure)


def ratio(rows: list[Row], measure: str) -> Ratio:
    found = row(rows, measure).ratio
    assert found is not None
    return found


def test_equal_arms_cannot_be_told_apart():
    reports = [compare(measured(60, seed, per_slice=(40, 40)), "b", "a", SIZES) for seed in range(20)]
    assert {row.measure for row in reports[0]} == {
        "requests/s", "tokens/s", "end to end p50", "end to end p95", "end to end p99"
    }  # fmt: skip
    # One report in twenty may have a difference in some row that is none.
    assert sum(any(row.ratio.is_told for row in rows if row.ratio) for rows in reports) <= 2


@pytest.mark.parametrize("seed", range(5))
def test_fifteen_percent_are_found_with_enough_slices(seed):
    rows = compare(measured(120, seed, slower=1.15), "b", "a", SIZES)
    for measure in ("end to end p50", "end to end p95"):
        found = ratio(rows, measure)
        assert found.is_told
        assert found.low is not None
        assert found.high is not None
        assert 1.0 < found.low < 1.15 < found.high < 1.35


@pytest.mark.parametrize("seed", range(3))
def test_fifteen_percent_are_found_at_ten_percent_of_the_traffic(seed):
    found = ratio(compare(measured(300, seed, slower=1 / 1.15, per_slice=(180, 20)), "b", "a", SIZES), "end to end p50")
    assert found.is_told
    assert found.value < 1


def test_with_few_slices_the_data_cannot_tell_and_it_says_how_long():
    found = ratio(compare(measured(8, slower=1.15, per_slice=(40, 40)), "b", "a", SIZES), "end to end p99")
    assert (found.low, found.is_told) == (None, False)
    assert found.more_s is not None
    needed = 8 * SLICE_S + found.more_s
    longer = compare(measured(math.ceil(needed / SLICE_S), slower=1.15, per_slice=(40, 40)), "b", "a", SIZES)
    assert ratio(longer, "end to end p99").low is not None


def test_an_interval_that_holds_one_says_how_long_it_would_take_if_it_is_as_it_looks():
    found = ratio(compare(measured(10, seed=3, slower=1.1, per_slice=(30, 30)), "b", "a", SIZES), "end to end p50")
    assert not found.is_told
    assert found.low is not None
    assert found.more_s is not None
    assert found.more_s >= SLICE_S


def test_throughput_is_counted_per_gpu():
    told = measured(40, per_slice=(180, 90))
    rows = compare(told, "b", "a", {"a": Size(4, 4.0), "b": Size(1, 1.0)})
    assert ratio(rows, "requests/s").value == pytest.approx(2.0, rel=0.03)
    assert row(rows, "requests/s").of == pytest.approx(9.0, rel=0.03)
    mean, half = rate(told, ("a", "embed"), lambda cell: cell.tokens)
    assert mean == pytest.approx(1800, rel=0.03)
    assert half is not None
    assert 0 < half < 100


def test_an_arm_that_answered_nothing_is_compared_with_nothing():
    rows = compare(measured(20, per_slice=(90, 0)), "b", "a", SIZES)
    assert rows
    assert all(row.ratio is None for row in rows)
    assert compare(Told(SLICE_S, 0.0, ()), "b", "a", SIZES) == []


@pytest.mark.parametrize(("share", "degrees", "exact"), [(0.975, 4, 2.776), (0.995, 4, 4.604), (0.975, 19, 2.093)])
def test_students_t(share, degrees, exact):
    assert t_quantile(share, degrees) == pytest.approx(exact, rel=0.01)
