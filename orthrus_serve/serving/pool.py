"""A pool of engine replicas as the Front sees it: open one tunnelled call, ask all replicas a question.

Maps what Ray raises to two errors of ours, so that the Front decides without knowing Ray. Leaves out the choice of a replica
(`router.py`) and what is done about a lost one (`front.py`).
"""

import uuid
from collections.abc import AsyncIterator, Collection
from typing import Any, Protocol

from ray import serve
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from orthrus_serve.errors import OrthrusError
from orthrus_serve.serving import ray_compat
from orthrus_serve.serving.handover import Handover
from orthrus_serve.serving.router_state import NoReplicaError, RouterState, state_of
from orthrus_serve.serving.tunnel import Start, TunnelRequest
from orthrus_serve.types import Half, ReplicaId, RequestKind


class ReplicaLostError(OrthrusError):
    """The replica that worked on a request is gone."""


class PoolUnavailableError(OrthrusError):
    """No replica can take a request now."""


class OpenCall(Protocol):
    """A tunnelled call that a replica works on. Iterating raises `ReplicaLostError` or `PoolUnavailableError`."""

    def __aiter__(self) -> AsyncIterator[Start | bytes]: ...

    @property
    def replica_id(self) -> ReplicaId | None:
        """The replica that was chosen; None before that, and after `cancel`."""
        ...

    @property
    def placed_s(self) -> float | None:
        """When it was chosen (monotonic clock)."""
        ...

    def cancel(self) -> None:
        """Ends the call: the replica's app is told that its client left. No effect on a call that has ended."""
        ...


class Pool(Protocol):
    """What the Front needs of a set of engine replicas."""

    name: str

    def open(
        self,
        request: TunnelRequest,
        *,
        charge: int = 1,
        kind: RequestKind | None = None,
        expected_output: int = 0,
        avoid: Collection[str] = (),
        only: str | None = None,
        stage: Half | None = None,
        handover: Handover | None = None,
    ) -> OpenCall: ...

    async def ask_all(self, method: str, timeout_s: float) -> list[Any]: ...


class _RayCall:
    def __init__(self, stream: DeploymentResponseGenerator[Any], call_id: str, state: RouterState) -> None:
        self._stream = stream
        self._call_id = call_id
        self._state = state
        self._is_ended = False

    @property
    def replica_id(self) -> ReplicaId | None:
        placed = self._state.chosen.get(self._call_id)
        return None if placed is None else placed.replica_id

    @property
    def placed_s(self) -> float | None:
        placed = self._state.chosen.get(self._call_id)
        return None if placed is None else placed.at_s

    def __aiter__(self) -> AsyncIterator[Start | bytes]:
        return self

    async def __anext__(self) -> Start | bytes:
        try:
            return await self._next()
        except RayActorError as lost:  # died or unavailable
            raise ReplicaLostError(type(lost).__name__) from lost
        except (RequestCancelledError, TaskCancelledError) as lost:
            # We stop iterating when we cancel: so the replica was shut down under the call.
            raise ReplicaLostError("the replica cancelled the call") from lost
        except (DeploymentUnavailableError, NoReplicaError) as none:
            raise PoolUnavailableError(str(none)) from none

    async def _next(self) -> Start | bytes:
        try:
            return await self._stream.__anext__()
        except Exception:
            self._is_ended = True
            raise

    def cancel(self) -> None:
        self._state.coming.pop(self._call_id, None)
        self._state.chosen.pop(self._call_id, None)
        if not self._is_ended:  # Serve would raise the error that ended the call once more
            self._stream.cancel()


class Peers:
    """The replicas of the deployment to which the replica that runs this belongs, itself among them."""

    def __init__(self) -> None:
        self._handle: DeploymentHandle[Any] | None = None

    async def ask_all(self, method: str, timeout_s: float) -> list[Any]:
        """As `Pool.ask_all`."""
        if self._handle is None:  # not in the constructor: the deployment is not there before its replicas
            context = serve.get_replica_context()
            self._handle = serve.get_deployment_handle(context.deployment, context.app_name)
        return await _ask_all(self._handle, method, timeout_s)


class EnginePool:
    """The replicas behind a Serve deployment handle."""

    def __init__(self, handle: DeploymentHandle[Any], front_id: str) -> None:
        """`front_id` is whose calls these are, for the replicas' reports."""
        self.name = handle.deployment_name
        self.deployment = ray_compat.deployment_behind(handle)
        self.state = state_of(self.deployment)
        self._handle = handle
        self._front_id = front_id
        self._stream = handle.options(stream=True)

    def open(
        self,
        request: TunnelRequest,
        *,
        charge: int = 1,
        kind: RequestKind | None = None,
        expected_output: int = 0,
        avoid: Collection[str] = (),
        only: str | None = None,
        stage: Half | None = None,
        handover: Handover | None = None,
    ) -> OpenCall:
        """One handle call. The router reads its named arguments: see `policy/routed_request.py`. `stage` and `handover` are for
        the replica too: see `handover.py`."""
        call_id = uuid.uuid4().hex
        self.state.coming[call_id] = charge
        stream: Any = self._stream.asgi.remote(
            request.method,
            request.path,
            request.query,
            request.headers,
            request.body,
            front=self._front_id,
            charge=charge,
            kind=kind,
            expected_output=expected_output,
            avoid=tuple(avoid),
            only=only,
            call_id=call_id,
            stage=stage,
            handover=handover,
        )
        return _RayCall(stream, call_id, self.state)

    async def ask_all(self, method: str, timeout_s: float) -> list[Any]:
        """The answer of every running replica, or the exception instead of it; empty when there is no replica.

        A replica that does not answer within `timeout_s` counts as a `TimeoutError`.
        """
        return await _ask_all(self._handle, method, timeout_s)


async def _ask_all(handle: DeploymentHandle[Any], method: str, timeout_s: float) -> list[Any]:
    try:
        return await ray_compat.ask_all(handle, method, timeout_s)
    except (DeploymentUnavailableError, TimeoutError):
        return []
