"""Which replicas are alive but cannot serve, as one Front has seen it: out of the pool at once, back after a good probe. Pure.

A replica goes out after some failures in a row, or at once when its own report names a problem. Only a probe, a tiny request
that is known to be good, brings it back. Failures are counted by kind: good embeddings do not excuse failing generations.
Guards: a request that fails everywhere blames nobody (it says more about itself than about the replicas), so it cannot empty
the pool; probes back off; nothing is kept of a replica that is gone.
Leaves out how a failure is noticed, how a probe is sent, and what to do when everybody is out: the caller then routes as if
nobody were.

    well ──failures in a row, or its own report──▶ out ──probe is due──▶ probing ──good──▶ well
                                                    ▲───────bad, twice the gap───────┘
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from orthrus_serve.types import ReplicaId, RequestKind


@dataclass(frozen=True)
class QuarantineRules:
    """When a replica goes out and how often it is probed.

    Attributes:
        max_failures: that many failures in a row, of different requests of one kind, and the replica is out.
        first_gap_s: from going out to the first probe.
        longest_gap_s: the gap doubles with each bad probe, up to this.
    """

    max_failures: int = 3
    first_gap_s: float = 0.5
    longest_gap_s: float = 10.0


@dataclass
class _Record:
    gap_s: float
    num_failures: dict[RequestKind, int] = field(default_factory=dict)
    failed_kind: RequestKind | None = None  # the kind that put it out last
    reason: str | None = None  # why it is out; None: it is in
    due_s: float = 0.0
    is_probing: bool = False


class Quarantine:
    """The replicas that must not be chosen now. One thread owns it."""

    def __init__(self, rules: QuarantineRules) -> None:
        self._rules = rules
        self._records: dict[ReplicaId, _Record] = {}

    @property
    def out(self) -> frozenset[ReplicaId]:
        """The replicas that must not be chosen."""
        return frozenset(replica_id for replica_id, record in self._records.items() if record.reason is not None)

    @property
    def reasons(self) -> dict[ReplicaId, str]:
        """Why each of them is out, as a sentence."""
        return {replica_id: record.reason for replica_id, record in self._records.items() if record.reason is not None}

    def ended(
        self,
        kind: RequestKind,
        failed_on: Collection[ReplicaId],
        answered_by: ReplicaId | None,
        now_s: float,
        cause: str = "failed",
    ) -> None:
        """A request is over.

        Args:
            failed_on: replicas that had an engine-side failure with it.
            answered_by: the replica that then answered it, or None.
            cause: what the failures were, for `reasons`.
        """
        if answered_by is not None:
            self._did_well(kind, answered_by)
        elif len(set(failed_on)) > 1:
            return  # nobody could answer it: its own fault, as far as one can tell
        for replica_id in set(failed_on) - {answered_by}:
            self._did_badly(kind, replica_id, now_s, cause)

    def told(self, replica_id: ReplicaId, problem: str | None, now_s: float) -> None:
        """The replica's own report names a problem, or says that there is none (any longer): then it is probed at once."""
        record = self._records.get(replica_id)
        if problem is not None:
            record = self._record(replica_id)
            if record.reason is None:
                self._put_out(record, problem, now_s)
            record.reason = problem
        elif record is not None and record.reason is not None:
            record.due_s = min(record.due_s, now_s)

    def due(self, now_s: float) -> list[ReplicaId]:
        """The replicas to probe now; each must be followed by `probed`, and is not named again before."""
        due = [
            replica_id
            for replica_id, record in self._records.items()
            if record.reason is not None and not record.is_probing and record.due_s <= now_s
        ]
        for replica_id in due:
            self._records[replica_id].is_probing = True
        return due

    def next_due_s(self) -> float | None:
        """When the next probe is due; None while nobody waits for one."""
        waiting = [r.due_s for r in self._records.values() if r.reason is not None and not r.is_probing]
        return min(waiting, default=None)

    def probed(self, replica_id: ReplicaId, is_well: bool, now_s: float) -> None:
        """A probe is over. One of a replica that was forgotten meanwhile is ignored.

        The gap starts anew only when the replica has answered a real request of the kind that put it out: one that passes
        probes and nothing else is out longer each time.
        """
        record = self._records.get(replica_id)
        if record is None or not record.is_probing:
            return
        record.is_probing = False
        record.gap_s = min(2 * record.gap_s, self._rules.longest_gap_s)
        if is_well:
            record.reason, record.num_failures = None, {}
        else:
            record.due_s = now_s + record.gap_s

    def keep_only(self, replica_ids: Iterable[ReplicaId]) -> None:
        """Forget everybody else: they are gone, and ids never come back."""
        for gone in set(self._records) - set(replica_ids):
            del self._records[gone]

    def _did_well(self, kind: RequestKind, replica_id: ReplicaId) -> None:
        record = self._records.get(replica_id)
        if record is None or record.reason is not None:
            return
        record.num_failures.pop(kind, None)
        if not record.num_failures and record.failed_kind in (None, kind):
            del self._records[replica_id]  # as if it had never failed

    def _did_badly(self, kind: RequestKind, replica_id: ReplicaId, now_s: float, cause: str) -> None:
        record = self._record(replica_id)
        num_failures = record.num_failures[kind] = record.num_failures.get(kind, 0) + 1
        if record.reason is None and num_failures >= self._rules.max_failures:
            record.failed_kind = kind
            self._put_out(record, f"{num_failures} {kind} requests in a row: {cause}", now_s)

    def _put_out(self, record: _Record, reason: str, now_s: float) -> None:
        record.reason, record.due_s = reason, now_s + record.gap_s

    def _record(self, replica_id: ReplicaId) -> _Record:
        return self._records.setdefault(replica_id, _Record(self._rules.first_gap_s))
