"""The Front's ASGI app over a pool that answers by script: routes, limits, errors, retries, cut streams, clients that leave."""

import asyncio
import json
from collections.abc import AsyncIterator, Collection
from typing import Any

import pytest

from orthrus_serve.config.schema import AppArgs
from orthrus_serve.policy.charge import ChargeEstimator
from orthrus_serve.policy.quarantine import QuarantineRules
from orthrus_serve.serving.ab_page import AbPage
from orthrus_serve.serving.front import FrontApp, FrontLimits
from orthrus_serve.serving.live_arms import Arm, LiveArms
from orthrus_serve.serving.live_routing import LiveRouting
from orthrus_serve.serving.metrics_export import FrontMetrics
from orthrus_serve.serving.pool import PoolUnavailableError, ReplicaLostError
from orthrus_serve.serving.pool_keeper import PoolKeeper
from orthrus_serve.serving.request_watch import RequestWatch
from orthrus_serve.serving.router_state import RouterState
from orthrus_serve.serving.routes import NOT_YET, ROUTES, Target
from orthrus_serve.serving.status import StatusPages, StatusParts
from orthrus_serve.serving.tracing import Traces
from orthrus_serve.serving.tunnel import GONE_HEADER, Start, TunnelRequest
from orthrus_serve.types import ReplicaId

JSON = [(b"content-type", b"application/json")]
SSE = [(b"content-type", b"text/event-stream")]
GONE = (503, [*JSON, (GONE_HEADER, b"r1")])
EMBED = "/v1/embeddings"
REPLICAS = (ReplicaId("r1"), ReplicaId("r2"))
BODY = b'{"input": "hello"}'


class ScriptedCall:
    """Yields its items; raises those that are exceptions; waits for ever at `...`."""

    def __init__(self, script: list[Any], replica_id: ReplicaId) -> None:
        self._script = iter(script)
        self.replica_id = replica_id
        self.placed_s = 1.0
        self.is_cancelled = False

    def __aiter__(self) -> AsyncIterator[Start | bytes]:
        return self

    async def __anext__(self) -> Any:
        item = next(self._script, None)
        if item is None:
            raise StopAsyncIteration
        if item is ...:
            await asyncio.Event().wait()
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self) -> None:
        self.is_cancelled = True


class ScriptedPool:
    """Each opened call plays the next script, on the two replicas in turn."""

    name = "Engine"

    def __init__(self, *scripts: list[Any], answers: list[Any] | None = None) -> None:
        self._scripts = list(scripts)
        self._answers = answers or []
        self.opened: list[tuple[TunnelRequest, dict[str, Any], tuple[str, ...]]] = []
        self.calls: list[ScriptedCall] = []

    def open(self, request: TunnelRequest, *, avoid: Collection[str] = (), **known: Any) -> ScriptedCall:
        assert all(call.is_cancelled for call in self.calls), "one open call at a time"
        self.opened.append((request, known, tuple(avoid)))
        self.calls.append(ScriptedCall(self._scripts.pop(0), REPLICAS[len(self.calls) % 2]))
        return self.calls[-1]

    async def ask_all(self, method: str, timeout_s: float) -> list[Any]:
        return self._answers


ARGS = {"topology": "orthrus", "model": {"path": "/m"}, "adapters": {"e": {"path": "/a"}}}
FRONT = {
    "front": "front-1", "topology": "orthrus", "rule": "round_robin", "dedicated": None, "disagg_pd": None, "refused": None,
    "replicas": ["r1"], "quarantined": {}, "routed": 3, "open": 0, "tokens": 0,
}  # fmt: skip


async def own_info() -> dict[str, Any]:
    return FRONT


async def all_fronts(method: str, timeout_s: float) -> list[Any]:
    if method == "metrics":
        return [{"replica": "front-2", "text": "# HELP b b\n# TYPE b gauge\nb 2\n"}, TimeoutError("late")]
    return [FRONT, TimeoutError("late")]


