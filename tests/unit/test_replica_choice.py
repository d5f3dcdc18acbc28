"""Rules that choose a replica from loads."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.policy.replica_choice import MAX_LOOKED_AT, MIN_HOME, RULES, Place, choose_replica, home_of
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


# --- at home first --------------------------------------------------------------------------------------------------


def ids(number: int) -> list[ReplicaId]:
    return [ReplicaId(f"{at:04d}") for at in range(number)]


@given(st.integers(1, 200), st.integers(1, 80))
def test_every_replica_is_at_home_with_equally_many_fronts(num_replicas, num_fronts):
    homes = [home_of(ids(num_replicas), Place(rank, num_fronts)) for rank in range(num_fronts)]
    size = len(homes[0])
    assert all(len(set(home)) == size == len(home) for home in homes)
    assert size == min(num_replicas, max(MIN_HOME, -(-num_replicas // num_fronts)))
    counts = Counter(replica for home in homes for replica in home)
    if num_fronts * size >= num_replicas and num_fronts <= num_replicas:
        assert set(counts) == set(ids(num_replicas))
        assert max(counts.values()) - min(counts.values()) <= 1


@given(st.permutations(ids(9)), st.integers(0, 3))
def test_a_home_does_not_depend_on_the_order_of_the_list(replicas, rank):
    assert home_of(replicas, Place(rank, 4)) == home_of(ids(9), Place(rank, 4))


def at_home(loads, num_tokens=10, home=IDS[:2], replicas=IDS, seed=1):
    return choose_replica(
        "least_remaining_tokens", replicas, loads, random.Random(seed), home=home, num_tokens=num_tokens
    )


def test_a_request_stays_at_home_unless_somewhere_else_is_better_even_if_twice_as_loaded_as_known():
    a, b, c, d = IDS
    assert {at_home({a: 100, b: 90, c: 60, d: 60}, seed=seed) for seed in range(50)} == {b}
    assert {at_home({a: 100, b: 90, c: 34, d: 34}, seed=seed) for seed in range(50)} == {b, c, d}  # 2 x (34 + 10) < 90
    assert {at_home({a: 100, b: 90, c: 35, d: 35}, seed=seed) for seed in range(50)} == {b}
    assert {at_home({a: 20, b: 20}, seed=seed) for seed in range(50)} == {a, b}, (
        "an idle one elsewhere is not that much better"
    )


def test_with_a_home_other_rules_are_as_they_were():
    loads = {IDS[0]: 3, IDS[1]: 2, IDS[2]: 1}
    for rule in ("in_flight_tokens", "round_robin"):
        assert choose_replica(rule, IDS, loads, random.Random(0), home=IDS[:1], num_tokens=1) == IDS[3]


def test_of_a_large_home_a_sample_is_looked_at():
    replicas = ids(1000)

    class Loads(dict):
        num_asked = 0

        def get(self, key, default=None):
            self.num_asked += 1
            return super().get(key, default)

    loads = Loads(dict.fromkeys(replicas, 500))
    at_home(loads, num_tokens=1, home=replicas, replicas=replicas)
    assert MAX_LOOKED_AT <= loads.num_asked <= MAX_LOOKED_AT + 3
