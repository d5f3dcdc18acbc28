"""The Front: the deployment that speaks HTTP. Plain ASGI; it checks the route, charges, opens one handle call, and relays.

Guards: only the routes of `routes.py` exist; a client that leaves cancels its call; a request is tried on another replica only
while no byte of its answer was sent; a cut stream ends in an error event. Leaves out whether a body is valid (the replica
knows vocabulary and lengths), the choice of a replica (`router.py`), and all tokenising.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ray import serve
from ray.serve.handle import DeploymentHandle

from orthrus_serve.config.schema import AppArgs
from orthrus_serve.errors import RequestError
from orthrus_serve.policy.charge import ChargeEstimator, RequestShape
from orthrus_serve.policy.quarantine import QuarantineRules
from orthrus_serve.serving.admission import Door, TurnedAwayError
from orthrus_serve.serving.asgi_io import ClientLeftError, header, read_body, send_error, send_whole
from orthrus_serve.serving.charging import CHARGED_ROUTES, ReplyMeter, learn, shape_of_request
from orthrus_serve.serving.engine_reports import ReplicaReport, report_gap_s
from orthrus_serve.serving.error_shape import sse_error_event
from orthrus_serve.serving.live_routing import LiveRouting
from orthrus_serve.serving.metrics_export import FrontMetrics, outcome_of
from orthrus_serve.serving.pool import EnginePool, OpenCall, Peers, Pool, PoolUnavailableError, ReplicaLostError
from orthrus_serve.serving.pool_keeper import PoolKeeper, make_probes
from orthrus_serve.serving.routes import MethodNotAllowedError, Target, find_route
from orthrus_serve.serving.status import StatusPages, StatusParts, installed_versions
from orthrus_serve.serving.tries import Tries
from orthrus_serve.serving.tunnel import (
    GONE_HEADER,
    Header,
    Message,
    Receive,
    Reply,
    Send,
    Start,
    TruncatedReplyError,
    TunnelRequest,
    read_reply,
)
from orthrus_serve.telemetry.log import event_log
from orthrus_serve.types import ReplicaId

log = event_log(__name__)

# A replica that refused it unseen, having no engine, costs nothing but a call.
MAX_CALLS = 8
RETRY_AFTER_S = 5
# Everything else a client sends stays here: vLLM takes orders from some headers (data-parallel rank, tracing of its own).
FORWARDED_HEADERS = frozenset({b"content-type", b"accept", b"traceparent", b"tracestate"})
HOP_HEADERS = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"content-length", GONE_HEADER})
MAX_REQUEST_ID_CHARS = 128

CUT = RequestError(502, "The replica that was answering is gone; this stream is incomplete.", code="replica_lost")
LOST = RequestError(503, "The replicas that worked on this request were lost. Try again.", code="replica_lost")
FAILED = RequestError(500, "The server failed to answer this request.", code="internal_error")


@dataclass(frozen=True)
class FrontLimits:
    """What the Front itself refuses."""

    max_body_bytes: int


class FrontApp:
    """The ASGI app of one Front."""

    def __init__(
        self,
        pool: Pool,
        keeper: PoolKeeper,
        limits: FrontLimits,
        estimator: ChargeEstimator,
        metrics: FrontMetrics,
        pages: StatusPages,
        door: Door | None = None,
    ) -> None:
        self._pool = pool
        self._keeper = keeper
        self._limits = limits
        self._estimator = estimator
        self._metrics = metrics
        self._pages = pages
        self._door = door

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """One ASGI connection."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _http(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        watched = _WatchedSend(send)
        if path not in CHARGED_ROUTES:
            await self._answer_or_refuse(scope, path, receive, watched)
            return
        kind = CHARGED_ROUTES[path][0]
        began = self._metrics.began(kind)
        try:
            await self._answer_or_refuse(scope, path, receive, watched)
        except asyncio.CancelledError:  # Serve cancels us when the client disconnects
            watched.has_left = True
            raise
        finally:
            outcome = outcome_of(watched.status, is_cut=watched.is_cut, has_left=watched.has_left)
            self._metrics.ended(kind, began, outcome)

    async def _answer_or_refuse(self, scope: dict[str, Any], path: str, receive: Receive, send: "_WatchedSend") -> None:
        try:
            await self._route(find_route(scope["method"], path), scope, path, receive, send)
        except ClientLeftError:
            send.has_left = True
        except MethodNotAllowedError as error:
            await send_error(send, error, [(b"allow", error.allow.encode())])
        except TurnedAwayError as error:
            await send_error(send, error, error.headers)
        except RequestError as error:
            retry = [(b"retry-after", str(RETRY_AFTER_S).encode())] if error.status == 503 else []
            await send_error(send, error, retry)
        except Exception:
            log.exception("request_failed", path=path)
            if send.status is not None:
                raise  # the connection must not end as if the answer were complete
            await send_error(send, FAILED)

    async def _route(
        self, target: Target, scope: dict[str, Any], path: str, receive: Receive, send: "_WatchedSend"
    ) -> None:
        if target is Target.ENGINE:
            headers: list[Header] = [(bytes(name).lower(), bytes(value)) for name, value in scope["headers"]]
            body = await read_body(receive, headers, self._limits.max_body_bytes)
            forwarded = _forwarded_headers(headers, len(body))
            request = TunnelRequest(scope["method"], path, scope["query_string"], forwarded, body)
            if not await _before_client_leaves(self._admit_and_answer(request, headers, send), receive):
                raise ClientLeftError
        elif target is Target.HEALTH:
            await send_whole(send, *await self._pages.health())
        elif target is Target.METRICS:
            await send_whole(send, *await self._pages.metrics())
        elif target is Target.STATUS:
            await send_whole(send, *await self._pages.status())
        else:
            await send_whole(send, *self._pages.version())

    async def _admit_and_answer(self, request: TunnelRequest, headers: list[Header], send: "_WatchedSend") -> None:
        visit = self._door.enter(request, headers) if self._door is not None else None
        if visit is None:
            await self._answer(request, send)
            return
        send.tap = visit.saw
        try:
            await self._answer(request, send)  # charged before anything is awaited
        finally:
            visit.leave()

    async def _answer(self, request: TunnelRequest, send: "_WatchedSend") -> None:
        shape = shape_of_request(request.path, request.body)
        tries = Tries()
        for _ in range(MAX_CALLS):
            # One open call at a time: Serve gives all calls of one HTTP request the same id.
            with self._opened(request, shape, tries.failed_on) as call:
                try:
                    reply = await self._try_reply(call)
                except Exception:
                    if call.replica_id is not None:  # not for want of a replica: it failed in a way that nobody foresaw
                        tries.saw(None, call.replica_id)
                        self._judge(shape, tries, None)
                    raise
                tries.saw(reply, call.replica_id)
                if tries.gone is not None:
                    self._keeper.told(tries.gone, "its engine is gone")
                elif reply is not None and not self._is_worth_another(tries):
                    await self._deliver_and_learn(reply, send, shape, tries)
                    return
            if tries.is_suspect:
                break
        self._judge(shape, tries, None)
        raise LOST

    def _is_worth_another(self, tries: Tries) -> bool:
        """Whether an error that came before the first byte may be the replica's, and another one can be asked."""
        return tries.has_just_failed and not tries.is_suspect and self._keeper.has_another(tries.failed_on)

    async def _deliver_and_learn(
        self, reply: Reply, send: "_WatchedSend", shape: RequestShape | None, tries: Tries
    ) -> None:
        meter = ReplyMeter()
        is_complete = await self._deliver(reply, send, meter)
        if not tries.has_just_failed and (meter.has_error or not is_complete):
            tries.fail("a stream that was cut")
        self._judge(shape, tries, None if tries.has_just_failed else tries.replica_id)
        if shape is not None and is_complete and reply.status == 200:
            learn(self._estimator, shape, meter)

    def _judge(self, shape: RequestShape | None, tries: Tries, answered_by: ReplicaId | None) -> None:
        # A request without a forward pass says nothing about an engine.
        if shape is not None:
            self._keeper.ended(shape.kind, tries.failed_on, answered_by, tries.cause)

    @contextlib.contextmanager
    def _opened(
        self, request: TunnelRequest, shape: RequestShape | None, avoid: Sequence[ReplicaId]
    ) -> Iterator[OpenCall]:
        known: dict[str, Any] = {}
        if shape is not None:
            known = {"kind": shape.kind, "charge": self._estimator.estimate(shape)}
            known["expected_output"] = self._estimator.expected_output(shape)
        call = self._pool.open(request, avoid=avoid, **known)
        try:
            yield call
        finally:
            call.cancel()

    async def _try_reply(self, call: OpenCall) -> Reply | None:
        """The reply up to its first byte, or None when the replica was lost before there was one."""
        try:
            return await read_reply(aiter(call))
        except (ReplicaLostError, TruncatedReplyError) as lost:
            log.warning("replica_lost_before_first_byte", cause=lost)
            return None
        except PoolUnavailableError as none:
            raise RequestError(503, f"No engine replica is available: {none}", code="no_replica") from none

    async def _deliver(self, reply: Reply, send: "_WatchedSend", meter: ReplyMeter) -> bool:
        """Sends a reply whose first byte is there. Returns whether it was complete."""
        meter.see(reply.body)
        headers = [(name, value) for name, value in reply.headers if name.lower() not in HOP_HEADERS]
        if reply.rest is None:
            await send_whole(send, reply.status, headers, reply.body)
            return True
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body, "more_body": True})
        complete = await self._relay(reply.rest, send, meter)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return complete

    async def _relay(self, rest: AsyncIterator[Start | bytes], send: "_WatchedSend", meter: ReplyMeter) -> bool:
        try:
            async for chunk in rest:
                if isinstance(chunk, bytes):
                    meter.see(chunk)
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception:  # whatever cuts a stream, the client is told within it
            log.exception("stream_cut")
            send.is_cut = True
            await send({"type": "http.response.body", "body": sse_error_event(CUT), "more_body": True})
            return False
        return True


