"""Chooses one replica by a measure of each one's load. Pure.

A rule is a way to choose and the measure that it looks at:

    least_remaining_tokens   the fewest tokens left to compute, as corrected by the engines' reports; at home first
    in_flight_tokens         the fewest tokens charged, each request in full until it ends (as llm-d counts)
    power_of_two             the fewer open requests, of two drawn at random (as Ray Serve does by itself)
    round_robin              whoever was not chosen for longest

Fronts that go by reports of the same age all see the same replica idle, and all send to it until the next report. So each
Front has a home, its own share of the replicas, where it knows most of what is charged because it charged it itself. It looks
elsewhere, at two replicas drawn at random, only for what is much better.

Leaves out how load is measured (`ledger.py`) and which replicas may serve a request (the caller passes only those).
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orthrus_serve.types import ReplicaId, RouterRule

Measure = Literal["remaining_tokens", "in_flight_tokens", "open_requests", "last_turn"]
Loads = Mapping[ReplicaId, int]
Choose = Callable[[Sequence[ReplicaId], Loads, random.Random], ReplicaId]


# A home has at least so many replicas; together, homes always cover all.
MIN_HOME = 4
# No more than so many are looked at: among many, the least loaded of a sample is nearly the least loaded of all.
MAX_LOOKED_AT = 32
# A replica elsewhere may be so many times as loaded as the last report says.
DOUBT = 2


@dataclass(frozen=True)
class Rule:
    """A way to choose, and what it looks at. `is_at_home_first`: not everybody is looked at where the caller has a home."""

    choose: Choose
    measure: Measure
    is_at_home_first: bool = False


@dataclass(frozen=True)
class Place:
    """A Front's place among all Fronts; `rank` counts from 0."""

    rank: int
    num_fronts: int


def home_of(replicas: Collection[ReplicaId], place: Place) -> list[ReplicaId]:
    """The replicas that a Front knows best: neighbours in a circle in order of their ids.

    Every replica is in the homes of equally many Fronts, give or take one, and of at least one. Whoever knows the same replicas
    comes to the same homes.
    """
    ordered = sorted(replicas)
    size = min(len(ordered), max(MIN_HOME, -(-len(ordered) // place.num_fronts)))
    first = place.rank % place.num_fronts * len(ordered) // place.num_fronts
    return [ordered[(first + number) % len(ordered)] for number in range(size)]


def least_loaded(replicas: Sequence[ReplicaId], loads: Loads, rng: random.Random) -> ReplicaId:
    """The replica with the least load. Ties are broken at random: several Fronts choose at the same time, and a fixed order
    would send all of them to the same idle replica."""
    measured = [loads.get(replica, 0) for replica in replicas]
    least = min(measured)
    if measured.count(least) == 1:
        return replicas[measured.index(least)]
    return rng.choice([replica for replica, load in zip(replicas, measured, strict=True) if load == least])


def less_loaded_of_two(replicas: Sequence[ReplicaId], loads: Loads, rng: random.Random) -> ReplicaId:
    """The less loaded of two replicas drawn at random."""
    return least_loaded(rng.sample(replicas, min(2, len(replicas))), loads, rng)


def least_loaded_at_home(
    home: Sequence[ReplicaId], replicas: Sequence[ReplicaId], loads: Loads, rng: random.Random, num_tokens: int
) -> ReplicaId:
    """The least loaded at home, unless another of `replicas` is better even if its load is twice what is known, and somebody
    else sends it as large a request at this moment."""
    own = least_loaded(_some(home, rng), loads, rng)
    most = loads.get(own, 0)
    if most <= DOUBT * num_tokens or len(home) == len(
        replicas
    ):  # nobody can be that much better, or there is nobody else
        return own
    other = less_loaded_of_two(replicas, loads, rng)
    return other if DOUBT * (loads.get(other, 0) + num_tokens) < most else own


def _some(replicas: Sequence[ReplicaId], rng: random.Random) -> Sequence[ReplicaId]:
    return replicas if len(replicas) <= MAX_LOOKED_AT else rng.sample(replicas, MAX_LOOKED_AT)


def longest_not_chosen(replicas: Sequence[ReplicaId], last_turns: Loads, _rng: random.Random) -> ReplicaId:
    """The replica whose last turn is longest ago; at first in order of their ids, not of the list. Each in turn, also when a
    request may go to some of them only, or one joins or leaves."""
    turns = [last_turns.get(replica, 0) for replica in replicas]
    longest_ago = min(turns)
    return min(replica for replica, turn in zip(replicas, turns, strict=True) if turn == longest_ago)


RULES: Mapping[RouterRule, Rule] = {
    "least_remaining_tokens": Rule(least_loaded, "remaining_tokens", is_at_home_first=True),
    "in_flight_tokens": Rule(least_loaded, "in_flight_tokens"),
    "power_of_two": Rule(less_loaded_of_two, "open_requests"),
    "round_robin": Rule(longest_not_chosen, "last_turn"),
}


def choose_replica(
    rule: RouterRule,
    replicas: Sequence[ReplicaId],
    loads: Loads,
    rng: random.Random,
    *,
    home: Sequence[ReplicaId] = (),
    num_tokens: int = 0,
) -> ReplicaId:
    """One of `replicas`, by the rule of that name.

    Args:
        replicas: the candidates, at least one.
        loads: the rule's measure by replica; a replica that is not in it has zero.
        home: those of `replicas` that the caller knows best; without any, all are alike.
        num_tokens: what the request will add to a load.

    Raises:
        ValueError: `replicas` is empty.
    """
    if not replicas:
        raise ValueError("no replica to choose from")
    if home and RULES[rule].is_at_home_first:
        return least_loaded_at_home(home, replicas, loads, rng, num_tokens)
    return RULES[rule].choose(replicas, loads, rng)
