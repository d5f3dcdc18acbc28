"""Ways to choose that the study compares with the product's: looking at more or fewer replicas, believing reports or not.

Everything but that decision is the product's `RouterState`. Leaves out the product's own rules (`policy/replica_choice.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from typing_extensions import override

from orthrus_serve.policy.replica_choice import least_loaded
from orthrus_serve.serving.engine_reports import ReplicaReport
from orthrus_serve.serving.router_state import Candidates, RouterState
from orthrus_serve.types import ReplicaId


@dataclass
class LooksAt(RouterState):
    """The fewest remaining tokens of so many replicas drawn at random; None looks at all."""

    num_looked_at: int | None = None

    @override
    def _choose(self, candidates: Candidates, num_tokens: int) -> ReplicaId:
        replicas = candidates.replicas
        if self.num_looked_at is not None and len(replicas) > self.num_looked_at:
            replicas = self.rng.sample(replicas, self.num_looked_at)
        return least_loaded(replicas, self.ledger.remaining_tokens, self.rng)


@dataclass
class OwnOnly(LooksAt):
    """The same, but of a report only what is left of its own requests is believed; of others' it knows nothing."""

    @override
    def follow(self, front: str, report: ReplicaReport) -> None:
        super().follow(front, replace(report, calls={front: dict(report.own(front))}))


def looks_at(num_replicas: int | None, kind: type[LooksAt] = LooksAt) -> Callable[..., RouterState]:
    """Makes such a state."""
    return lambda **settings: kind(num_looked_at=num_replicas, **settings)