class _WatchedSend:
    """Passes messages on, and remembers how the answer went."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None
        self.is_cut = False
        self.has_left = False
        self.tap: Callable[[Message], Message] | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        if self.tap is not None:
            message = self.tap(message)
        await self._send(message)


async def _before_client_leaves(answer: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Runs `answer` to its end: True. Cancels it when the client disconnects first: False."""
    answering = asyncio.create_task(answer)
    leaving = asyncio.create_task(_until_disconnect(receive))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            return False
        answering.result()
        return True
    finally:
        # Also when this task is cancelled, which is how Serve tells that the client is gone.
        leaving.cancel()
        answering.cancel()


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _forwarded_headers(headers: list[Header], num_body_bytes: int) -> list[Header]:
    """The few headers that vLLM's app needs. Serve sets `X-Request-Id` when the client did not, and echoes it; the engine
    takes it into its own ids, so one that is long or not printable is replaced there."""
    kept = [(name, value) for name, value in headers if name in FORWARDED_HEADERS]
    request_id = header(headers, b"x-request-id") or b""
    text = request_id.decode("latin-1")
    if not text or len(text) > MAX_REQUEST_ID_CHARS or not (text.isascii() and text.isprintable()):
        request_id = uuid.uuid4().hex.encode()
    return [*kept, (b"x-request-id", request_id), (b"content-length", str(num_body_bytes).encode())]