class Client:
    """One HTTP exchange with a Front, as an ASGI server would have it."""

    def __init__(self, pool: ScriptedPool, max_body_bytes: int = 1000, **more_args: Any) -> None:
        self.metrics = FrontMetrics()
        parts = StatusParts(own=own_info, fronts=all_fronts, serving={"": lambda _, replicas: replicas})
        pages = StatusPages({"": pool}, {"version": "0"}, "front-1", self.metrics.text, parts)
        limits = FrontLimits(max_body_bytes)
        self.state = RouterState(replicas=REPLICAS)
        self.keeper = PoolKeeper(pool, self.state, QuarantineRules(max_failures=1), {}, probe_timeout_s=1.0)
        args = AppArgs.model_validate({**ARGS, **more_args})
        arm = Arm("", pool, self.keeper, ChargeEstimator(), self.state, LiveRouting(args, self.state))
        arms = LiveArms(args, [arm])
        watch = RequestWatch(self.metrics, arms, Traces(None), logs_requests=True)
        self._app = FrontApp(arms, limits, self.metrics, watch, pages, AbPage(arms, all_fronts))
        self.left = asyncio.Event()
        self.status: int | None = None
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.is_ended = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert self.status is None
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message["body"]
            self.is_ended = not message["more_body"]

    async def ask(self, method: str, path: str, *chunks: bytes, headers: Any = ()) -> "Client":
        waiting = list(chunks or [b""])

        async def receive() -> Any:
            if waiting:
                chunk = waiting.pop(0)
                return {"type": "http.request", "body": chunk, "more_body": bool(waiting)}
            await self.left.wait()
            return {"type": "http.disconnect"}

        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": list(headers)}
        await self._app(scope, receive, self.send)
        return self

    @property
    def error(self) -> dict[str, Any]:
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def counted(self, outcome: str) -> bool:
        return f'outcome="{outcome}",topology="orthrus"}} 1.0' in self.metrics.text()


