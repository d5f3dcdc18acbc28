"""Which replicas exist, what kinds they serve, and by which rule requests reach them: one frozen value per topology.

Pure data and its expansion. Leaves out Ray (`app.py` turns pools into deployments) and the policies' own arithmetic
(`step_plan.py`). A new topology is one more row in `PRESETS` and a file in `configs/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from orthrus_serve.errors import ConfigError
from orthrus_serve.policy.roles import Split
from orthrus_serve.types import PolicyName, RequestKind, RouterRule, TopologyName


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
    """A whole application: its pools, its Fronts, and the router's rule. `split` None: every replica serves its pool's kinds;
    otherwise each has one role, which the router gives it."""

    name: TopologyName
    pools: tuple[Pool, ...]
    num_fronts: int
    router_rule: RouterRule
    split: Split | None = None

    @property
    def hands_over(self) -> bool:
        """Whether a generation's prompt is computed by one replica and its answer by another."""
        return PRESETS[self.name].hands_over

    @property
    def ratios(self) -> dict[str, dict[str, int] | None]:
        """For every topology with roles, its ratio by role where it is in force, else None. As the configuration spells it."""
        told: dict[str, dict[str, int] | None] = {name: None for name, preset in PRESETS.items() if preset.roles}
        roles = PRESETS[self.name].roles
        if roles is not None and self.split is not None:
            told[self.name] = {roles[0]: self.split.embed, roles[1]: self.split.generate}
        return told

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
    """A topology before its size is known. `roles` are names of the two that its replicas have, as its ratio names them;
    `hands_over`: a generation's prompt is computed by one replica, and its answer by another."""

    pool: PoolPreset
    router_rule: RouterRule
    roles: tuple[str, str] | None = None
    hands_over: bool = False

    @property
    def is_split(self) -> bool:
        """Whether each replica has one role."""
        return self.roles is not None


def _preset(policy: PolicyName, *, roles: tuple[str, str] | None = None, hands_over: bool = False) -> Preset:
    """All engines are alike, so that these topologies are switched live; all share the router's rule, so that a comparison
    varies one thing only."""
    pool = PoolPreset(name="Engine", kinds=("generate", "embed"), policy=policy)
    return Preset(pool=pool, router_rule="least_remaining_tokens", roles=roles, hands_over=hands_over)


PRESETS: Mapping[TopologyName, Preset] = {
    "orthrus": _preset("orthrus"),
    "hetero_fcfs": _preset("hetero_fcfs"),
    "unified_homo": _preset("unified_homo"),
    # With one kind per replica, arrival order is what a stock engine does.
    "dedicated": _preset("hetero_fcfs", roles=("embed", "generate")),
    # Embeddings and prompts share the replicas of the first role, in order of arrival too.
    "disagg_pd": _preset("hetero_fcfs", roles=("prefill", "decode"), hands_over=True),
    # Each of the two engines of a replica has one kind only.
    "separate_models": _preset("hetero_fcfs"),
}

STEP_HOLDS: Mapping[PolicyName, str] = {
    "orthrus": "embed chunks, prefill chunks and decodes, shared by remaining tokens",
    "hetero_fcfs": "embed chunks, prefill chunks and decodes, in order of arrival",
    "unified_homo": "one kind, embed or generate, alternating from step to step",
}

RULE_SAYS: Mapping[RouterRule, str] = {
    "least_remaining_tokens": "the replica with the fewest remaining tokens, ties at random",
    "in_flight_tokens": "the replica with the fewest tokens charged, each request in full until it ends",
    "power_of_two": "of two replicas drawn at random, the one with fewer open requests",
    "round_robin": "each replica in turn",
}


def default_fronts(num_replicas: int, num_gpus_per_replica: float) -> int:
    """Fronts where nobody asked for a number: one for each engine on GPUs, one for every two on CPU.

    A request costs a Front some 10 ms of CPU, most of it Serve's, so one passes about 100 requests/s: hardly more than one H200
    embeds (docs/benchmarks, 2026-11-30-gpu-cards).
    """
    return num_replicas if num_gpus_per_replica > 0 else (num_replicas + 1) // 2


