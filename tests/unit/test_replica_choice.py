"""Rules that choose a replica from loads."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.policy.replica_choice import RULES, choose_replica
from orthrus_serve.types import ReplicaId

IDS = [ReplicaId(name) for name in ("a", "b", "c", "d")]
loads_of_any_size = st.dictionaries(st.sampled_from(IDS), st.integers(0, 10**9))


@given(
    st.sampled_from(sorted(RULES)),
    st.lists(st.sampled_from(IDS), min_size=1, unique=True),
    loads_of_any_size,
)
def test_every_rule_returns_a_candidate(rule, replicas, loads):
    assert choose_replica(rule, replicas, loads, random.Random(0)) in replicas


@given(
    st.sampled_from(["least_remaining_tokens", "in_flight_tokens"]),
    st.lists(st.sampled_from(IDS), min_size=1, unique=True),
    loads_of_any_size,
    st.integers(0, 99),
)
def test_no_replica_has_less_than_the_one_chosen_by_tokens(rule, replicas, loads, seed):
    chosen = choose_replica(rule, replicas, loads, random.Random(seed))
    assert loads.get(chosen, 0) == min(loads.get(replica, 0) for replica in replicas)


def test_ties_are_spread_over_all_idle_replicas():
    rng = random.Random(7)
    chosen = Counter(choose_replica("least_remaining_tokens", IDS, {IDS[0]: 5}, rng) for _ in range(600))
    assert set(chosen) == set(IDS[1:])
    assert min(chosen.values()) > 150


def test_power_of_two_never_takes_the_most_loaded_replica():
    loads = {replica: number for number, replica in enumerate(IDS)}
    rng = random.Random(3)
    assert {choose_replica("power_of_two", IDS, loads, rng) for _ in range(200)} == set(IDS[:3])


def in_turn(*candidates: list[ReplicaId]) -> list[ReplicaId]:
    """Whom round robin chooses, one after the other, from each of these lists."""
    last_turns: dict[ReplicaId, int] = {}
    chosen: list[ReplicaId] = []
    for replicas in candidates:
        chosen.append(choose_replica("round_robin", replicas, last_turns, random.Random(0)))
        last_turns[chosen[-1]] = len(chosen)
    return chosen


def test_round_robin_visits_each_replica_once_per_round_whatever_the_order_of_the_list():
    assert in_turn(*[IDS[::-1]] * 4, *[IDS] * 4) == IDS * 2


def test_round_robin_takes_turns_within_each_role_too():
    embed, generate = IDS[:2], IDS[2:]
    assert in_turn(*[embed, generate] * 4) == [IDS[0], IDS[2], IDS[1], IDS[3]] * 2


def test_choosing_from_nothing_is_refused():
    with pytest.raises(ValueError, match="no replica"):
        choose_replica("round_robin", [], {}, random.Random(0))
