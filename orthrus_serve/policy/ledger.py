"""Remaining tokens charged to each replica by the requests that one Front has open. Pure bookkeeping.

Guards: what is settled is what was charged, once; no load is ever negative; when nothing is open the own load is zero
(counts are integers, so exactly). Leaves out who is chosen (`replica_choice.py`) and what a request costs (`charge.py`).

Life of a charge:   charge ──▶ move* ──▶ correct* ──▶ settle
                       └───────────┴──────────┴──────▶ forgotten with its dead replica (a later settle finds nothing)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orthrus_serve.types import ReplicaId, RequestId


@dataclass
class _Charge:
    replica_id: ReplicaId
    num_tokens: int
    is_reported: bool = False


class TokenLoadLedger:
    """The load of every replica, as one Front sees it: its own open charges, plus what others have there by report."""

    def __init__(self) -> None:
        self._charges: dict[RequestId, _Charge] = {}
        self._by_replica: dict[ReplicaId, set[RequestId]] = {}
        self._own_tokens: dict[ReplicaId, int] = {}
        self._other_tokens: dict[ReplicaId, int] = {}

    def charge(self, request_id: RequestId, replica_id: ReplicaId, num_tokens: int) -> None:
        """Charge a request to the replica just chosen. A request that is chosen for again (a retry) replaces its charge.

        Raises:
            ValueError: `num_tokens` is negative.
        """
        if num_tokens < 0:
            raise ValueError(f"a charge cannot be negative, got {num_tokens}")
        self.settle(request_id)
        self._charges[request_id] = _Charge(replica_id, num_tokens)
        self._by_replica.setdefault(replica_id, set()).add(request_id)
        self._own_tokens[replica_id] = self._own_tokens.get(replica_id, 0) + num_tokens

    def move(self, request_id: RequestId, replica_id: ReplicaId) -> None:
        """The request went to another replica than the one chosen. A request without a charge is ignored."""
        charge = self._charges.get(request_id)
        if charge is not None and charge.replica_id != replica_id:
            self.charge(request_id, replica_id, charge.num_tokens)

    def settle(self, request_id: RequestId) -> int:
        """Release what the request is still charged, and return it. Zero the second time, and for an unknown request."""
        charge = self._charges.pop(request_id, None)
        if charge is None:
            return 0
        self._release(request_id, charge)
        return charge.num_tokens

    def forget(self, replica_id: ReplicaId) -> None:
        """The replica is gone: drop everything charged to it."""
        for request_id in self._by_replica.pop(replica_id, set()):
            del self._charges[request_id]
        self._own_tokens.pop(replica_id, None)
        self._other_tokens.pop(replica_id, None)

    def correct(self, replica_id: ReplicaId, remaining: Mapping[RequestId, int], num_other_tokens: int = 0) -> None:
        """Follow a replica's report of what it really has left.

        A charge that the report never named is younger than the report and stays. One that an earlier report named and
        this one does not is finished in the engine: zero, until it is settled.

        Args:
            remaining: remaining tokens by request, for every request of this Front that the engine holds. Requests that
                are charged elsewhere or nowhere are ignored.
            num_other_tokens: remaining tokens there of everyone else's requests.
        """
        for request_id in self._by_replica.get(replica_id, set()):
            charge = self._charges[request_id]
            reported = remaining.get(request_id)
            if reported is not None or charge.is_reported:
                self._own_tokens[replica_id] -= charge.num_tokens
                charge.num_tokens = max(0, reported or 0)
                charge.is_reported = True
                self._own_tokens[replica_id] += charge.num_tokens
        if num_other_tokens > 0:
            self._other_tokens[replica_id] = num_other_tokens
        else:
            self._other_tokens.pop(replica_id, None)

    def load(self, replica_id: ReplicaId) -> int:
        """Remaining tokens at that replica, never negative; zero for a replica that was never seen."""
        return self._own_tokens.get(replica_id, 0) + self._other_tokens.get(replica_id, 0)

    def loads(self, replica_ids: Iterable[ReplicaId]) -> dict[ReplicaId, int]:
        """`load` of each of these replicas."""
        return {replica_id: self.load(replica_id) for replica_id in replica_ids}

    @property
    def num_open(self) -> int:
        """Requests that are charged and not settled."""
        return len(self._charges)

    @property
    def num_own_tokens(self) -> int:
        """Tokens charged by this Front, all replicas together; zero when nothing is open."""
        return sum(self._own_tokens.values())

    def _release(self, request_id: RequestId, charge: _Charge) -> None:
        requests = self._by_replica[charge.replica_id]
        requests.discard(request_id)
        self._own_tokens[charge.replica_id] -= charge.num_tokens
        if not requests:
            # Replica ids are new after each restart: keep nothing about those without a request.
            del self._by_replica[charge.replica_id], self._own_tokens[charge.replica_id]
