"""Which replicas exist, what kinds they serve, and by which rule requests reach them: one frozen value per topology.

Pure data and its expansion. Leaves out Ray (`app.py` turns pools into deployments) and the policies' own arithmetic
(`step_plan.py`). A new topology is one more row in `PRESETS` and a file in `configs/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from orthrus_serve.policy.replica_choice import RouterRule
from orthrus_serve.types import PolicyName, RequestKind


@dataclass(frozen=True)
class Pool:
    """Replicas that are alike. `name` is also the name of their Serve deployment."""

    name: str
    num_replicas: int
    num_gpus_per_replica: float
    kinds: tuple[RequestKind, ...]
    policy: PolicyName


@dataclass(frozen=True)
class Topology:
    """A whole application: its pools, its Fronts, and the router's rule."""

    name: PolicyName
    pools: tuple[Pool, ...]
    num_fronts: int
    router_rule: RouterRule

    @property
    def num_gpus(self) -> float:
        """GPUs that all pools take together."""
        return sum(pool.num_replicas * pool.num_gpus_per_replica for pool in self.pools)


@dataclass(frozen=True)
class PoolPreset:
    """A pool before it is known how many replicas there are."""

    name: str
    kinds: tuple[RequestKind, ...]
    policy: PolicyName


@dataclass(frozen=True)
class Preset:
    """A topology before its size is known."""

    pool: PoolPreset
    router_rule: RouterRule


def _mixed(policy: PolicyName) -> Preset:
    """Every replica serves both kinds. All three share the router's rule, so that a comparison varies one thing only."""
    pool = PoolPreset(name="Engine", kinds=("generate", "embed"), policy=policy)
    return Preset(pool=pool, router_rule="least_remaining_tokens")


PRESETS: Mapping[PolicyName, Preset] = {
    "orthrus": _mixed("orthrus"),
    "hetero_fcfs": _mixed("hetero_fcfs"),
    "unified_homo": _mixed("unified_homo"),
}

STEP_HOLDS: Mapping[PolicyName, str] = {
    "orthrus": "embed chunks, prefill chunks and decodes, shared by remaining tokens",
    "hetero_fcfs": "embed chunks, prefill chunks and decodes, in order of arrival",
    "unified_homo": "one kind, embed or generate, alternating from step to step",
}

RULE_SAYS: Mapping[RouterRule, str] = {
    "least_remaining_tokens": "the replica with the fewest remaining tokens, ties at random",
    "power_of_two": "the less loaded of two replicas drawn at random",
    "round_robin": "each replica in turn",
}


def expand(
    name: PolicyName, *, num_replicas: int, num_gpus_per_replica: float = 1.0, num_fronts: int | None = None
) -> Topology:
    """The topology of that name for so many engine replicas; `num_fronts` None means one for every two of them."""
    preset = PRESETS[name]
    pool = Pool(
        name=preset.pool.name,
        num_replicas=num_replicas,
        num_gpus_per_replica=num_gpus_per_replica,
        kinds=preset.pool.kinds,
        policy=preset.pool.policy,
    )
    fronts = (num_replicas + 1) // 2 if num_fronts is None else num_fronts
    return Topology(name=name, pools=(pool,), num_fronts=fronts, router_rule=preset.router_rule)


def describe(topology: Topology) -> list[str]:
    """The lines that `orthrus-serve plan` prints."""
    total = f"{_count(topology.num_gpus, 'GPU')} in all" if topology.num_gpus else "on CPU"
    lines = [
        f"topology     {topology.name}: {total}",
        f"front        {_count(topology.num_fronts, 'replica')}: HTTP, and the choice of the engine replica",
    ]
    for pool in topology.pools:
        gpus = f"{_count(pool.num_gpus_per_replica, 'GPU')} each" if pool.num_gpus_per_replica else "on CPU"
        kinds = " and ".join(pool.kinds)
        lines.append(f"pool         {pool.name}: {_count(pool.num_replicas, 'replica')}, {gpus}, serving {kinds}")
        lines.append(f"policy       {pool.policy}: a step holds {STEP_HOLDS[pool.policy]}")
    lines.append(f"router rule  {topology.router_rule}: {RULE_SAYS[topology.router_rule]}")
    return lines


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}s"