@pytest.mark.parametrize(("path", "route"), ROUTES.items())
async def test_a_known_path_with_another_method_is_a_405_that_says_which(path: str, route: tuple[str, Target]) -> None:
    for method in {"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"} - {route[0]}:
        client = await Client(ScriptedPool()).ask(method, path)
        assert (client.status, client.headers[b"allow"]) == (405, route[0].encode())
        assert client.error["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "path",
    ["/", "/v1", "/v1/embeddings/", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up", "/collective_rpc",
     "/start_profile", "/reset_prefix_cache", "/v2/embed", "/pooling", "/docs", "/openapi.json", "/invocations", "/ping",
     "/v1/messages", "/server_info", "/../health", "//health", "/v1/chat/completions/render", *NOT_YET],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_everything_else_that_vllm_mounts_is_a_404_in_openai_shape(method: str, path: str) -> None:
    client = await Client(ScriptedPool()).ask(method, path)
    assert (client.status, client.error["code"]) == (404, "unknown_url")


async def test_an_answer_passes_through_with_the_status_and_headers_of_the_app() -> None:
    pool = ScriptedPool([(200, [*JSON, (b"content-length", b"999"), (b"x-vllm", b"1")]), b'{"a"', b": 1}"])
    headers = [(b"Content-Type", b"application/json"), (b"X-Request-Id", b"id-1"), (b"x-data-parallel-rank", b"9")]
    client = await Client(pool).ask("POST", EMBED, b'{"inp', b'ut": "hello"}', headers=headers)
    assert (client.status, client.body, client.is_ended) == (200, b'{"a": 1}', True)
    assert client.headers == {**dict(JSON), b"x-vllm": b"1", b"content-length": b"8"}
    request, known, avoid = pool.opened[0]
    assert (request.body, avoid) == (BODY, ())
    assert known == {"kind": "embed", "charge": len(BODY) // 4, "expected_output": 0}
    assert dict(request.headers) == {
        b"content-type": b"application/json", b"x-request-id": b"id-1", b"content-length": b"18",
    }  # fmt: skip
    assert client.counted("ok")


@pytest.mark.parametrize("request_id", [b"", b"x" * 129, b"a\x00b", b"a b\xff"])
async def test_an_unfit_request_id_does_not_reach_the_engine(request_id: bytes) -> None:
    pool = ScriptedPool([(200, JSON), b"{}"])
    await Client(pool).ask("POST", EMBED, BODY, headers=[(b"x-request-id", request_id)])
    sent = dict(pool.opened[0][0].headers)[b"x-request-id"]
    assert sent != request_id
    assert len(sent) == 32


@pytest.mark.parametrize(
    ("chunks", "headers"),
    [([b"x" * 1001], []), ([b"x" * 600, b"x" * 600], []), ([b""], [(b"content-length", b"1001")]),
     ([b""], [(b"content-length", b"9" * 400)])],
)  # fmt: skip
async def test_a_body_above_the_limit_is_a_413_that_names_it(chunks: list[bytes], headers: Any) -> None:
    client = await Client(ScriptedPool()).ask("POST", EMBED, *chunks, headers=headers)
    assert client.status == 413
    assert "1000" in client.error["message"]
    assert client.counted("invalid")


@pytest.mark.parametrize(
    "lost", [[ReplicaLostError()], [(200, JSON), b"{", ReplicaLostError()], [(200, SSE), ReplicaLostError()]]
)
async def test_a_replica_lost_before_the_first_byte_is_replaced_by_another(lost: list[Any]) -> None:
    pool = ScriptedPool(lost, [(200, JSON), b"{}"])
    client = await Client(pool).ask("POST", EMBED, BODY)
    assert (client.status, client.body) == (200, b"{}")
    assert len(pool.opened) == 2


async def test_a_replica_without_an_engine_is_avoided_and_its_mark_stays_inside() -> None:
    pool = ScriptedPool([GONE, b"{}"], [(200, JSON), b"{}"])
    client = await Client(pool).ask("POST", EMBED, BODY)
    assert client.status == 200
    assert [avoid for _, _, avoid in pool.opened] == [(), ("r1",)]
    assert GONE_HEADER not in client.headers
    assert client.state.quarantined == {"r1": "its engine is gone"}


async def test_a_request_that_two_replicas_died_of_gets_no_third() -> None:
    client = await Client(ScriptedPool(*[[ReplicaLostError()]] * 2)).ask("POST", EMBED, BODY)
    assert (client.status, client.error["code"], client.headers[b"retry-after"]) == (503, "replica_lost", b"5")
    assert client.counted("overloaded")
    lost_at_work = (502, [*JSON, (GONE_HEADER, b"r1")])
    client = await Client(ScriptedPool(*[[lost_at_work, b"{}"]] * 2)).ask("POST", EMBED, BODY)
    assert (client.status, client.error["code"]) == (503, "replica_lost")


ERROR_EVENT = b'event: error\ndata: {"error": {}}\n\n'


@pytest.mark.parametrize("failed", [[(500, JSON), b"{}"], [(502, JSON), b"{}"], [(200, SSE), ERROR_EVENT, ...]])
async def test_a_replica_that_fails_before_the_first_byte_is_replaced_by_another_and_blamed(failed: list[Any]) -> None:
    pool = ScriptedPool(failed, [(200, JSON), b"{}"])
    client = await Client(pool).ask("POST", EMBED, BODY)
    assert (client.status, client.body) == (200, b"{}")
    assert [avoid for _, _, avoid in pool.opened] == [(), ("r1",)]
    assert set(client.state.quarantined) == {"r1"}


async def test_a_request_that_fails_everywhere_is_tried_twice_and_blames_nobody() -> None:
    pool = ScriptedPool(*[[(500, JSON), b"{}"]] * 2)
    client = await Client(pool).ask("POST", EMBED, BODY)
    assert (client.status, len(pool.opened), client.state.quarantined) == (500, 2, {})


@pytest.mark.parametrize("status", [400, 429, 501, 503])
async def test_an_answer_that_does_not_speak_of_a_failure_is_passed_on(status: int) -> None:
    client = await Client(ScriptedPool([(status, JSON), b"{}"])).ask("POST", EMBED, BODY)
    assert (client.status, client.state.quarantined) == (status, {})


async def test_the_only_replica_is_not_asked_twice() -> None:
    client = Client(pool := ScriptedPool([(500, JSON), b"{}"]))
    client.state.replicas = REPLICAS[:1]
    assert (await client.ask("POST", EMBED, BODY)).status == 500
    assert len(pool.opened) == 1


@pytest.mark.parametrize("end", [ERROR_EVENT, ReplicaLostError(), KeyError("x")])
async def test_a_stream_that_fails_on_its_way_counts_against_its_replica(end: Any) -> None:
    client = await Client(ScriptedPool([(200, SSE), b"data: 1\n\n", end])).ask("POST", "/v1/completions", b"{}")
    assert set(client.state.quarantined) == {"r1"}


async def test_a_failure_without_a_forward_pass_says_nothing_about_an_engine() -> None:
    client = await Client(ScriptedPool(*[[(500, JSON), b"{}"]] * 2)).ask("GET", "/v1/models")
    assert (client.status, client.state.quarantined) == (500, {})


async def test_replicas_that_never_saw_the_request_do_not_count_against_it() -> None:
    pool = ScriptedPool(*[[GONE, b"{}"]] * 5, [(200, JSON), b"{}"])
    assert (await Client(pool).ask("POST", EMBED, BODY)).status == 200


async def test_without_any_replica_the_answer_is_a_503() -> None:
    client = await Client(ScriptedPool([PoolUnavailableError("none is running")])).ask("POST", EMBED, BODY)
    assert (client.status, client.error["code"]) == (503, "no_replica")
    assert b"retry-after" in client.headers


async def test_an_unexpected_error_is_a_500_that_tells_nothing() -> None:
    client = await Client(ScriptedPool([KeyError("secret")])).ask("POST", EMBED, BODY)
    assert client.status == 500
    assert "secret" not in client.error["message"]
    assert set(client.state.quarantined) == {"r1"}
    assert client.counted("failed")


@pytest.mark.parametrize("cut", [ReplicaLostError(), KeyError("x")])
async def test_a_stream_cut_by_a_dying_replica_ends_in_an_error_event_and_is_not_tried_again(cut: Exception) -> None:
    pool = ScriptedPool([(200, SSE), b'data: {"a": 1}\n\n', cut])
    client = await Client(pool).ask("POST", "/v1/completions", b'{"prompt": "x"}')
    first, last = client.body.decode().strip().split("\n\n")
    assert (client.status, client.is_ended, first) == (200, True, 'data: {"a": 1}')
    assert last.startswith("event: error\ndata: {")
    assert json.loads(last.split("data: ")[1])["error"]["code"] == "replica_lost"
    assert "[DONE]" not in client.body.decode()
    assert len(pool.opened) == 1
    assert client.counted("failed")


async def test_a_client_that_leaves_cancels_its_call_at_once() -> None:
    pool = ScriptedPool([(200, SSE), b"data: 1\n\n", ...])
    client = Client(pool)
    asking = asyncio.create_task(client.ask("POST", "/v1/completions", b'{"prompt": "x"}'))
    while not client.body:  # noqa: ASYNC110 - nothing to wait on from outside
        await asyncio.sleep(0.001)
    client.left.set()
    await asyncio.wait_for(asking, 1)
    assert pool.calls[0].is_cancelled
    assert client.counted("cancelled")


async def test_when_serve_cancels_the_request_the_call_is_cancelled_too() -> None:
    pool = ScriptedPool([...])
    client = Client(pool)
    asking = asyncio.create_task(client.ask("POST", EMBED, BODY))
    await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.sleep(0)
    assert pool.calls[0].is_cancelled
    assert client.counted("cancelled")


async def test_a_client_that_leaves_within_its_body_opens_no_call() -> None:
    client = Client(ScriptedPool())
    client.left.set()

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": EMBED, "query_string": b"", "headers": []}
    await client._app(scope, receive, client.send)
    assert client.status is None
    assert client.counted("cancelled")


@pytest.mark.parametrize(
    ("answers", "status", "healthy"),
    [
        ([{"replica": "a", "problem": None}, {"replica": "b", "problem": None}], 200, 2),
        ([{"replica": "a", "problem": None}, TimeoutError("late")], 200, 1),
        ([{"replica": "a", "problem": "EngineGoneError"}], 503, 0),
        ([], 503, 0),
    ],
)
@pytest.mark.parametrize("path", ["/health", "/v1/health"])
async def test_health_is_200_while_every_pool_has_a_healthy_replica(
    path: str, answers: Any, status: int, healthy: int
) -> None:
    client = await Client(ScriptedPool(answers=answers)).ask("GET", path)
    pool = json.loads(client.body)["pools"]["Engine"]
    assert (client.status, pool["healthy"], pool["replicas"]) == (status, healthy, len(answers))
    assert len(pool["problems"]) == len(answers) - healthy


async def test_metrics_tell_replicas_apart_and_survive_one_that_does_not_answer() -> None:
    text = '# HELP a_total a\n# TYPE a_total counter\na_total{x="1"} %d\n'
    answers = [{"replica": "r1", "text": text % 1}, {"replica": "r2", "text": text % 2}, TimeoutError(),
               {"replica": "r3", "text": "not { prometheus"}]  # fmt: skip
    client = await Client(ScriptedPool(answers=answers)).ask("GET", "/metrics")
    assert b'a_total{replica="r1",x="1"} 1.0\na_total{replica="r2",x="1"} 2.0' in client.body
    assert client.body.count(b"# TYPE a_total counter") == 1
    assert b"r3" not in client.body
    assert b'orthrus_front_silent_replicas{arm="",replica="scrape"} 1.0' in client.body


async def test_metrics_are_those_of_all_fronts_whoever_is_asked() -> None:
    client = await Client(ScriptedPool(answers=[])).ask("GET", "/metrics")
    assert b'b{replica="front-2"} 2.0' in client.body
    assert b'orthrus_refusals_total{kind="embed",reason="saturated",replica="front-1"} 0.0' in client.body


async def test_the_status_page_tells_what_is_in_force_and_who_did_not_answer() -> None:
    client = await Client(ScriptedPool(answers=[TimeoutError("late")])).ask("GET", "/status")
    page = json.loads(client.body)
    assert (client.status, page["topology"], page["rule"], page["num_fronts_silent"]) == (
        200,
        "orthrus",
        "round_robin",
        1,
    )
    (engine,) = page["engines"]
    assert (engine["replica"], engine["answered"], engine["kinds"]) == ("r1", False, ["generate", "embed"])