def expand(
    name: TopologyName,
    *,
    num_replicas: int,
    num_gpus_per_replica: float = 1.0,
    num_fronts: int | None = None,
    split: Split | None = None,
    router_rule: RouterRule | None = None,
    pool_name: str | None = None,
) -> Topology:
    """The topology of that name for so many engine replicas.

    Args:
        pool_name: None means the topology's own; an arm's pool is named after it.
        num_fronts: None means `default_fronts`.
        split: replicas of the first role to those of the second, for a topology with roles; None means one to all others.
        router_rule: None means the topology's own.

    Raises:
        ConfigError: the topology cannot be had with so many replicas.
    """
    preset = PRESETS[name]
    pool = Pool(
        name=pool_name or preset.pool.name,
        num_replicas=num_replicas,
        num_gpus_per_replica=num_gpus_per_replica,
        kinds=preset.pool.kinds,
        policy=preset.pool.policy,
    )
    fronts = default_fronts(num_replicas, num_gpus_per_replica) if num_fronts is None else num_fronts
    return Topology(
        name=name,
        pools=(pool,),
        num_fronts=fronts,
        router_rule=router_rule or preset.router_rule,
        split=split_for(name, num_replicas, split),
    )


def split_for(name: TopologyName, num_replicas: int, split: Split | None = None) -> Split | None:
    """The roles under that topology: None when every replica serves both kinds.

    Raises:
        ConfigError: roles cannot be given to so few replicas. A split that is given is taken at its word, since the number of
            replicas may have changed since the start.
    """
    if not PRESETS[name].is_split:
        return None
    if split is None and num_replicas < 2:
        raise ConfigError(f"topology {name!r} needs at least 2 replicas, one for each role; there is {num_replicas}")
    return split or Split(embed=1, generate=num_replicas - 1)


def describe(topology: Topology) -> list[str]:
    """The lines that `orthrus-serve plan` prints."""
    return [describe_total(topology), describe_fronts(topology.num_fronts), *describe_pools(topology)]


def describe_total(topology: Topology) -> str:
    """Its name, and the GPUs that it takes."""
    total = f"{_count(topology.num_gpus, 'GPU')} in all" if topology.num_gpus else "on CPU"
    return f"topology     {topology.name}: {total}"


def describe_fronts(num_fronts: int) -> str:
    """The Fronts, which arms share."""
    return f"front        {_count(num_fronts, 'replica')}: HTTP, and the choice of the engine replica"


def describe_pools(topology: Topology) -> list[str]:
    """Its pools, their policy, and how requests reach them."""
    lines: list[str] = []
    for pool in topology.pools:
        gpus = f"{_count(pool.num_gpus_per_replica, 'GPU')} each" if pool.num_gpus_per_replica else "on CPU"
        lines.append(
            f"pool         {pool.name}: {_count(pool.num_replicas, 'replica')}, {gpus}, {_serving(pool, topology)}"
        )
        lines.append(f"policy       {_policy(pool, topology)}")
    lines.append(f"router rule  {topology.router_rule}: {RULE_SAYS[topology.router_rule]}")
    return lines


def _policy(pool: Pool, topology: Topology) -> str:
    if topology.name == "separate_models":
        return (
            f"{pool.policy}: two engines on each card, each in order of arrival; "
            "one's step holds prefill chunks and decodes, the other's embedding inputs"
        )
    return f"{pool.policy}: a step holds {STEP_HOLDS[pool.policy]}"


def _serving(pool: Pool, topology: Topology) -> str:
    if topology.split is None:
        return f"serving {' and '.join(pool.kinds)}"
    first = topology.split.num_embed(pool.num_replicas)
    second = pool.num_replicas - first
    if topology.hands_over:
        return f"{first} prefilling and serving embed, {second} decoding"
    return f"{first} serving embed and {second} serving generate"


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}s"
