"""Every name of Ray Serve that is not public, behind functions with a fixed meaning, and the gate that checks them at start.

Nothing else in the project may touch a private name of Ray. An upgrade of Ray is settled here and by the tests in tests/serve.
Leaves out what is public (`serve.deployment`, handles, `ray.serve.request_router`).
"""

import asyncio
import contextvars
import functools
import inspect
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY, RAY_SERVE_THROUGHPUT_OPTIMIZED, SERVE_NAMESPACE
from ray.serve.context import _get_serve_request_context as get_serve_request_context
from ray.serve.context import _RequestContext as RequestContext
from ray.serve.context import _serve_request_context as serve_request_context
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from orthrus_serve.errors import UnsupportedVersionError
from orthrus_serve.policy import stream_pacing
from orthrus_serve.policy.replica_choice import Place
from orthrus_serve.policy.stream_pacing import Sharers

PINNED_RAY = "2.60.0"

# Method of `RequestRouter` that we override or call → its parameters as we rely on them.
ROUTER_SIGNATURES = {
    "_choose_replica_for_request": ("self", "pending_request", "is_retry"),
    "on_request_completed": ("self", "replica_id", "internal_request_id"),
    "on_replica_actor_died": ("self", "replica_id"),
    "update_replicas": ("self", "replicas"),
    "_backoff": ("self", "attempt"),
}


def check_ray(version: str = ray.__version__, router: type = RequestRouter) -> None:
    """Stops the start on a Ray whose request router we do not know.

    Raises:
        UnsupportedVersionError: another version, or a hook with other parameters. The message says what to install.
    """
    if version != PINNED_RAY:
        raise UnsupportedVersionError(
            f"Ray {version} is installed, but the request router is written for {PINNED_RAY}: "
            f'install it with `pip install "ray[serve]=={PINNED_RAY}"`.'
        )
    for name, expected in ROUTER_SIGNATURES.items():
        hook = getattr(router, name, None)
        found = tuple(inspect.signature(hook).parameters) if hook is not None else None
        if found != expected:
            raise UnsupportedVersionError(
                f"RequestRouter.{name} of this Ray takes {found}, not {expected}: the installed package is not the released "
                f'Ray {PINNED_RAY}. Install it anew with `pip install --force-reinstall "ray[serve]=={PINNED_RAY}"`.'
            )


def running_replicas(router: RequestRouter) -> list[RunningReplica]:
    """The replicas that this router may choose from now. Not a copy: do not keep it across an await."""
    return router._replicas_list


async def until_replicas_change(router: RequestRouter) -> None:
    """Returns when the set of replicas was updated after this call."""
    router._replicas_updated_event.clear()
    await router._replicas_updated_event.wait()


async def pause_before_retry(router: RequestRouter) -> None:
    """Waits as long as Serve would before it sends a rejected request again."""
    await router._backoff(0)


def request_id_of(pending: PendingRequest) -> str:
    """The id under which Serve will report this request as completed. All handle calls of one HTTP request share it."""
    return pending.metadata.internal_request_id


def deployment_of(router: RequestRouter) -> str:
    """The deployment behind this router, as `application/name`."""
    return f"{router._deployment_id.app_name}/{router._deployment_id.name}"


def deployment_behind(handle: DeploymentHandle[Any]) -> str:
    """The deployment behind this handle, as `application/name`: the same string as `deployment_of` its router."""
    return f"{handle.deployment_id.app_name}/{handle.deployment_id.name}"


def current_request_id() -> str:
    """Inside a replica, the id of the request that it works on: as `request_id_of` in the router that sent it."""
    return get_serve_request_context()._internal_request_id


def in_own_request_context(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """Runs `work` as a task that is another request to Serve than the one that this is called in: with an id of its own, and
    not cancelled with it."""
    own = contextvars.copy_context()
    request_id = uuid.uuid4().hex
    app_name = get_serve_request_context().app_name
    context: Any = RequestContext
    own.run(
        serve_request_context.set, context(request_id=request_id, _internal_request_id=request_id, app_name=app_name)
    )
    return asyncio.get_running_loop().create_task(work, context=own)


def place_among_replicas() -> Place:
    """Inside a replica, its place among those of its deployment, as Serve's controller ranks them; the same object as long as
    the place is the same."""
    return _place(getattr(serve.get_replica_context().rank, "rank", 0), _num_replicas_here())


def _num_replicas_here() -> int:
    """Inside a replica, how many its deployment has now."""
    return max(1, serve.get_replica_context().world_size or 1)


@functools.cache
def _place(rank: int, num_replicas: int) -> Place:
    return Place(rank, num_replicas)


async def ask_all(handle: DeploymentHandle[Any], method: str, timeout_s: float, *args: Any) -> list[Any]:
    """Calls `method` on every running replica at once. Returns one entry per replica: its answer, or the exception.

    The public `results_async` gives up on all replicas when one of them is late; here a late one is a `TimeoutError` entry.
    """
    async with asyncio.timeout(timeout_s):
        results = await handle.broadcast(method, *args)._fetch_replica_results_async()
    tasks = [asyncio.ensure_future(result.get_async()) for result in results]
    try:
        await asyncio.wait(tasks, timeout=timeout_s)
        return [_outcome(task) for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


def tell_fronts(timeout_s: float) -> Callable[[Any], Awaitable[float]]:
    """Inside a replica: what calls `take_report` of every Front of the same application, and returns the largest answer.

    It raises when there is no Front, and when one fails or does not answer in time.
    """
    fronts: DeploymentHandle[Any] = DeploymentHandle("Front", serve.get_replica_context().app_name)

    async def tell(report: Any) -> float:
        answers = await ask_all(fronts, "take_report", timeout_s, report)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return max(answers)

    return tell


def usual_chunks_per_s(others: Sharers) -> float:
    """Inside an engine replica: `stream_pacing.usual_chunks_per_s` for the replicas that its deployment has now, with the
    switches that Serve took from this process' environment. `others` are the Fronts, and the replicas of other deployments."""
    return stream_pacing.usual_chunks_per_s(
        replace(others, num_replicas=others.num_replicas + _num_replicas_here()),
        has_haproxy=bool(RAY_SERVE_ENABLE_HA_PROXY),
        is_throughput_optimized=bool(RAY_SERVE_THROUGHPUT_OPTIMIZED),
    )


def front_is_alive(front: str) -> bool:
    """Inside a replica, whether the process of that Front (its replica's id), of the same application, runs; also when it
    drains. Blocks."""
    deployment = DeploymentID("Front", serve.get_replica_context().app_name)
    try:
        ray.get_actor(ReplicaID(front, deployment).to_full_id_str(), namespace=SERVE_NAMESPACE)
    except ValueError:  # there is no actor of that name
        return False
    return True


def _outcome(task: "asyncio.Future[Any]") -> Any:
    if not task.done():
        return TimeoutError("the replica did not answer in time")
    return task.exception() or task.result()
