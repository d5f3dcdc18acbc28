"""The request router of Ray Serve for engine replicas: fewest remaining tokens, charged when chosen.

A thin adapter: what is known of a request comes with the handle call (`RoutedRequest`), who is chosen is decided by `policy/`.
Serve pickles this module by value, so it holds no state. `max_queued_requests` does not work with it: admission is the Front's.
"""

import asyncio

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from typing_extensions import override

from orthrus_serve.policy.routed_request import routed_request
from orthrus_serve.serving import ray_compat
from orthrus_serve.serving.router_state import NoReplicaError, RouterState, state_of
from orthrus_serve.types import ReplicaId


class RemainingTokenRouter(RequestRouter):
    """Sends each request to the replica with the fewest remaining tokens, as this process has charged them."""

    _state: RouterState
    _replica_wait_s: float
    _listed: list[RunningReplica] | None = None
    _by_id: dict[ReplicaId, RunningReplica]
    _ids: list[ReplicaId]

    @override
    def initialize_state(self, replica_wait_s: float = 30.0, **_unused: object) -> None:
        """Called by Serve with `request_router_kwargs`, at a moment of its own: after the Front has set rule and roles.

        Args:
            replica_wait_s: how long a request waits for a first replica before `NoReplicaError`.
        """
        self._state = state_of(ray_compat.deployment_of(self))
        self._replica_wait_s = replica_wait_s

    @override
    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        # The same override point as Ray's own CapacityQueueRouter. The default goes through queues in which another pending
        # request of the same HTTP request may be handed the replica; here the choice belongs to the request that asked.
        if is_retry:
            await ray_compat.pause_before_retry(self)
        await self._until_there_are_replicas()
        # No await from here on: nobody chooses between the choice and its charge, and no cancellation can lose the charge.
        self._list_replicas()
        routed = routed_request(ray_compat.request_id_of(pending_request), pending_request.kwargs)
        return self._by_id[self._state.choose_and_charge(routed, self._ids)]

    @override
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Only reached by `handle.choose_replica()`, which this project does not use: a ranking without a charge. Each rank
        holds one replica, since Serve re-sorts within a rank by queue length."""
        load = self._state.ledger.load
        ranked = sorted(candidate_replicas, key=lambda r: load(ReplicaId(r.replica_id.unique_id)))
        return [[replica] for replica in ranked]

    @override
    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        # Called once for every request sent, whether it was answered, failed, rejected or cancelled; for broadcasts too.
        self._state.settle(internal_request_id, ReplicaId(replica_id.unique_id))

    @override
    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._state.forget(ReplicaId(replica_id.unique_id))

    @override
    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._state.set_running([ReplicaId(replica.replica_id.unique_id) for replica in replicas])

    def _list_replicas(self) -> None:
        # Serve makes a new list whenever the replicas change, and never changes one.
        listed = ray_compat.running_replicas(self)
        if listed is not self._listed:
            self._by_id = {ReplicaId(replica.replica_id.unique_id): replica for replica in listed}
            self._listed, self._ids = listed, list(self._by_id)

    async def _until_there_are_replicas(self) -> None:
        try:
            async with asyncio.timeout(self._replica_wait_s):
                while not ray_compat.running_replicas(self):
                    await ray_compat.until_replicas_change(self)
        except TimeoutError:
            raise NoReplicaError(f"no engine replica is running after {self._replica_wait_s:g} s") from None
