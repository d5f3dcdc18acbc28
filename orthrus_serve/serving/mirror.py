"""Copies of requests to another arm, whose answers nobody gets.

Guards: whatever becomes of a copy, the request that it was made of is neither delayed nor changed: it runs in a task and a
request context of its own, counts for no client, and beyond a number in flight copies are dropped. Leaves out which requests
are copied (`live_arms.py`).
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from orthrus_serve.errors import RequestError
from orthrus_serve.policy.charge import RequestShape
from orthrus_serve.policy.slices import Ended
from orthrus_serve.serving import ray_compat
from orthrus_serve.serving.exchange import Exchange
from orthrus_serve.serving.live_arms import Arm, LiveArms
from orthrus_serve.serving.metrics_export import FrontMetrics, outcome_of
from orthrus_serve.serving.tunnel import Message, TunnelRequest
from orthrus_serve.telemetry.catalog import Outcome
from orthrus_serve.telemetry.log import event_log
from orthrus_serve.types import RequestKind

log = event_log(__name__)

MAX_COPIES = 128
# Ends of requests that say something about an arm. A client's mistake, and its leaving, do not.
COMPARED: frozenset[Outcome] = frozenset({"ok", "overloaded", "failed"})

Answer = Callable[[TunnelRequest, RequestShape | None, Arm, Exchange], Coroutine[Any, Any, None]]
Detach = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class Mirrors:
    """The copies that one Front has in flight."""

    def __init__(
        self,
        answer: Answer,
        arms: LiveArms,
        metrics: FrontMetrics,
        max_copies: int = MAX_COPIES,
        detach: Detach = ray_compat.in_own_request_context,
    ) -> None:
        """`answer` answers a request from an arm; `detach` runs it apart from the request that it is called in."""
        self._answer = answer
        self._arms = arms
        self._metrics = metrics
        self._max_copies = max_copies
        self._detach = detach
        self._tasks: set[asyncio.Task[None]] = set()

    def copy(self, request: TunnelRequest, shape: RequestShape, arm: Arm) -> None:
        """Sends a copy to the arm that mirrors `arm`, if it is this request's turn. Returns at once, never raises."""
        target = self._arms.mirror_of(arm)
        if target is None:
            return
        if len(self._tasks) >= self._max_copies:
            self._metrics.mirrored(target.name, shape.kind, "dropped")
            return
        headers = [(name, value) for name, value in request.headers if name != b"x-request-id"]
        headers.append((b"x-request-id", f"mirror-{uuid.uuid4().hex}".encode()))
        task = self._detach(self._run(replace(request, headers=headers), shape, target))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, request: TunnelRequest, shape: RequestShape, arm: Arm) -> None:
        began_s, exchange, kind = time.monotonic(), Exchange(_discard), shape.kind
        try:
            await self._answer(request, shape, arm, exchange)
        except RequestError as error:
            exchange.status = exchange.status or error.status
        except Exception as error:  # noqa: BLE001 - nobody waits for it
            log.warning("mirror_failed", arm=arm.name, cause=repr(error)[:300])
            exchange.status = 500
        outcome = outcome_of(exchange.status, is_cut=exchange.is_cut)
        self._metrics.mirrored(arm.name, kind, outcome)
        if outcome in COMPARED:
            self._arms.slices.add(ended(exchange, arm.name, kind, began_s, is_mirrored=True))


def ended(exchange: Exchange, arm: str, kind: RequestKind, began_s: float, *, is_mirrored: bool = False) -> Ended:
    """What a request that ended now counts as."""
    return Ended(
        arm=arm,
        kind=kind,
        began_s=began_s,
        ended_s=time.monotonic(),
        is_ok=outcome_of(exchange.status, is_cut=exchange.is_cut) == "ok",
        ttft_s=None if exchange.first_s is None else exchange.first_s - began_s,
        num_tokens=exchange.num_tokens,
        is_mirrored=is_mirrored,
    )


async def _discard(message: Message) -> None:
    pass
