"""The Front: the deployment that speaks HTTP. Plain ASGI; it checks the route, charges, opens one handle call, and relays.

Guards: only the routes of `routes.py` exist; a client that leaves cancels its call; a request is tried on another replica only
while no byte of its answer was sent; a cut stream ends in an error event. Leaves out whether a body is valid (the replica
knows vocabulary and lengths), the choice of a replica (`router.py`), and all tokenising.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ray import serve
from ray.serve.handle import DeploymentHandle

from orthrus_serve.config.api_keys import read_digests
from orthrus_serve.config.schema import AppArgs
from orthrus_serve.errors import RequestError
from orthrus_serve.policy.charge import ChargeEstimator, RequestShape
from orthrus_serve.policy.key_limits import KeyAccounts
from orthrus_serve.policy.quarantine import QuarantineRules
from orthrus_serve.serving import ray_compat
from orthrus_serve.serving.ab_page import AbPage
from orthrus_serve.serving.admission import Door, TurnedAwayError, key_accounts
from orthrus_serve.serving.asgi_io import (
    ClientLeftError,
    before_client_leaves,
    header,
    read_body,
    run_lifespan,
    send_error,
    send_whole,
)
from orthrus_serve.serving.calls import judge, opened, try_reply
from orthrus_serve.serving.charging import CHARGED_ROUTES, ReplyMeter, learn, num_tokens_of, shape_of_request
from orthrus_serve.serving.disagg import WHOLE, is_shared, prefill
from orthrus_serve.serving.engine_reports import ReplicaReport
from orthrus_serve.serving.error_shape import sse_error_event
from orthrus_serve.serving.exchange import Exchange
from orthrus_serve.serving.key_guard import KeyGuard
from orthrus_serve.serving.live_arms import Arm, LiveArms
from orthrus_serve.serving.live_routing import LiveRouting
from orthrus_serve.serving.metrics_export import FrontMetrics
from orthrus_serve.serving.mirror import Mirrors
from orthrus_serve.serving.pool import EnginePool, Peers
from orthrus_serve.serving.pool_keeper import PoolKeeper, make_probes
from orthrus_serve.serving.ray_metrics import RayCopy
from orthrus_serve.serving.request_watch import RequestWatch
from orthrus_serve.serving.routes import MethodNotAllowedError, Target, find_route
from orthrus_serve.serving.status import StatusPages, StatusParts, installed_versions, log_start
from orthrus_serve.serving.tracing import Traces
from orthrus_serve.serving.tries import Tries
from orthrus_serve.serving.tunnel import (
    GONE_HEADER,
    Header,
    Message,
    Receive,
    Reply,
    Send,
    Start,
    TunnelRequest,
)
from orthrus_serve.telemetry.log import configure, event_log

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
        arms: LiveArms,
        limits: FrontLimits,
        metrics: FrontMetrics,
        watch: RequestWatch,
        pages: StatusPages,
        ab_page: AbPage,
    ) -> None:
        self._arms = arms
        self._limits = limits
        self._metrics = metrics
        self._watch = watch
        self._pages = pages
        self._ab_page = ab_page
        self._mirrors = Mirrors(self._answer, arms, metrics)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One ASGI connection."""
        if scope["type"] == "lifespan":
            await run_lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _http(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        exchange = Exchange(send)
        exchange.request_id = _request_id(scope["headers"])
        if path not in CHARGED_ROUTES:
            await self._answer_or_refuse(scope, path, receive, exchange)
            return
        kind = CHARGED_ROUTES[path][0]
        try:
            arm = self._arms.choose(scope["headers"])
        except RequestError as error:
            self._metrics.refused(kind, "unknown_arm")
            await send_error(send, error)
            return
        exchange.arm = arm.name
        with self._watch.following(path, scope["headers"], kind, arm, exchange):
            await self._answer_or_refuse(scope, path, receive, exchange)

    async def _answer_or_refuse(self, scope: Message, path: str, receive: Receive, send: Exchange) -> None:
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
            log.exception("request_failed", path=path, request_id=send.request_id)
            if send.status is not None:
                raise  # the connection must not end as if the answer were complete
            await send_error(send, FAILED)

    async def _route(self, target: Target, scope: Message, path: str, receive: Receive, send: Exchange) -> None:
        if target is Target.ENGINE:
            headers: list[Header] = [(bytes(name).lower(), bytes(value)) for name, value in scope["headers"]]
            body = await read_body(receive, headers, self._limits.max_body_bytes)
            forwarded = send.traced(_forwarded_headers(headers, send.request_id, len(body)))
            request = TunnelRequest(scope["method"], path, scope["query_string"], forwarded, body)
            arm = self._arms.named(send.arm) or self._arms.choose(headers)
            send.arm = arm.name
            if not await before_client_leaves(self._admit_and_answer(request, headers, arm, send), receive):
                raise ClientLeftError
        elif target is Target.HEALTH:
            await send_whole(send, *await self._pages.health())
        elif target is Target.METRICS:
            await send_whole(send, *await self._pages.metrics())
        elif target is Target.STATUS:
            await send_whole(send, *await self._pages.status())
        elif target is Target.AB:
            await send_whole(send, *await self._ab_page.page())
        else:
            await send_whole(send, *self._pages.version())

    async def _admit_and_answer(self, request: TunnelRequest, headers: list[Header], arm: Arm, send: Exchange) -> None:
        shape = shape_of_request(request.path, request.body)
        visit = None if arm.door is None or shape is None else arm.door.enter(request, shape, headers)
        if shape is not None:
            self._mirrors.copy(request, shape, arm)
        if visit is None:
            await self._answer(request, shape, arm, send)
            return
        send.tap = visit.saw
        try:
            await self._answer(request, shape, arm, send)  # charged before anything is awaited
        finally:
            visit.leave()

    async def _answer(self, request: TunnelRequest, shape: RequestShape | None, arm: Arm, send: Exchange) -> None:
        tries, half = Tries(), WHOLE
        if shape is not None and is_shared(arm, shape):
            half = await prefill(request, shape, arm, tries, send)
            self._metrics.handed(arm.name, half.handed)
            if half.refusal is not None:
                await self._deliver(half.refusal, send, ReplyMeter())
                return
        was_handed_over = half.handover is not None
        for number in range(MAX_CALLS):
            if was_handed_over and number == 1:
                self._metrics.handed(arm.name, "retried")
            # One open call at a time: Serve gives all calls of one HTTP request the same id.
            with opened(request, arm, shape, tries.failed_on, **half.told) as call:
                half = WHOLE  # another try computes it whole
                try:
                    reply = await try_reply(call, send.request_id)
                except Exception:
                    if call.replica_id is not None:  # not for want of a replica: it failed in a way that nobody foresaw
                        tries.saw(None, call.replica_id)
                        judge(arm, shape, tries, None)
                    raise
                finally:
                    send.tried(call.replica_id, call.placed_s)
                tries.saw(reply, call.replica_id)
                if tries.gone is not None:
                    arm.keeper.told(tries.gone, "its engine is gone")
                elif reply is not None and not _is_worth_another(arm, tries):
                    await self._deliver_and_learn(reply, arm, send, shape, tries)
                    return
            if tries.is_suspect:
                break
        judge(arm, shape, tries, None)
        raise LOST

    async def _deliver_and_learn(
        self, reply: Reply, arm: Arm, send: Exchange, shape: RequestShape | None, tries: Tries
    ) -> None:
        meter = ReplyMeter()
        is_complete = await self._deliver(reply, send, meter)
        if meter.has_failure or not is_complete:
            send.is_cut = True
            if not tries.has_just_failed:
                tries.fail("a stream that was cut")
        judge(arm, shape, tries, None if tries.has_just_failed else tries.replica_id)
        if shape is not None and is_complete and reply.status == 200 and not meter.has_error:
            send.num_tokens = num_tokens_of(arm.estimator, shape, meter)
            learn(arm.estimator, shape, meter)

    async def _deliver(self, reply: Reply, send: Exchange, meter: ReplyMeter) -> bool:
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

    async def _relay(self, rest: AsyncIterator[Start | bytes], send: Exchange, meter: ReplyMeter) -> bool:
        try:
            async for chunk in rest:
                if isinstance(chunk, bytes):
                    meter.see(chunk)
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception:  # whatever cuts a stream, the client is told within it
            log.exception("stream_cut", replica=send.replica, request_id=send.request_id)
            send.is_cut = True
            await send({"type": "http.response.body", "body": sse_error_event(CUT), "more_body": True})
            return False
        return True


def _is_worth_another(arm: Arm, tries: Tries) -> bool:
    """Whether an error that came before the first byte may be the replica's, and another one can be asked."""
    return tries.has_just_failed and not tries.is_suspect and arm.keeper.has_another(tries.failed_on)


def _request_id(headers: Iterable[Header]) -> str:
    """Serve sets `X-Request-Id` when the client did not, and echoes it; the engine takes it into its own ids, so one that is
    long or not printable is replaced."""
    text = (header(headers, b"x-request-id") or b"").decode("latin-1")
    is_good = 0 < len(text) <= MAX_REQUEST_ID_CHARS and text.isascii() and text.isprintable()
    return text if is_good else uuid.uuid4().hex


def _forwarded_headers(headers: list[Header], request_id: str, num_body_bytes: int) -> list[Header]:
    """The few headers that vLLM's app needs."""
    kept = [(name, value) for name, value in headers if name in FORWARDED_HEADERS]
    return [*kept, (b"x-request-id", request_id.encode()), (b"content-length", str(num_body_bytes).encode())]


class Front:
    """The Serve deployment class: wires a Front's parts together, once Serve has given it a handle to each arm's engines."""

    def __init__(self, args: AppArgs, engines: Mapping[str, DeploymentHandle[Any]], num_fronts: int = 1) -> None:
        """`engines` has a handle for each of `args.by_arm`."""
        self._id = serve.get_replica_context().replica_id.unique_id
        configure(args.log.level, as_json=args.log.as_json)
        metrics, peers = FrontMetrics(), Peers()
        self._metrics = metrics
        self._ray_copy = RayCopy(metrics.collect)
        accounts = None if args.admission is None else key_accounts(args.admission, num_fronts)
        arms = [
            _make_arm(name, of_arm, EnginePool(engines[name], self._id), accounts, metrics)
            for name, of_arm in args.by_arm.items()
        ]
        for arm in arms:
            metrics.follow(arm.name, lambda arm=arm: arm.topology, arm.state)
        self._arms = LiveArms(args, arms)
        self._keeping: list[asyncio.Task[NoReturn]] = []
        parts = StatusParts(own=self.info, fronts=peers.ask_all, serving=self._arms.serving())
        pools = {arm.name: arm.pool for arm in arms}
        self._ab_page = AbPage(self._arms, peers.ask_all)
        self._key_digests = None if args.api_keys is None else read_digests(args.api_keys)
        self._app = FrontApp(
            self._arms,
            FrontLimits(max_body_bytes=args.limits.max_body_bytes),
            metrics,
            RequestWatch(metrics, self._arms, Traces(args.tracing), logs_requests=args.log.requests),
            StatusPages(pools, installed_versions(), self._id, metrics.text, parts),
            self._ab_page,
        )

    async def __serve_build_asgi_app__(self) -> FrontApp | KeyGuard:
        """The app that Serve runs. Called once, on the event loop that the app will run on."""
        log_start("front_started", self._id)
        work = [*(arm.keeper.run() for arm in self._arms), self._ray_copy.run()]
        self._keeping = [asyncio.create_task(task) for task in work]
        if self._key_digests is None:
            return self._app
        return KeyGuard(self._app, self._key_digests, self._metrics.unauthorized)

    async def reconfigure(self, user_config: Any) -> None:
        """Changes weights, mirror, topology, router rule and roles from the next request on. Never raises; `info` tells a
        refusal."""
        self._arms.change(user_config)

    async def take_report(self, report: ReplicaReport) -> float:
        """Called by the engine replicas while they have work. Returns how many seconds the next one should be apart."""
        return self._arms.take_report(self._id, report, ray_compat.place_among_replicas())

    async def metrics(self) -> dict[str, str]:
        """`{"replica": id, "text": Prometheus text}` of this Front alone; the page `/metrics` has everybody's."""
        return {"replica": self._id, "text": self._metrics.text()}

    async def tell_slices(self) -> dict[str, Any]:
        """What each arm did in the last hour, by this Front's requests; see `slices.merge_told`."""
        return self._ab_page.told()

    async def info(self) -> dict[str, Any]:
        """What this Front goes by, what it has open, and the remaining tokens that it counts for it. JSON-able.

        `drift` is by how many tokens the last reports moved that count; `loads` has everybody's remaining tokens by replica.
        With arms, each has its own under `arms`.
        """
        by_arm = {arm.name: {"front": self._id, **arm.info()} for arm in self._arms}
        if not self._arms.are_named:
            return by_arm[""]
        return {"front": self._id, **self._arms.describe(), "arms": by_arm}


def _make_arm(name: str, args: AppArgs, pool: EnginePool, accounts: KeyAccounts | None, metrics: FrontMetrics) -> Arm:
    rules = QuarantineRules(max_failures=args.health.max_failures)
    max_prompt = args.vllm.get("max_model_len")
    estimator = ChargeEstimator(max_prompt if isinstance(max_prompt, int) else None)
    door = None
    if args.admission is not None and accounts is not None:
        door = Door(args.admission, accounts, pool.state, estimator, metrics)
    return Arm(
        name=name,
        pool=pool,
        keeper=PoolKeeper(pool, pool.state, rules, make_probes(args), args.health.probe_timeout_s),
        estimator=estimator,
        state=pool.state,
        routing=LiveRouting(args, pool.state),
        door=door,
        num_gpus_per_replica=args.num_gpus_per_replica,
    )
