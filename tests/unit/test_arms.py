"""Arms are chosen by weight, sessions stay, and a change of weights moves as few of them as it can."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.policy.arms import Mirror, choose_arm, is_mirrored

SESSIONS = [f"session-{number}" for number in range(4000)]
WEIGHTS = st.dictionaries(st.sampled_from("abcde"), st.one_of(st.just(0.0), st.floats(0.001, 1e6)), min_size=1).filter(
    lambda weights: any(weights.values())
)


def shares(chosen: list[str]) -> dict[str, float]:
    return {arm: count / len(chosen) for arm, count in Counter(chosen).items()}


def test_sessions_are_shared_by_weight():
    found = shares([choose_arm({"a": 6, "b": 3, "c": 1}, session, 0.0) for session in SESSIONS])
    assert {arm: round(share, 1) for arm, share in found.items()} == {"a": 0.6, "b": 0.3, "c": 0.1}


def test_requests_without_a_session_are_shared_by_weight():
    rng = random.Random(1)
    for session in (None, ""):
        found = shares([choose_arm({"a": 0.9, "b": 0.1}, session, rng.random()) for _ in range(10_000)])
        assert abs(found["b"] - 0.1) < 0.015


@given(WEIGHTS, st.one_of(st.none(), st.text()), st.floats(0, 1, exclude_max=True))
def test_the_choice_has_weight_and_depends_on_the_ratios_and_the_session_only(weights, session, chance):
    arm = choose_arm(weights, session, chance)
    assert weights[arm] > 0
    if session:
        reordered = dict(reversed(weights.items()))
        assert (
            arm
            == choose_arm(reordered, session, 0.5)
            == choose_arm({name: weight * 2 for name, weight in weights.items()}, session, chance)
        )


@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_between_two_arms_sessions_move_one_way_only(before, after):
    first = [choose_arm({"a": 1 - before, "b": before}, session, 0.0) for session in SESSIONS[:300]]
    then = [choose_arm({"a": 1 - after, "b": after}, session, 0.0) for session in SESSIONS[:300]]
    moved = {(old, new) for old, new in zip(first, then, strict=True) if old != new}
    assert len(moved) <= 1
    assert moved <= {("a", "b") if after > before else ("b", "a")}


def test_ten_percent_more_moves_ten_percent():
    first = [choose_arm({"a": 0.9, "b": 0.1}, session, 0.0) for session in SESSIONS]
    then = [choose_arm({"a": 0.8, "b": 0.2}, session, 0.0) for session in SESSIONS]
    assert 0.08 < sum(old != new for old, new in zip(first, then, strict=True)) / len(SESSIONS) < 0.12


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 10))
def test_one_arms_new_weight_moves_sessions_to_it_or_from_it_only(a, b, c, new_c):
    for session in SESSIONS[:200]:
        old = choose_arm({"a": a, "b": b, "c": c}, session, 0.0)
        new = choose_arm({"a": a, "b": b, "c": new_c}, session, 0.0)
        assert old == new or "c" in (old, new)


def test_a_share_of_what_the_source_answers_is_mirrored():
    mirror = Mirror("a", "b", 0.25)
    assert (is_mirrored(mirror, "a", 0.24), is_mirrored(mirror, "a", 0.25)) == (True, False)
    assert not is_mirrored(mirror, "b", 0.0)
    assert not is_mirrored(None, "a", 0.0)
