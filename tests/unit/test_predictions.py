"""What a prediction is made of: rates from an engine's counts, the factor learnt from recent requests, promises."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.policy import calibration
from orthrus_serve.policy.calibration import MEMORY_S, PRIOR_FACTOR, Calibration
from orthrus_serve.policy.promises import GRACE_S, MAX_WAIT_S, Promises
from orthrus_serve.policy.service_rate import Done, PoolRates, Rate, ServiceRate
from orthrus_serve.types import ReplicaId

A, B = ReplicaId("a"), ReplicaId("b")

# --- rates ----------------------------------------------------------------------------------------------------------


def test_the_rate_is_tokens_over_busy_time_of_both_kinds() -> None:
    rate = ServiceRate()
    rate.see(Done({"generate": 100, "embed": 100}, 1, 0.1))
    assert rate.rate is None  # too little to tell
    rate.see(Done({"generate": 400, "embed": 600}, 10, 1.0))
    assert rate.rate == Rate(1000.0, 0.1)


def test_an_engine_with_little_to_do_is_not_taken_for_slow() -> None:
    rate = ServiceRate()
    rate.see(Done({"generate": 100_000}, 100, 10.0))
    for second in range(1, 61):  # one decode at a time: 50 tokens a second
        rate.see(Done({"generate": 100_000 + 50 * second}, 100 + 50 * second, 10.0 + second))
    assert rate.rate is not None
    assert rate.rate.tokens_per_s > 8_000
    assert rate.rate.step_s == pytest.approx(0.02, rel=0.01)


def test_an_engine_that_really_became_slower_is_believed() -> None:
    rate = ServiceRate()
    rate.see(Done({"embed": 10_000}, 10, 10.0))
    for second in range(1, 41):
        rate.see(Done({"embed": 10_000 + 400 * second}, 10 + second, 10.0 + second))
    assert rate.rate is not None
    assert rate.rate.tokens_per_s == pytest.approx(400, rel=0.25)


def test_old_reports_are_ignored() -> None:
    rate = ServiceRate()
    rate.see(Done({"embed": 1000}, 1, 1.0))
    rate.see(Done({"embed": 10}, 1, 0.5))
    rate.see(Done({"embed": 2000}, 2, 2.0))
    assert rate.rate == Rate(1000.0, 1.0)


def test_a_new_engine_is_taken_to_be_as_fast_as_the_others() -> None:
    rates = PoolRates()
    assert rates.of(A) is None
    rates.see(A, Done({"embed": 1000}, 10, 1.0))
    assert rates.of(B) == rates.of(A) == Rate(1000.0, 0.1)
    rates.keep_only([B])
    assert rates.of(A) is None


# --- the factor -----------------------------------------------------------------------------------------------------


def test_without_samples_the_factor_is_the_prior_and_few_samples_can_only_raise_it() -> None:
    learnt = Calibration()
    assert learnt.factor(1.0, 0.0) == PRIOR_FACTOR
    learnt.observe(1.0, 0.5, 0.0)
    assert learnt.factor(1.0, 0.0) == PRIOR_FACTOR
    learnt.observe(1.0, 3.0, 0.0)
    assert learnt.factor(1.0, 0.0) == 3.0


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0])
def test_of_requests_like_those_seen_one_in_a_hundred_takes_longer(spread: float) -> None:
    rng, learnt, missed = random.Random(5), Calibration(), 0
    for number in range(6000):
        predicted_s, now_s = rng.uniform(0.1, 2.0), number / 20
        actual_s = predicted_s * rng.lognormvariate(0.0, spread)
        if number >= 1000:
            missed += actual_s > predicted_s * learnt.factor(predicted_s, now_s)
        learnt.observe(predicted_s, actual_s, now_s)
    assert 0.004 < missed / 5000 < 0.016


def test_the_factor_is_that_of_requests_with_a_similar_prediction() -> None:
    learnt = Calibration()
    for number in range(300):
        learnt.observe(0.1 + number / 1e6, 0.5, 0.0)  # a fixed cost makes short ones five times as long
        learnt.observe(5.0 + number / 1e6, 5.5, 0.0)
    assert learnt.factor(0.1, 1.0) == pytest.approx(5.0, rel=0.01)
    assert learnt.factor(5.0, 1.0) == pytest.approx(1.1, rel=0.01)


def test_what_is_old_is_forgotten() -> None:
    learnt = Calibration()
    for _ in range(100):
        learnt.observe(1.0, 50.0, 0.0)
    assert learnt.factor(1.0, MEMORY_S - 1) == 50.0
    assert learnt.factor(1.0, MEMORY_S + 1) == PRIOR_FACTOR


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1000), st.floats(0, 20)), max_size=60), st.floats(0, 100))
def test_any_samples_give_a_factor_within_what_was_seen(samples: list[tuple[float, float, float]], x: float) -> None:
    learnt, now_s = Calibration(), 0.0
    for predicted_s, actual_s, gap_s in samples:
        now_s += gap_s
        learnt.observe(predicted_s, actual_s, now_s)
    factor = learnt.factor(x, now_s)
    most = max((actual / max(predicted, 0.001) for predicted, actual, _ in samples), default=0.0)
    assert 0 <= factor <= max(most, PRIOR_FACTOR)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "NUM_REMEMBERED", 50)
    learnt = Calibration()
    for number in range(500):
        learnt.observe(number % 7, 1.0, 0.0)
    assert len(learnt._by_age) == len(learnt._by_prediction) == 50


# --- promises -------------------------------------------------------------------------------------------------------


def test_a_promise_is_good_from_its_time_on_for_a_while() -> None:
    promises = Promises()
    assert promises.promise(1, 100, 2.0, 10.0) == 2.0
    assert not promises.is_due(1, 11.0)
    assert promises.is_due(1, 12.0)
    assert promises.is_due(1, 12.0 + GRACE_S)
    assert not promises.is_due(2, 12.0)
    assert not promises.is_due(1, 12.1 + GRACE_S)


def test_the_share_of_those_who_come_back_is_learnt_and_weighs_what_is_promised() -> None:
    promises = Promises()
    for number in range(300):
        promises.promise(number, 100, 1.0, float(number))
    assert promises.share < 0.1
    now_s = 1000.0
    for number in range(300):
        promises.promise(number, 100, 1.0, now_s)
    promises.is_due(0, now_s + 1)
    for number in range(299):
        promises.redeem(number)
    assert promises.share > 0.9
    assert 90 < promises.expected_tokens <= 100


def test_nothing_is_promised_for_later_than_a_minute() -> None:
    promises = Promises()
    assert promises.promise(1, 100, 61.0, 0.0) == MAX_WAIT_S
    assert promises.expected_tokens == 0
    assert not promises.is_due(1, 60.0)


def test_a_second_promise_replaces_the_first() -> None:
    promises = Promises()
    promises.promise(1, 100, 1.0, 0.0)
    promises.promise(1, 100, 3.0, 0.5)
    assert promises.expected_tokens == 50
    assert not promises.is_due(1, 1.0)
    assert promises.is_due(1, 3.5)
