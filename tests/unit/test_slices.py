"""Sketches keep their error and merge in any order; slices keep an hour, whole slices, and one comparison."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.policy.sketch import LARGEST, RELATIVE_ERROR, SMALLEST, QuantileSketch, merged
from orthrus_serve.policy.slices import (
    MAX_SLICES,
    MAX_TOLD,
    SLICE_S,
    Ended,
    SliceLog,
    coarsened,
    from_page,
    merge_slices,
    merge_told,
    to_page,
)

VALUES = st.lists(st.floats(SMALLEST, LARGEST), min_size=1, max_size=50)


def sketch_of(values: list[float]) -> QuantileSketch:
    sketch = QuantileSketch()
    for value in values:
        sketch.add(value)
    return sketch


@given(VALUES, st.floats(0, 1))
def test_a_quantile_is_within_the_relative_error_of_the_value_of_that_rank(values, share):
    exact = sorted(values)[math.floor(share * (len(values) - 1))]
    found = sketch_of(values).quantile(share)
    assert found is not None
    assert abs(found - exact) <= RELATIVE_ERROR * exact * (1 + 1e-9)


@given(VALUES, VALUES, VALUES)
def test_merging_is_associative_and_the_same_as_one_sketch_of_all(one, two, three):
    a, b, c = sketch_of(one), sketch_of(two), sketch_of(three)
    left, right = merged([merged([a, b]), c]), merged([a, merged([b, c])])
    assert left.buckets == right.buckets == merged([c, a, b]).buckets == sketch_of([*one, *two, *three]).buckets


def test_a_sketch_has_few_buckets_and_takes_what_is_out_of_bounds():
    sketch = sketch_of([0.0, -1.0, 1e300, math.inf, *(1.01**power for power in range(-2000, 2000))])
    assert len(sketch.buckets) < 2600
    assert QuantileSketch().quantile(0.5) is None


def ended(at_s: float, arm: str = "a", took_s: float = 1.0, **fields: object) -> Ended:
    return Ended(arm, "embed", at_s - took_s, at_s, is_ok=True, num_tokens=7, **fields)  # type: ignore[arg-type]


def test_only_whole_slices_of_this_comparison_are_told():
    log = SliceLog(3.0)
    for at_s in (4.0, 9.0, 12.0, 18.0, 25.0, 31.0):
        log.add(ended(at_s))
    told = merge_told([log.told(33.0)])
    assert [cells["a", "embed"].ok for cells in told.slices] == [2, 1]  # not the one it began in, not the present one
    log.restart(34.0)
    log.add(ended(34.5))  # began before
    log.add(ended(45.0))
    assert [dict(cells) for cells in merge_told([log.told(49.0)]).slices] == []
    assert [cells["a", "embed"].ok for cells in merge_told([log.told(50.0)]).slices] == [1]


def test_an_hour_is_kept():
    log = SliceLog(0.0)
    for index in range(2 * MAX_SLICES):
        log.add(ended(index * SLICE_S + 5.0))
    assert len(log._slices) == MAX_SLICES
    told = merge_told([log.told(2 * MAX_SLICES * SLICE_S)])
    assert len(told.slices) == MAX_SLICES
    coarse = coarsened(told)
    assert (len(coarse.slices), coarse.slice_s) == (MAX_TOLD, 60.0)
    assert merge_slices(coarse.slices)["a", "embed"].ok == MAX_SLICES


def test_failures_count_and_have_no_latency_and_copies_are_told_apart():
    log = SliceLog(0.0)
    log.add(ended(15.0, is_mirrored=True, ttft_s=0.1))
    log.add(Ended("a", "embed", 14.0, 15.0, is_ok=False))
    cell = merge_told([log.told(20.0)]).slices[0]["a", "embed"]
    assert (cell.ok, cell.failed, cell.mirrored, cell.tokens, cell.ttft.count, cell.e2e.count) == (1, 1, 1, 7, 1, 1)


EVENTS = st.lists(st.tuples(st.floats(1, 200), st.sampled_from("ab")), max_size=30)


@given(EVENTS, EVENTS)
def test_fronts_merge_as_if_they_were_one_and_a_page_is_read_back(one, two):
    logs = [SliceLog(0.0), SliceLog(0.0), SliceLog(0.0)]
    for which, events in ((0, one), (1, two), (2, [*one, *two])):
        for at_s, arm in events:
            logs[which].add(ended(at_s, arm, took_s=0.5))
    parts, whole = merge_told([logs[0].told(200.0), logs[1].told(200.0)]), merge_told([logs[2].told(200.0)])
    page = json.loads(json.dumps(to_page(parts)))
    for told in (parts, from_page(page)):
        assert len(told.slices) == len(whole.slices) == 19
        for mine, theirs in zip(told.slices, whole.slices, strict=True):
            assert {key: (cell.ok, cell.e2e.buckets) for key, cell in mine.items()} == {
                key: (cell.ok, cell.e2e.buckets) for key, cell in theirs.items()
            }


def test_a_front_that_started_later_shortens_the_time():
    old, new = SliceLog(0.0), SliceLog(100.0)
    old.add(ended(15.0))
    told = merge_told([old.told(150.0), new.told(150.0)])
    assert (len(told.slices), told.since_s) == (4, 50.0)
    assert merge_told([]).slices == ()
