"""The deployment class that owns one engine: vLLM's OpenAI app behind the tunnel, live settings, health, metrics, the end.

Guards: a bad body is refused before vLLM sees it; `reconfigure` never raises, since Serve would kill the replica; a replica
whose EngineCore is gone answers nothing more and leaves its process, so that Serve starts another. Leaves out how an engine is
made (`orthrus_serve.engine`, imported only here and only when a replica starts) and which replica is chosen.
"""

import asyncio
import contextlib
import contextvars
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol

from prometheus_client import REGISTRY, CollectorRegistry, Histogram, generate_latest
from ray import serve

from orthrus_serve.config.embedder import switch_problem
from orthrus_serve.config.load import parse_live
from orthrus_serve.config.schema import AppArgs, LiveSpec
from orthrus_serve.errors import ConfigError, OrthrusError, RequestError
from orthrus_serve.policy.stream_pacing import Sharers, StreamPacer
from orthrus_serve.policy.topology import PRESETS
from orthrus_serve.serving import ray_compat
from orthrus_serve.serving.asgi_io import with_length
from orthrus_serve.serving.autoscaling import METRIC as AUTOSCALING_METRIC
from orthrus_serve.serving.core_pulse import CorePulse, PulseLimits
from orthrus_serve.serving.engine_metrics import EngineReportCollector, remaining_tokens
from orthrus_serve.serving.engine_reports import OpenCalls, ReplicaReport, ReportSender, done_by
from orthrus_serve.serving.error_shape import JSON_HEADERS, error_bytes
from orthrus_serve.serving.front_watch import leave_with_fronts
from orthrus_serve.serving.handover import Handover, prefill_reply, staged, whole_reply
from orthrus_serve.serving.ray_metrics import RayCopy
from orthrus_serve.serving.request_check import check_request
from orthrus_serve.serving.served import EmbedderFacts, served_by
from orthrus_serve.serving.status import log_start
from orthrus_serve.serving.topology_totals import TopologyTotals
from orthrus_serve.serving.tunnel import (
    UNSEEN_STATUS,
    ASGIApp,
    Header,
    Start,
    TunnelRequest,
    gone_start,
    marked_when_lost,
    run_app,
)
from orthrus_serve.telemetry.catalog import STAGE, Stage
from orthrus_serve.telemetry.log import configure, event_log
from orthrus_serve.types import Half, RequestKind

log = event_log(__name__)

# How long requests that were open when the core died may take to send their errors.
LAST_WORDS_S = 2.0
# How long a stalled core's processes may take to end: vLLM asks for 5 s, then kills them.
END_CORE_S = 20.0
IDLE_WATCH_GAP_S = 0.25
ALONE = Sharers(num_fronts=1, num_replicas=0)
TOLD_WITHIN_S = 1.0
GONE = RequestError(503, "The engine of this replica is gone.", code="replica_lost")


class EngineGoneError(OrthrusError):
    """The core of this replica's engine is gone."""


class Channel(Protocol):
    """The engine's channel to its core, as far as a replica uses it."""

    async def set(self, wanted: Mapping[str, Any]) -> dict[str, Any]: ...

    async def watch(self) -> dict[str, Any]: ...

    async def remaining(self) -> dict[str, Any]: ...


class Engine(Protocol):
    """What a replica needs of an engine (`orthrus_serve.engine.llm.MixedLLM`)."""

    channel: Any

    @property
    def errored(self) -> bool: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    async def check_health(self) -> None: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True)
class RunningEngine:
    """An engine that is up, its OpenAI app, and the length of each adapter's vectors.

    Two variables are set around the app's call: where a request's `dimensions` go, and what is told the engine's own ids of
    the requests that the call becomes. `metrics` are what is counted beside the core's reports. `embedder` has the facts of a
    model of its own that embeds, and `more_metrics` what vLLM publishes of it.
    """

    engine: Engine
    app: ASGIApp
    vector_sizes: Mapping[str, int]
    dimensions: contextvars.ContextVar[int | None]
    note_request: contextvars.ContextVar[Callable[[str], None] | None]
    metrics: CollectorRegistry = field(default_factory=CollectorRegistry)
    embedder: EmbedderFacts | None = None
    more_metrics: Callable[[], bytes] = bytes


