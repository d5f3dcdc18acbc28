"""Keeps one Front's quarantine of a pool: takes in how requests ended, asks replicas how they are, probes those that are out.

Probes are real requests, tiny and known to be good, one of each kind, sent past the router's rule to the one replica that they
are for. Guards: nothing here delays a request or ends with an error. Leaves out who goes out and when (`policy/quarantine.py`).
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Collection, Mapping
from typing import NoReturn

from orthrus_serve.config.schema import AppArgs
from orthrus_serve.errors import OrthrusError
from orthrus_serve.policy.quarantine import Quarantine, QuarantineRules
from orthrus_serve.serving.pool import Pool
from orthrus_serve.serving.router_state import RouterState
from orthrus_serve.serving.tunnel import TruncatedReplyError, TunnelRequest, read_reply
from orthrus_serve.telemetry.log import event_log
from orthrus_serve.types import ReplicaId, RequestKind

log = event_log(__name__)

# How often every replica is asked how it is, and how long it may take. A stall is known to the replica itself after a minute.
ASK_GAP_S, ASK_TIMEOUT_S = 2.0, 5.0

Probes = Mapping[RequestKind, TunnelRequest]


def make_probes(args: AppArgs) -> Probes:
    """A tiny request of each kind, under names that this configuration serves."""
    embedder = args.base_name_adapter or next(iter(args.adapters))
    return {
        "embed": _post("/v1/embeddings", {"model": embedder, "input": "probe"}),
        "generate": _post("/v1/completions", {"model": args.model.name, "prompt": "probe", "max_tokens": 1}),
    }


def _post(path: str, body: Mapping[str, object]) -> TunnelRequest:
    raw = json.dumps(body).encode()
    length = (b"content-length", str(len(raw)).encode())
    headers = [(b"content-type", b"application/json"), (b"x-request-id", b"orthrus-probe"), length]
    return TunnelRequest("POST", path, b"", headers, raw)


class PoolKeeper:
    """The quarantine of one pool, and the tasks that feed it. Publishes who is out to the router's state.

    Args:
        state: what the router of that pool reads; also says which replicas run.
        probe_timeout_s: a replica that has not answered a probe by then failed it.
    """

    def __init__(
        self, pool: Pool, state: RouterState, rules: QuarantineRules, probes: Probes, probe_timeout_s: float
    ) -> None:
        self._pool = pool
        self._state = state
        self._quarantine = Quarantine(rules)
        self._probes = probes
        self._probe_timeout_s = probe_timeout_s
        self._changed = asyncio.Event()
        self._probing: set[asyncio.Task[None]] = set()

    def ended(
        self, kind: RequestKind, failed_on: Collection[ReplicaId], answered_by: ReplicaId | None, cause: str
    ) -> None:
        """A request is over; see `Quarantine.ended`."""
        self._quarantine.ended(kind, failed_on, answered_by, time.monotonic(), cause)
        self._publish()

    def told(self, replica_id: ReplicaId, problem: str | None) -> None:
        """A replica said what is wrong with it, or that nothing is."""
        self._quarantine.told(replica_id, problem, time.monotonic())
        self._publish()

    def has_another(self, besides: Collection[ReplicaId]) -> bool:
        """Whether a replica runs that is none of these."""
        return not set(self._state.replicas) <= set(besides)

    async def run(self) -> NoReturn:
        """Asks and probes until it is cancelled."""
        asking = asyncio.create_task(self._ask_for_ever())
        try:
            while True:
                self._quarantine.keep_only(self._state.replicas)
                self._publish()
                for replica_id in self._quarantine.due(time.monotonic()):
                    probing = asyncio.create_task(self._probe(replica_id))
                    self._probing.add(probing)
                    probing.add_done_callback(self._probing.discard)
                await self._until_something_is_due()
        finally:
            for task in (asking, *self._probing):
                task.cancel()

    async def _until_something_is_due(self) -> None:
        due_s = self._quarantine.next_due_s()
        wait_s = ASK_GAP_S if due_s is None else max(0.0, due_s - time.monotonic())
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._changed.wait()

    async def _ask_for_ever(self) -> NoReturn:
        while True:
            await asyncio.sleep(ASK_GAP_S)
            try:
                answers = await self._pool.ask_all("health", ASK_TIMEOUT_S)
            except Exception:  # whatever Ray raises, the next question may be answered
                log.exception("health_not_asked", pool=self._pool.name)
                continue
            for answer in answers:
                if not isinstance(answer, BaseException):
                    self.told(ReplicaId(answer["replica"]), answer["problem"])

    async def _probe(self, replica_id: ReplicaId) -> None:
        failed = [
            kind for kind, request in self._probes.items() if not await self._is_answered(replica_id, kind, request)
        ]
        self._quarantine.probed(replica_id, not failed, time.monotonic())
        log.info("replica_probed", replica=replica_id, failed=" ".join(failed) or "none")
        self._publish()
        self._changed.set()  # there is a next probe, or none

    async def _is_answered(self, replica_id: ReplicaId, kind: RequestKind, request: TunnelRequest) -> bool:
        # Any answer below 500 will do: if a probe itself were refused, the replica could never come back.
        call = self._pool.open(request, kind=kind, only=replica_id)
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                return (await read_reply(aiter(call))).status < 500
        except (OrthrusError, TruncatedReplyError, TimeoutError):
            return False
        except Exception:
            log.exception("probe_failed", replica=replica_id)
            return False
        finally:
            call.cancel()

    def _publish(self) -> None:
        before, now = self._state.quarantined, self._quarantine.reasons
        if before.keys() == now.keys():
            return
        for replica_id in now.keys() - before.keys():
            log.error("replica_quarantined", pool=self._pool.name, replica=replica_id, reason=now[replica_id])
        for replica_id in before.keys() - now.keys():
            log.info("replica_left_quarantine", pool=self._pool.name, replica=replica_id)
        self._state.num_quarantines += len(now.keys() - before.keys())
        self._state.quarantined = now
        self._changed.set()