class Front:
    """The Serve deployment class: wires a Front's parts together, once Serve has given it a handle to the engines."""

    def __init__(self, args: AppArgs, engines: DeploymentHandle[Any], num_fronts: int = 1) -> None:
        self._id = serve.get_replica_context().replica_id.unique_id
        pool = EnginePool(engines, self._id)
        self._load = pool.state
        self._live = LiveRouting(args, self._load)
        rules = QuarantineRules(max_failures=args.health.max_failures)
        self._keeper = PoolKeeper(pool, self._load, rules, make_probes(args), args.health.probe_timeout_s)
        self._keeping: asyncio.Task[NoReturn] | None = None
        metrics = FrontMetrics(lambda: self._live.topology, self._load.ledger)
        parts = StatusParts(own=self.info, fronts=Peers().ask_all, serving=self._load.serving)
        max_prompt = args.vllm.get("max_model_len")
        estimator = ChargeEstimator(max_prompt if isinstance(max_prompt, int) else None)
        self._door: Door | None = None
        if args.admission is not None:
            self._door = Door(args.admission, num_fronts, self._load, estimator, metrics)
        self._app = FrontApp(
            pool,
            self._keeper,
            FrontLimits(max_body_bytes=args.limits.max_body_bytes),
            estimator,
            metrics,
            StatusPages([pool], installed_versions(), self._id, metrics.text, parts),
            self._door,
        )

    async def __serve_build_asgi_app__(self) -> FrontApp:
        """The app that Serve runs. Called once, on the event loop that the app will run on."""
        self._keeping = asyncio.create_task(self._keeper.run())
        return self._app

    async def reconfigure(self, user_config: Any) -> None:
        """Changes topology, router rule and roles from the next request on. Never raises; `info` tells a refusal."""
        self._live.change(user_config)

    async def take_report(self, report: ReplicaReport) -> float:
        """Called by the engine replicas while they have work. Returns how many seconds the next one should be apart."""
        self._load.take_report(self._id, report)
        if self._door is not None:
            self._door.take_report(report)
        return report_gap_s(len(self._load.replicas))

    async def info(self) -> dict[str, Any]:
        """What this Front goes by, what it has open, and the remaining tokens that it counts for it. JSON-able.

        `drift` is by how many tokens the last reports moved that count; `loads` has everybody's remaining tokens by replica.
        """
        ledger = self._load.ledger
        return {
            "front": self._id,
            **self._live.describe(),
            "replicas": list(self._load.replicas),
            "routed": self._load.num_routed,
            "open": ledger.num_open,
            "tokens": ledger.num_own_tokens,
            "quarantined": dict(self._load.quarantined),
            "drift": ledger.num_drift_tokens,
            "loads": dict(ledger.remaining_tokens),
        }
