"""When requests are due: every arrival pattern on a virtual clock, and that workers split one schedule exactly."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.arrivals import (
    Burst,
    ClosedLoop,
    Constant,
    Gamma,
    Poisson,
    Ramp,
    Replay,
    schedule,
    share_of_count,
    share_of_schedule,
    start_of_client,
)


def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def test_constant_arrivals_do_not_drift() -> None:
    assert list(islice(schedule(Constant(4.0), rng()), 6)) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25]


def gaps(arrivals: Poisson | Gamma, count: int = 40_000) -> np.ndarray:
    return np.diff(np.array(list(islice(schedule(arrivals, rng()), count))))


def test_poisson_gaps_have_the_asked_mean_and_the_spread_of_an_exponential() -> None:
    found = gaps(Poisson(20.0))
    assert found.mean() == pytest.approx(0.05, rel=0.03)
    assert found.std() / found.mean() == pytest.approx(1.0, rel=0.03)


def test_bursty_gaps_have_the_asked_mean_and_variation() -> None:
    found = gaps(Gamma(20.0, 3.0))
    assert found.mean() == pytest.approx(0.05, rel=0.06)
    assert found.std() / found.mean() == pytest.approx(3.0, rel=0.06)


def test_a_ramp_changes_its_rate_at_the_step_and_ends_with_the_last() -> None:
    times = np.array(list(schedule(Ramp(((10.0, 100.0), (50.0, 100.0))), rng())))
    assert times.max() < 200.0
    assert (times < 100).sum() == pytest.approx(1000, rel=0.1)
    assert (times >= 100).sum() == pytest.approx(5000, rel=0.1)


def test_a_burst_is_sent_as_fast_as_said() -> None:
    assert list(schedule(Burst(4, per_s=1000.0, after_s=2.0), rng())) == pytest.approx([2.0, 2.001, 2.002, 2.003])


def test_a_trace_is_replayed_at_its_speed() -> None:
    assert list(schedule(Replay((0.0, 3.0, 9.0), speed=3.0), rng())) == [0.0, 1.0, 3.0]


def test_clients_start_spread_over_the_ramp() -> None:
    loop = ClosedLoop(4, ramp_s=8.0)
    assert [start_of_client(loop, client) for client in range(4)] == [0.0, 2.0, 4.0, 6.0]


@given(total=st.integers(0, 5000), workers=st.integers(1, 9))
def test_workers_shares_add_up_and_differ_by_at_most_one(total: int, workers: int) -> None:
    shares = [share_of_count(total, worker, workers) for worker in range(workers)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1


@given(workers=st.integers(1, 7))
def test_workers_together_send_the_schedule_exactly_once(workers: int) -> None:
    whole = list(islice(schedule(Poisson(5.0), rng()), 210))
    parts = [
        list(share_of_schedule(islice(schedule(Poisson(5.0), rng()), 210), worker, workers))
        for worker in range(workers)
    ]
    assert sorted(time for part in parts for time in part) == whole
