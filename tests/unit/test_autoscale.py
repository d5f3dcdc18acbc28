"""The autoscaler's decision on a simulated clock: how many replicas for how many tokens, and how soon."""

import math

from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.policy.autoscale import DOWN_SHARE, AutoscaleLimits, Call, decide

LIMITS = AutoscaleLimits(
    min_replicas=1, max_replicas=4, target_tokens_per_replica=1000, upscale_delay_s=10.0, downscale_delay_s=60.0
)


class Clock:
    """A pool that gets what is decided at once, looked at once a second."""

    def __init__(self, num_replicas: int = 1, limits: AutoscaleLimits = LIMITS) -> None:
        self.num_replicas, self.limits = num_replicas, limits
        self.call: Call | None = None
        self.now_s = 0.0
        self.changes: list[tuple[float, int]] = []

    def live(self, for_s: int, num_tokens: int, *, is_whole: bool = True) -> "Clock":
        for _ in range(for_s):
            before = self.num_replicas
            self.num_replicas, self.call = decide(
                num_tokens, before, self.limits, self.call, self.now_s, is_whole=is_whole
            )
            if self.num_replicas != before:
                self.changes.append((self.now_s, self.num_replicas))
            self.now_s += 1.0
        return self


def test_a_load_above_the_target_adds_as_many_as_it_needs_after_the_delay() -> None:
    assert Clock().live(30, 2500).changes == [(10.0, 3)]


def test_a_load_that_falls_removes_replicas_after_the_longer_delay() -> None:
    assert Clock(4).live(100, 700).changes == [(60.0, 1)]


def test_a_short_burst_changes_nothing() -> None:
    assert Clock().live(9, 4000).live(1, 900).live(9, 4000).changes == []


def test_of_a_burst_that_lasts_only_what_it_called_for_all_the_time_is_added() -> None:
    assert Clock().live(5, 3900).live(1, 1100).live(10, 3900).changes[0] == (10.0, 2)


def test_a_lull_within_a_falling_load_keeps_what_it_needs() -> None:
    assert Clock(4).live(30, 0).live(1, 2300).live(40, 0).changes[0] == (60.0, 3)


def test_a_load_around_a_threshold_starts_and_stops_nobody() -> None:
    clock = Clock(2)
    for _ in range(50):
        clock.live(20, 1050).live(200, 850)
    assert clock.changes == []


def test_the_limits_hold_whatever_the_load() -> None:
    assert Clock().live(30, 10**9).changes == [(10.0, 4)]
    assert Clock(4).live(100, 0).changes == [(60.0, 1)]


def test_new_limits_are_followed_at_once() -> None:
    two = AutoscaleLimits(2, 2, 1000, 10.0, 60.0)
    assert Clock(1, two).live(5, 0).changes == [(0.0, 2)]
    assert Clock(4, two).live(5, 10**6).changes == [(0.0, 2)]


def test_an_unknown_load_removes_nobody_and_a_large_known_part_still_adds() -> None:
    assert Clock(4).live(200, 0, is_whole=False).changes == []
    assert Clock(2).live(20, 2500, is_whole=False).changes == [(10.0, 3)]


@given(st.lists(st.tuples(st.integers(0, 6000), st.booleans()), max_size=300), st.integers(1, 4))
def test_whatever_happens_the_count_stays_within_limits_and_no_removal_leaves_too_few(
    story: list[tuple[int, bool]], num_replicas: int
) -> None:
    clock = Clock(num_replicas)
    for num_tokens, is_whole in story:
        before = clock.num_replicas
        clock.live(1, num_tokens, is_whole=is_whole)
        assert 1 <= clock.num_replicas <= 4
        if clock.num_replicas < before:
            assert is_whole
            assert num_tokens <= DOWN_SHARE * 1000 * clock.num_replicas
        if clock.num_replicas > before:
            assert clock.num_replicas <= math.ceil(num_tokens / 1000)
