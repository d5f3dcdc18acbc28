"""Which replicas embed and which generate, where a replica has one role. Pure.

Guards: everybody who knows the same replicas gives them the same roles, so several Fronts agree without talking; with two
replicas or more both roles are held; one replica alone has both. Leaves out which replica of a role is taken
(`replica_choice.py`).
"""

from collections.abc import Collection
from dataclasses import dataclass

from orthrus_serve.types import Half, ReplicaId, RequestKind


@dataclass(frozen=True)
class Split:
    """Embedding replicas to generating ones, as a ratio: `Split(1, 3)`. Both parts are at least 1.

    Where two replicas share a generation, those that embed also compute the prompts, and the others the answers.
    """

    embed: int
    generate: int

    def num_embed(self, num_replicas: int) -> int:
        """How many of so many replicas embed: the nearest whole number that leaves nobody out. `num_replicas` is at least 2."""
        whole = self.embed + self.generate
        nearest = (2 * num_replicas * self.embed + whole) // (2 * whole)
        return min(max(nearest, 1), num_replicas - 1)


def replicas_serving(
    kind: RequestKind, replicas: Collection[ReplicaId], split: Split, stage: Half | None = None
) -> list[ReplicaId]:
    """The replicas whose role is that kind, or that stage of a generation, sorted; of a single replica, that one.

    The first ids embed. When a replica comes or goes, at most one other changes its role.
    """
    ordered = sorted(replicas)
    if len(ordered) < 2:
        return ordered
    num_embed = split.num_embed(len(ordered))
    return ordered[:num_embed] if kind == "embed" or stage == "prefill" else ordered[num_embed:]
