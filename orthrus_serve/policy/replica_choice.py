"""Chooses one replica by a measure of each one's load. Pure.

A rule is a way to choose and the measure that it looks at:

    least_remaining_tokens   the fewest tokens left to compute, as corrected by the engines' reports
    in_flight_tokens         the fewest tokens charged, each request in full until it ends (as llm-d counts)
    power_of_two             the fewer open requests, of two drawn at random (as Ray Serve does by itself)
    round_robin              whoever was not chosen for longest

Leaves out how load is measured (`ledger.py`) and which replicas may serve a request (the caller passes only those).
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orthrus_serve.types import ReplicaId, RouterRule

Measure = Literal["remaining_tokens", "in_flight_tokens", "open_requests", "last_turn"]
Loads = Mapping[ReplicaId, int]
Choose = Callable[[Sequence[ReplicaId], Loads, random.Random], ReplicaId]


@dataclass(frozen=True)
class Rule:
    """A way to choose, and what it looks at."""

    choose: Choose
    measure: Measure


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


def longest_not_chosen(replicas: Sequence[ReplicaId], last_turns: Loads, _rng: random.Random) -> ReplicaId:
    """The replica whose last turn is longest ago; at first in order of their ids, not of the list. Each in turn, also when a
    request may go to some of them only, or one joins or leaves."""
    turns = [last_turns.get(replica, 0) for replica in replicas]
    longest_ago = min(turns)
    return min(replica for replica, turn in zip(replicas, turns, strict=True) if turn == longest_ago)


RULES: Mapping[RouterRule, Rule] = {
    "least_remaining_tokens": Rule(least_loaded, "remaining_tokens"),
    "in_flight_tokens": Rule(least_loaded, "in_flight_tokens"),
    "power_of_two": Rule(less_loaded_of_two, "open_requests"),
    "round_robin": Rule(longest_not_chosen, "last_turn"),
}


def choose_replica(rule: RouterRule, replicas: Sequence[ReplicaId], loads: Loads, rng: random.Random) -> ReplicaId:
    """One of `replicas`, by the rule of that name.

    Args:
        replicas: the candidates, at least one.
        loads: the rule's measure by replica; a replica that is not in it has zero.

    Raises:
        ValueError: `replicas` is empty.
    """
    if not replicas:
        raise ValueError("no replica to choose from")
    return RULES[rule].choose(replicas, loads, rng)
