"""One call of a Front to a replica of an arm: opened with its charge, closed whatever happens, read up to its first byte.

Leaves out what comes of a lost call (`front.py`, `tries.py`).
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from orthrus_serve.errors import RequestError
from orthrus_serve.policy.charge import RequestShape
from orthrus_serve.serving.handover import Handover
from orthrus_serve.serving.live_arms import Arm
from orthrus_serve.serving.pool import OpenCall, PoolUnavailableError, ReplicaLostError
from orthrus_serve.serving.tries import Tries
from orthrus_serve.serving.tunnel import Reply, TruncatedReplyError, TunnelRequest, read_reply
from orthrus_serve.telemetry.log import event_log
from orthrus_serve.types import Half, ReplicaId

log = event_log(__name__)


@contextlib.contextmanager
def opened(
    request: TunnelRequest,
    arm: Arm,
    shape: RequestShape | None,
    avoid: Sequence[ReplicaId],
    stage: Half | None = None,
    handover: Handover | None = None,
) -> Iterator[OpenCall]:
    """A call, charged for what its replica is to compute."""
    known: dict[str, Any] = {}
    if shape is not None:
        known = {"kind": shape.kind, **_charged(arm, shape, stage, handover)}
    if stage is not None:
        known |= {"stage": stage, "handover": handover}
    call = arm.pool.open(request, avoid=avoid, **known)
    try:
        yield call
    finally:
        call.cancel()


async def try_reply(call: OpenCall, request_id: str) -> Reply | None:
    """The reply up to its first byte, or None when the replica was lost before there was one.

    Raises:
        RequestError: 503, no replica can take it.
    """
    try:
        return await read_reply(aiter(call))
    except (ReplicaLostError, TruncatedReplyError) as lost:
        log.warning("replica_lost_before_first_byte", cause=lost, replica=call.replica_id, request_id=request_id)
        return None
    except PoolUnavailableError as none:
        raise RequestError(503, f"No engine replica is available: {none}", code="no_replica") from none


def judge(arm: Arm, shape: RequestShape | None, tries: Tries, answered_by: ReplicaId | None) -> None:
    """Tells the arm's keeper how the tries of a request ended."""
    # A request without a forward pass says nothing about an engine.
    if shape is not None:
        arm.keeper.ended(shape.kind, tries.failed_on, answered_by, tries.cause)


def _charged(arm: Arm, shape: RequestShape, stage: Half | None, handover: Handover | None) -> dict[str, int]:
    """Of a shared generation, the first replica is charged the prompt and the second the answer."""
    if stage == "prefill":
        return {"charge": arm.estimator.estimate(replace(shape, num_outputs=0)), "expected_output": 0}
    expected = arm.estimator.expected_output(shape)
    if handover is not None:
        return {"charge": max(1, shape.num_outputs * expected), "expected_output": expected}
    return {"charge": arm.estimator.estimate(shape), "expected_output": expected}