StartEngine = Callable[[AppArgs], Awaitable[RunningEngine]]


async def start_engine(args: AppArgs) -> RunningEngine:
    """Starts the real engine in this process (its core in another).

    Raises:
        ConfigError, AdapterError, UnsupportedVersionError: it cannot run as configured.
    """
    # Imported here: only a replica's process loads torch and vLLM, after its switches are set; `app.py` needs this class too.
    from orthrus_serve.engine.args import make_engine  # noqa: PLC0415
    from orthrus_serve.engine.llm import embed_dimensions, note_request  # noqa: PLC0415
    from orthrus_serve.engine.openai_app import make_openai_app  # noqa: PLC0415
    from orthrus_serve.engine.pooling_head import vector_sizes  # noqa: PLC0415
    from orthrus_serve.engine.stage_times import StageTimes  # noqa: PLC0415

    metrics = CollectorRegistry()
    stages = Histogram(STAGE.name, STAGE.help, STAGE.labels, registry=metrics, buckets=STAGE.buckets)

    def observe(kind: RequestKind, stage: Stage, duration_s: float) -> None:
        stages.labels(kind, stage).observe(duration_s)

    stage_times: list[Any] = [partial(StageTimes, observe=observe)]
    if args.embedder is not None:
        return await _start_separate(args, metrics, stage_times)
    engine = make_engine(args, stat_loggers=stage_times)
    app = await make_openai_app(engine, args)
    sizes = vector_sizes(args.adapters, engine.model_config.get_hidden_size())
    return RunningEngine(engine, app, sizes, embed_dimensions, note_request, metrics)


async def _start_separate(args: AppArgs, metrics: CollectorRegistry, stat_loggers: list[Any]) -> RunningEngine:
    from orthrus_serve.engine.llm import embed_dimensions, note_request  # noqa: PLC0415
    from orthrus_serve.engine.separate import start_separate  # noqa: PLC0415

    assert args.embedder is not None
    models = await start_separate(args, stat_loggers=stat_loggers)
    facts = EmbedderFacts(models.engines.embedder.vocab_size, models.engines.embedder.max_model_len)
    sizes = {args.embedder.name: models.vector_size}
    return RunningEngine(
        models.engines, models.app, sizes, embed_dimensions, note_request, metrics, facts, models.more_metrics
    )


