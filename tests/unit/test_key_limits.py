"""Limits of a key: buckets, what is in flight, shares of several Fronts, and that nothing leaks between keys."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orthrus_serve.policy import key_limits
from orthrus_serve.policy.key_limits import KeyAccounts, KeyLimits, OverLimit, Taken


def taken(answer: Taken | OverLimit) -> Taken:
    assert isinstance(answer, Taken)
    return answer


def test_requests_a_minute_come_back_one_by_one() -> None:
    accounts = KeyAccounts(KeyLimits(requests_per_minute=60))
    for _ in range(60):
        taken(accounts.take("a", 1, 0.0))
    assert accounts.take("a", 1, 0.0) == OverLimit("requests_per_minute", pytest.approx(1.0))
    taken(accounts.take("a", 1, 1.0))
    assert isinstance(accounts.take("a", 1, 1.5), OverLimit)
    taken(accounts.take("b", 1, 1.5))  # nobody else is touched


def test_tokens_are_charged_by_estimate_and_settled_by_what_was_used() -> None:
    accounts = KeyAccounts(KeyLimits(tokens_per_minute=600))
    first = taken(accounts.take("a", 600, 0.0))
    assert accounts.take("a", 100, 0.0) == OverLimit("tokens_per_minute", pytest.approx(10.0))
    accounts.settle(first, 500)
    accounts.settle(first, 0)  # once
    taken(accounts.take("a", 100, 0.0))
    over = taken(accounts.take("b", 10, 0.0))
    accounts.settle(over, 1200)  # far more than the estimate: a debt
    assert accounts.take("b", 1, 0.0) == OverLimit("tokens_per_minute", pytest.approx(60.1))


def test_tokens_in_flight_are_capped_and_come_back_when_requests_end() -> None:
    accounts = KeyAccounts(KeyLimits(max_in_flight_tokens=100))
    first = taken(accounts.take("a", 60, 0.0))
    assert isinstance(accounts.take("a", 60, 0.0), OverLimit)
    accounts.settle(first)
    taken(accounts.take("a", 60, 0.0))


def test_a_request_that_can_never_pass_is_told_so() -> None:
    accounts = KeyAccounts(KeyLimits(tokens_per_minute=100, max_in_flight_tokens=50))
    assert accounts.take("a", 101, 0.0) == OverLimit("tokens_per_minute", None)
    assert accounts.take("a", 51, 0.0) == OverLimit("in_flight_tokens", None)


def test_each_of_several_fronts_gives_its_share_and_a_request_above_the_share_still_passes() -> None:
    accounts = KeyAccounts(KeyLimits(requests_per_minute=8, tokens_per_minute=1000, max_in_flight_tokens=1000), None, 4)
    first = taken(accounts.take("a", 900, 0.0))
    accounts.settle(first, 900)
    assert accounts.take("a", 10, 0.0) == OverLimit("tokens_per_minute", pytest.approx((10 + 650) * 60 / 250))
    assert accounts.state("b", 0.0)["requests"].limit == 8
    assert [isinstance(accounts.take("b", 1, 0.0), Taken) for _ in range(3)] == [True, True, False]


def test_a_request_that_is_refused_for_another_reason_costs_nothing() -> None:
    accounts = KeyAccounts(KeyLimits(requests_per_minute=1, tokens_per_minute=10, max_in_flight_tokens=10))
    accounts.give_back(taken(accounts.take("a", 10, 0.0)))
    taken(accounts.take("a", 10, 0.0))


def test_keys_with_limits_of_their_own_have_those() -> None:
    accounts = KeyAccounts(KeyLimits(requests_per_minute=1), {"big": KeyLimits()})
    for _ in range(100):
        taken(accounts.take("big", 10**6, 0.0))
    assert accounts.state("big", 0.0) == {}


def test_what_is_left_is_told_as_of_all_fronts() -> None:
    accounts = KeyAccounts(KeyLimits(requests_per_minute=60, tokens_per_minute=600), None, 2)
    taken(accounts.take("a", 100, 0.0))
    state = accounts.state("a", 0.0)
    assert (state["requests"].limit, state["requests"].remaining) == (60, 58)
    assert (state["tokens"].limit, state["tokens"].remaining) == (600, 400)
    assert state["tokens"].reset_s == pytest.approx(20.0)


def test_many_keys_take_bounded_memory_and_those_in_flight_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_limits, "MAX_KEYS", 3)
    accounts = KeyAccounts(KeyLimits(max_in_flight_tokens=10))
    for number in range(3):
        taken(accounts.take(f"busy{number}", 10, 0.0))
    for number in range(10):
        accounts.settle(taken(accounts.take(f"new{number}", 10, 0.0)))
    busy = [isinstance(accounts.take(f"busy{number}", 10, 0.0), OverLimit) for number in range(3)]
    assert sum(busy) >= 1


class Accounts(RuleBasedStateMachine):
    """Any order of requests, ends and time: in flight is what is open, and no bucket is above full."""

    def __init__(self) -> None:
        super().__init__()
        self.accounts = KeyAccounts(KeyLimits(requests_per_minute=30, tokens_per_minute=300, max_in_flight_tokens=200))
        self.open: list[Taken] = []
        self.now_s = 0.0
        self.num_admitted = dict.fromkeys("ab", 0)

    @rule(key=st.sampled_from("ab"), num_tokens=st.integers(1, 400))
    def take(self, key: str, num_tokens: int) -> None:
        answer = self.accounts.take(key, num_tokens, self.now_s)
        if isinstance(answer, Taken):
            self.open.append(answer)
            self.num_admitted[key] += 1

    @rule(which=st.integers(0, 100), used=st.none() | st.integers(0, 500))
    def settle(self, which: int, used: int | None) -> None:
        if self.open:
            self.accounts.settle(self.open.pop(which % len(self.open)), used)

    @rule(gap_s=st.floats(0, 30))
    def wait(self, gap_s: float) -> None:
        self.now_s += gap_s

    @rule(num_tokens=st.integers(1, 300))
    def who_waits_as_told_is_admitted(self, num_tokens: int) -> None:
        answer = self.accounts.take("a", num_tokens, self.now_s)
        while isinstance(answer, OverLimit) and answer.limit != "in_flight_tokens" and answer.wait_s is not None:
            self.now_s += answer.wait_s + 1e-6
            again = self.accounts.take("a", num_tokens, self.now_s)
            assert again != answer
            answer = again
        if isinstance(answer, Taken):
            self.open.append(answer)
            self.num_admitted["a"] += 1

    @invariant()
    def counts_hold(self) -> None:
        for key in "ab":
            in_flight = sum(one.num_tokens for one in self.open if one.key == key)
            assert in_flight <= 200
            assert self.num_admitted[key] <= 30 + self.now_s * 30 / 60 + 1e-6


TestAccounts = Accounts.TestCase
