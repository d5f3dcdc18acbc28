"""What became of one request's tries so far, and whether another one is worth while. Pure.

Guards: a request that may be the cause of its failures is tried on two replicas, not on all. Leaves out the calls themselves
(`front.py`) and what its failures mean for a replica (`pool_keeper.py`).
"""

from orthrus_serve.serving.asgi_io import header
from orthrus_serve.serving.tunnel import GONE_HEADER, UNSEEN_STATUS, Reply, has_failed
from orthrus_serve.types import ReplicaId

# A request that was being worked on when its replica died or failed may be the cause: it gets one more replica, not all.
MAX_LOST = 2


class Tries:
    """What became of one request's tries so far.

    Attributes:
        failed_on: replicas whose engine failed it, or that were lost with it.
        num_lost: tries that may have failed by the request's own fault.
        replica_id: the replica of the last try, as far as it is known.
        gone: the replica that just said that it has no engine, or None.
        has_just_failed: whether the last try failed.
        cause: of the last failure.
    """

    def __init__(self) -> None:
        self.failed_on: list[ReplicaId] = []
        self.num_lost = 0
        self.gone: ReplicaId | None = None
        self.replica_id: ReplicaId | None = None
        self.has_just_failed = False
        self.cause = ""

    @property
    def is_suspect(self) -> bool:
        """Whether the request itself is the likely cause: then it is tried no more."""
        return self.num_lost >= MAX_LOST

    def saw(self, reply: Reply | None, replica_id: ReplicaId | None) -> None:
        """The next try has a reply up to its first byte, or was lost (None)."""
        gone = None if reply is None else header(reply.headers, GONE_HEADER)
        self.gone = ReplicaId(gone.decode()) if gone is not None else None
        self.replica_id = self.gone or replica_id
        self.has_just_failed = False
        self.num_lost += reply is None or (gone is not None and reply.status != UNSEEN_STATUS)
        if reply is None or gone is not None:
            self.fail("lost")
        elif has_failed(reply):
            self.num_lost += 1
            self.fail(f"status {reply.status}")

    def fail(self, cause: str) -> None:
        """The try that was seen last has failed."""
        self.has_just_failed, self.cause = True, cause
        if self.replica_id is not None:
            self.failed_on.append(self.replica_id)
