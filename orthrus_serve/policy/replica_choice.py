"""Chooses one replica from the remaining tokens charged to each. Pure.

Leaves out how load is measured (`ledger.py`) and which replicas may serve a request (the caller passes only those).
"""

import random
from collections.abc import Callable, Mapping, Sequence

from orthrus_serve.types import ReplicaId, RouterRule

Loads = Mapping[ReplicaId, int]


def least_remaining_tokens(replicas: Sequence[ReplicaId], loads: Loads, rng: random.Random, _turn: int) -> ReplicaId:
    """The replica with the fewest remaining tokens. Ties are broken at random: several Fronts choose at the same time,
    and a fixed order would send all of them to the same idle replica."""
    fewest = min(loads.get(replica, 0) for replica in replicas)
    return rng.choice([replica for replica in replicas if loads.get(replica, 0) == fewest])


def power_of_two(replicas: Sequence[ReplicaId], loads: Loads, rng: random.Random, turn: int) -> ReplicaId:
    """The less loaded of two replicas drawn at random."""
    return least_remaining_tokens(rng.sample(replicas, min(2, len(replicas))), loads, rng, turn)


def round_robin(replicas: Sequence[ReplicaId], _loads: Loads, _rng: random.Random, turn: int) -> ReplicaId:
    """Each replica in turn, whatever its load. The order is by id, not by the order of the list."""
    return sorted(replicas)[turn % len(replicas)]


RULES: Mapping[RouterRule, Callable[[Sequence[ReplicaId], Loads, random.Random, int], ReplicaId]] = {
    "least_remaining_tokens": least_remaining_tokens,
    "power_of_two": power_of_two,
    "round_robin": round_robin,
}


def choose_replica(
    rule: RouterRule, replicas: Sequence[ReplicaId], loads: Loads, rng: random.Random, turn: int = 0
) -> ReplicaId:
    """One of `replicas`, by the rule of that name.

    Args:
        replicas: the candidates, at least one.
        loads: remaining tokens by replica; a replica that is not in it has none.
        turn: how many requests were routed before this one; only `round_robin` looks at it.

    Raises:
        ValueError: `replicas` is empty.
    """
    if not replicas:
        raise ValueError("no replica to choose from")
    return RULES[rule](replicas, loads, rng, turn)
