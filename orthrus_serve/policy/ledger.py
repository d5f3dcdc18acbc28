"""Remaining tokens charged to each replica by the requests that one Front has open. Pure bookkeeping.

Guards: what is settled is what was charged, once; no load is ever negative; when nothing is open the own load is zero
(counts are integers, so exactly), and so is the drift. Leaves out who is chosen (`replica_choice.py`) and what a request
costs (`charge.py`).

Life of a charge:   charge ──▶ move* ──▶ correct* ──▶ settle
                       └───────────┴──────────┴──────▶ forgotten with its dead replica (a later settle finds nothing)
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from orthrus_serve.types import ReplicaId, RequestId


@dataclass
class _Charge:
    """`num_tokens` follows the reports; `num_charged_tokens` is what was charged at first."""

    replica_id: ReplicaId
    num_tokens: int
    num_charged_tokens: int
    is_reported: bool = False


@dataclass
class _Known:
    """What is known about one replica."""

    requests: set[RequestId] = field(default_factory=set[RequestId])
    num_other_tokens: int = 0
    num_other_open: int = 0
    num_drift_tokens: int = 0

    @property
    def is_nothing(self) -> bool:
        """Whether it may be forgotten."""
        return not (self.requests or self.num_other_tokens or self.num_other_open or self.num_drift_tokens)


class TokenLoadLedger:
    """The load of every replica, as one Front sees it: its own open charges, plus what others have there by report.

    Three measures of it, each by replica; a replica that is not in one has zero. They change with every call: read at once, do
    not keep.

    Attributes:
        remaining_tokens: what is left to compute, by the last reports; own requests and everyone else's.
        in_flight_tokens: what was charged, in full until a request ends; own requests only.
        open_requests: how many are open; own requests and everyone else's.
    """

    def __init__(self) -> None:
        self.remaining_tokens: dict[ReplicaId, int] = {}
        self.in_flight_tokens: dict[ReplicaId, int] = {}
        self.open_requests: dict[ReplicaId, int] = {}
        self._charges: dict[RequestId, _Charge] = {}
        self._known: dict[ReplicaId, _Known] = {}
        self._num_own_tokens = 0

    def charge(self, request_id: RequestId, replica_id: ReplicaId, num_tokens: int) -> None:
        """Charge a request to the replica just chosen. A request that is chosen for again (a retry) replaces its charge.

        Raises:
            ValueError: `num_tokens` is negative.
        """
        if num_tokens < 0:
            raise ValueError(f"a charge cannot be negative, got {num_tokens}")
        self.settle(request_id)
        self._open(request_id, _Charge(replica_id, num_tokens, num_tokens))

    def move(self, request_id: RequestId, replica_id: ReplicaId) -> None:
        """The request went to another replica than the one chosen. A request without a charge is ignored."""
        charge = self._charges.get(request_id)
        if charge is not None and charge.replica_id != replica_id:
            self.settle(request_id)
            self._open(request_id, _Charge(replica_id, charge.num_tokens, charge.num_charged_tokens))

    def settle(self, request_id: RequestId) -> int:
        """Release what the request is still charged, and return it. Zero the second time, and for an unknown request."""
        charge = self._charges.pop(request_id, None)
        if charge is None:
            return 0
        known = self._known[charge.replica_id]
        known.requests.discard(request_id)
        if not known.requests:
            # The report that moved it may have been the last: at rest there is no other that would say that nothing moves.
            known.num_drift_tokens = 0
        self._num_own_tokens -= charge.num_tokens
        self._add(charge.replica_id, -charge.num_tokens, -charge.num_charged_tokens, -1)
        if known.is_nothing:
            del self._known[charge.replica_id]  # replica ids are new after each restart: keep only those with something
        return charge.num_tokens

    def forget(self, replica_id: ReplicaId) -> None:
        """The replica is gone: drop everything charged to it."""
        known = self._known.pop(replica_id, _Known())
        for request_id in known.requests:
            self._num_own_tokens -= self._charges.pop(request_id).num_tokens
        for measure in (self.remaining_tokens, self.in_flight_tokens, self.open_requests):
            measure.pop(replica_id, None)

    def forget_absent(self, replica_ids: Collection[ReplicaId]) -> None:
        """Drop what is known of replicas that are not among these and have no request of ours. What is open on an absent one
        ends by itself, and is settled then: the replica may be back before."""
        absent = [one for one, known in self._known.items() if one not in replica_ids and not known.requests]
        for replica_id in absent:
            self.forget(replica_id)

    def correct(
        self,
        replica_id: ReplicaId,
        remaining: Mapping[RequestId, int],
        num_other_tokens: int = 0,
        num_other_open: int = 0,
    ) -> None:
        """Follow a replica's report of what it really has left.

        A charge that the report never named is younger than the report and stays. One that an earlier report named and
        this one does not is finished in the engine: zero, until it is settled.

        Args:
            remaining: remaining tokens by request, for every request of this Front that the replica holds. Requests that
                are charged elsewhere or nowhere are ignored.
            num_other_tokens: remaining tokens there of everyone else's requests.
            num_other_open: how many requests of everyone else are open there.
        """
        known = self._known.setdefault(replica_id, _Known())
        known.num_drift_tokens = 0
        for request_id in known.requests:
            charge = self._charges[request_id]
            reported = remaining.get(request_id)
            if reported is not None or charge.is_reported:
                charge.is_reported = True
                known.num_drift_tokens += max(0, reported or 0) - charge.num_tokens
                charge.num_tokens = max(0, reported or 0)
        self._num_own_tokens += known.num_drift_tokens
        num_more_tokens = max(0, num_other_tokens) - known.num_other_tokens
        num_more_open = max(0, num_other_open) - known.num_other_open
        known.num_other_tokens += num_more_tokens
        known.num_other_open += num_more_open
        if known.num_drift_tokens or num_more_tokens or num_more_open:
            self._add(replica_id, known.num_drift_tokens + num_more_tokens, 0, num_more_open)
        if known.is_nothing:
            del self._known[replica_id]

    def load(self, replica_id: ReplicaId) -> int:
        """Remaining tokens at that replica, never negative; zero for a replica that was never seen."""
        return self.remaining_tokens.get(replica_id, 0)

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
        return self._num_own_tokens

    @property
    def num_drift_tokens(self) -> int:
        """By how much the last report of each replica moved the own charges there, up or down, all replicas together. Large
        next to `num_own_tokens`: reports come too seldom, or what is charged is far from what requests cost."""
        return sum(abs(known.num_drift_tokens) for known in list(self._known.values()))

    def _open(self, request_id: RequestId, charge: _Charge) -> None:
        self._charges[request_id] = charge
        self._known.setdefault(charge.replica_id, _Known()).requests.add(request_id)
        self._num_own_tokens += charge.num_tokens
        self._add(charge.replica_id, charge.num_tokens, charge.num_charged_tokens, 1)

    def _add(self, replica_id: ReplicaId, num_remaining: int, num_in_flight: int, num_open: int) -> None:
        for measure, number in (
            (self.remaining_tokens, num_remaining),
            (self.in_flight_tokens, num_in_flight),
            (self.open_requests, num_open),
        ):
            total = measure.get(replica_id, 0) + number
            if total:
                measure[replica_id] = total
            else:
                measure.pop(replica_id, None)