class EngineReplica:
    """One engine as a Ray Serve replica."""

    async def __init__(self, args: AppArgs, start: StartEngine = start_engine, others: Sharers = ALONE) -> None:
        """Returns when the engine can answer. An error here is a failed start, which Serve shows and tries again.

        `others` are the Fronts, and the engine replicas of other arms.
        """
        configure(args.log.level, as_json=args.log.as_json)
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._running = await start(args)
        self._served = served_by(
            args,
            base_name=args.model.name,
            vocab_size=self._running.engine.vocab_size,
            max_model_len=self._running.engine.max_model_len,
            vector_sizes=self._running.vector_sizes,
            embedder=self._running.embedder,
        )
        self._num_open = 0
        self._nothing_open = asyncio.Event()
        self._nothing_open.set()
        self._report: dict[str, Any] = {}
        self._settings: dict[str, Any] = {"applied": {}, "refused": None}
        self._args = args
        self._pacer = StreamPacer(partial(args.streams.most_per_s, partial(ray_compat.usual_chunks_per_s, others)))
        self._totals = TopologyTotals(args.topology)
        self._registry = CollectorRegistry()
        adapters = (*args.adapters, *args.generate_adapters)
        self._registry.register(EngineReportCollector(self._totals, self._told_report, adapters))
        registries = (self._registry, self._running.metrics, REGISTRY)
        self._ray_copy = RayCopy(lambda: (family for registry in registries for family in registry.collect()))
        limits = PulseLimits(args.health.stall_s, args.health.replace_after_s)
        self._pulse = CorePulse(self._running.engine.channel.remaining, limits)
        self._calls = OpenCalls()
        tell = ray_compat.tell_fronts(TOLD_WITHIN_S)
        self._sender = ReportSender(self._own_report, tell, answered=self._pacer.answered)
        running = (
            self._watch_core(),
            self._sender.run(),
            self._pulse.run(),
            self._leave_when_stalled(),
            self._ray_copy.run(),
            leave_with_fronts(self._calls, ray_compat.front_is_alive),
        )
        self._tasks = [asyncio.create_task(task) for task in running]
        log_start("engine_started", self._replica_id)

    def _own_report(self) -> ReplicaReport:
        return ReplicaReport(self._replica_id, self._calls.by_front(), done_by(self._report.get("totals", {})))

    def _told_report(self) -> dict[str, Any]:
        return self._report and {**self._report, "stream_gap_s": self._pacer.gap_s}

    # --- requests ---------------------------------------------------------------------------------------------------

    async def asgi(
        self,
        method: str,
        path: str,
        query: bytes,
        headers: list[Header],
        body: bytes,
        *,
        front: str = "",
        charge: int = 1,
        expected_output: int = 0,
        stage: Half | None = None,
        handover: Handover | None = None,
        **_routing: object,  # read by the router, which sees the arguments of the handle call
    ) -> AsyncGenerator[Start | bytes]:
        """Answers one HTTP request: yields `(status, headers)`, then body chunks. See `tunnel.run_app`.

        A replica whose core is gone marks its answer with `GONE_HEADER`; the Front then asks another one. `front` is whose
        call it is; what it was charged, and the output expected of it, are reported until the engine has it. `stage` and
        `handover` are of a generation that two replicas share: see `handover.py`.
        """
        self._num_open += 1
        self._nothing_open.clear()
        call = self._calls.begin(front, ray_compat.current_request_id(), charge, expected_output)
        self._sender.wake()
        try:
            if self._core_is_gone():
                yield gone_start(UNSEEN_STATUS, self._replica_id)
                yield error_bytes(GONE)
                return
            try:
                checked = check_request(path, body, self._served)
            except RequestError as error:
                yield error.status, list(JSON_HEADERS)
                yield error_bytes(error)
                return
            context = contextvars.copy_context()
            context.run(self._running.dimensions.set, checked.dimensions)
            context.run(self._running.note_request.set, lambda engine_id: self._calls.note(call, engine_id))
            seen = staged(checked.body, stage, handover)
            if isinstance(seen, str):
                reply = whole_reply(seen)
            else:
                request = TunnelRequest(method, path, query, with_length(headers, len(seen)), seen)
                reply = run_app(self._running.app, request, context=context, left=call.left, pacer=self._pacer)
                reply = prefill_reply(reply) if stage == "prefill" else reply
            async for item in marked_when_lost(reply, self._core_is_gone, self._replica_id):
                yield item
        finally:
            self._calls.end(call)
            self._sender.wake()
            self._num_open -= 1
            if not self._num_open:
                self._nothing_open.set()

    def _core_is_gone(self) -> bool:
        return self._running.engine.errored

    # --- live settings ----------------------------------------------------------------------------------------------

    async def reconfigure(self, user_config: Any) -> None:
        """Applies policy, minimum share and step size from the next step on. A refusal changes nothing and is told by `info`.

        Never raises: Serve kills a replica whose `reconfigure` raises, and starts new ones until the configuration is right.
        """
        try:
            live = parse_live(user_config, ("user_config",), LiveSpec)
            topology = live.topology or self._args.topology
            problem = switch_problem(self._args.topology, topology)
            if problem is not None:
                raise ConfigError(problem)
            wanted = live.model_dump(exclude={"topology"}, exclude_none=True)
            wanted.setdefault("policy", PRESETS[topology].pool.policy)
            self._settings = await self._running.engine.channel.set(wanted)
            if self._settings["refused"] is None:
                self._totals.topology = topology
        except ConfigError as error:
            self._refuse(str(error))
        except Exception as error:  # the replica goes on as it was; a dead core is the watcher's business
            log.exception("reconfigure_failed")
            self._refuse(f"{type(error).__name__}: {error}")
        if self._settings["refused"] is not None:
            log.error("reconfigure_refused", reason=self._settings["refused"])

    def _refuse(self, reason: str) -> None:
        self._settings = {**self._settings, "refused": reason}

    # --- the core's life --------------------------------------------------------------------------------------------

    async def _watch_core(self) -> None:
        """Keeps the core's last report. Ends the process when the core is gone, and only then."""
        while not self._core_is_gone():
            mark = self._calls.mark
            try:
                self._report = await self._running.engine.channel.watch()
                self._calls.follow(self._report["requests"], mark)
                self._sender.wake()
                self._totals.see(self._report.get("totals", {}))
            except Exception:
                log.exception("no_report_from_engine_core", replica=self._replica_id)
                self._report = {}
            if not self._report.get("requests"):
                await asyncio.sleep(IDLE_WATCH_GAP_S)  # an idle core answers at once
        log.error("engine_core_gone", replica=self._replica_id)
        await self._leave()

    async def _leave_when_stalled(self) -> None:
        """Ends the process when the core was stalled for too long. The core goes first: it holds the GPU, and it would stay."""
        await self._pulse.must_replace.wait()
        log.error("engine_core_stalled", replica=self._replica_id, problem=self._pulse.problem)
        await self._end_cores()
        os._exit(1)

    async def _end_cores(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_CORE_S):
                await asyncio.to_thread(self._running.engine.shutdown)

    async def _leave(self) -> NoReturn:
        # vLLM has failed the open requests by now; let their errors out. A replica that stayed would answer instant errors,
        # look idle, and draw everybody's requests.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._nothing_open.wait()
        if self._running.embedder is not None:
            await self._end_cores()  # one of two is gone; the other holds its part of the GPU
        os._exit(1)

    async def check_health(self) -> None:
        """Called by Serve; raises when this replica must be replaced.

        Raises:
            EngineGoneError: the core is gone.
        """
        if self._core_is_gone():
            raise EngineGoneError(f"the engine core of {self._replica_id} is gone")
        await self._running.engine.check_health()

    def __del__(self) -> None:
        # Serve's only hook for the end of a replica; it comes after the open requests were answered.
        running = getattr(self, "_running", None)
        if running is not None:
            for task in self._tasks:
                task.cancel()
            running.engine.shutdown()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve where it scales by load: what is left to compute here."""
        return {AUTOSCALING_METRIC: float(self._calls.num_remaining_tokens)}

    # --- questions to every replica ---------------------------------------------------------------------------------

    async def health(self) -> dict[str, Any]:
        """`{"replica": id, "problem": None or a sentence}`."""
        try:
            await self.check_health()
        except Exception as error:
            log.exception("unhealthy", replica=self._replica_id)
            return {"replica": self._replica_id, "problem": f"{type(error).__name__}: {error}"[:300]}
        return {"replica": self._replica_id, "problem": self._pulse.problem}

    async def metrics(self) -> dict[str, str]:
        """`{"replica": id, "text": Prometheus text}`: ours, and all that vLLM publishes in this process."""
        text = generate_latest(self._registry) + generate_latest(self._running.metrics) + generate_latest()
        text += self._running.more_metrics()
        return {"replica": self._replica_id, "text": text.decode()}

    async def info(self) -> dict[str, Any]:
        """What `/status` shows: settings applied and refused, the core's last report without its requests. JSON-able."""
        report = {key: value for key, value in self._report.items() if key != "requests"}
        return {
            "replica": self._replica_id,
            "pid": os.getpid(),
            "topology": self._totals.topology,
            "remaining_tokens": remaining_tokens(self._report),
            "open": self._num_open,
            "in_engine": len(self._report.get("requests", ())),
            "kept": self._report.get("kept", 0),
            "settings": self._settings,
            "report": report,
        }
