"""The whole serving side on a real local Ray, over engines whose answers can be worked out by hand."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from ray import serve

from orthrus_serve.app import compose
from orthrus_serve.config.schema import AppArgs
from tests.serve.conftest import FAKE_ARGS, App
from tests.serve.fakes import never_start

EMBED, COMPLETE = "/v1/embeddings", "/v1/completions"


def until(condition: Callable[[], bool], limit_s: float = 20.0) -> float:
    """Waits for `condition`; returns how long it took."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < limit_s, "it did not happen in time"
        time.sleep(0.02)
    return time.monotonic() - began_s


def embed(client: httpx.Client, text: Any = "hello", **fields: Any) -> httpx.Response:
    return client.post(EMBED, json={"model": "orthrus-embed", "input": text, **fields})


def events(client: httpx.Client, **fields: Any) -> list[str]:
    with client.stream("POST", COMPLETE, json={"prompt": "x", "stream": True, **fields}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return [event for event in response.read().decode().split("\n\n") if event]


def in_engine(app: App) -> int:
    return sum(info["in_engine"] for info in app.info("Engine"))


def leave_when(condition: Callable[[], bool], url: str, path: str, body: Any) -> None:
    """Asks, and closes the connection when `condition` holds, which must be before the answer is complete."""

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            asking = asyncio.create_task(client.post(path, json=body))
            await asyncio.to_thread(until, lambda: condition() or asking.done())
            assert not asking.done(), "the request ended before its client could leave"
            asking.cancel()
            await asyncio.wait({asking})

    asyncio.run(ask())


def both_up(app: App, client: httpx.Client) -> bool:
    if len(app.info("Engine")) != 2:
        return False
    health = client.get("/health")
    return health.status_code == 200 and health.json()["pools"]["Engine"]["healthy"] == 2


@pytest.fixture(autouse=True)
def _settled(fake: App, client: httpx.Client) -> Any:
    """Before each test both replicas are up; after each, whatever happened in it, nothing is charged any more."""
    until(lambda: both_up(fake, client), limit_s=60)
    yield
    until(lambda: all((info["open"], info["tokens"]) == (0, 0) for info in fake.info("Front")))
    until(lambda: all(info["open"] == info["in_engine"] == 0 for info in fake.info("Engine")))


def test_an_embedding_goes_through(client: httpx.Client) -> None:
    answer = embed(client, ["a", "hello"]).json()
    assert [row["embedding"] for row in answer["data"]] == [[1.0, 1.0], [5.0, 1.0]]
    assert (answer["model"], answer["usage"]["prompt_tokens"], answer["dimensions"]) == ("orthrus-embed", 6, None)


def test_the_base_name_embeds_and_dimensions_reach_the_engine_around_the_body(client: httpx.Client) -> None:
    answer = embed(client, model="orthrus", dimensions=4).json()
    assert (answer["model"], answer["dimensions"]) == ("orthrus-embed", 4)


def test_a_stream_arrives_whole_and_in_order(client: httpx.Client) -> None:
    got = events(client, max_tokens=200)
    assert got.pop() == "data: [DONE]"
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in got]
    assert texts == [f"t{number}" for number in range(200)]


def test_a_stream_arrives_as_it_is_made(client: httpx.Client) -> None:
    began_s, first_s = time.monotonic(), 0.0
    body = {"prompt": "x", "stream": True, "max_tokens": 20, "fake": {"gap_s": 0.05}}
    with client.stream("POST", COMPLETE, json=body) as response:
        for _ in response.iter_lines():
            first_s = first_s or time.monotonic() - began_s
    assert first_s < 0.5
    assert time.monotonic() - began_s > 1.0


def test_request_ids_are_echoed_once_and_reach_the_engine(client: httpx.Client) -> None:
    answer = client.post(EMBED, json={"input": "a"}, headers={"X-Request-Id": "mine-1"})
    assert answer.headers.get_list("x-request-id") == ["mine-1"]
    assert answer.json()["request_id"] == "mine-1"
    made = embed(client)
    assert made.headers.get_list("x-request-id") == [made.json()["request_id"]]
    assert len(client.get("/nothing").headers.get_list("x-request-id")) == 1


@pytest.mark.parametrize(
    ("method", "path", "raw", "status", "code"),
    [
        ("POST", EMBED, b"{", 400, "invalid_json"),
        ("POST", EMBED, b'{"input": ""}', 400, None),
        ("POST", EMBED, b'{"input": "a", "model": "b"}', 404, "model_not_found"),
        ("POST", EMBED, b"x" * 100_001, 413, "body_too_large"),
        ("POST", COMPLETE, b'{"prompt": "a", "n": 1000}', 400, None),
        ("POST", "/tokenize", b'{"prompt": "a"}', 400, None),  # the app's own error, reshaped
        ("POST", COMPLETE, b'{"prompt": "a", "fake": {"what": "raise"}}', 500, None),
        ("GET", EMBED, b"", 405, "method_not_allowed"),
        ("POST", "/v1/load_lora_adapter", b"{}", 404, "unknown_url"),
        ("POST", "/v1/responses", b"{}", 404, "unknown_url"),
        ("POST", "/v1/score", b"{}", 404, "unknown_url"),
        ("POST", "/rerank", b"{}", 404, "unknown_url"),
    ],
)
def test_errors_have_openai_shape(
    client: httpx.Client, method: str, path: str, raw: bytes, status: int, code: str | None
) -> None:
    answer = client.request(method, path, content=raw, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["content-type"] == "application/json"


def test_a_stream_that_fails_in_the_app_ends_in_an_error_event(client: httpx.Client) -> None:
    got = events(client, max_tokens=5, fake={"what": "raise", "after": 2, "gap_s": 0.05})
    assert len(got) == 3
    assert got[2].startswith("event: error\ndata: {")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request_in_the_engine_at_once(fake: App, stream: bool) -> None:
    body = {"prompt": "x", "stream": stream, "max_tokens": 500, "fake": {"gap_s": 0.02}}
    leave_when(lambda: in_engine(fake) == 1, fake.url, COMPLETE, body)
    assert until(lambda: in_engine(fake) == 0) < 1.0


def test_concurrent_requests_are_shared_by_remaining_tokens(client: httpx.Client) -> None:
    def ask(number: int) -> int:
        return embed(client, f"{number}" * 100, fake={"delay_s": 0.3}).json()["pid"]

    with ThreadPoolExecutor(20) as pool:
        by_pid = Counter(pool.map(ask, range(20)))
    assert sorted(by_pid.values()) == [10, 10]


def test_a_large_request_keeps_small_ones_away_from_its_replica(fake: App, client: httpx.Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        large = pool.submit(embed, client, ["x" * 1000] * 50, fake={"delay_s": 1.0})
        until(lambda: any(info["open"] for info in fake.info("Front")))
        small = [pool.submit(embed, client, "y", fake={"delay_s": 0.1}) for _ in range(6)]
        pids = {future.result().json()["pid"] for future in small}
        assert len(pids) == 1
        assert pids != {large.result().json()["pid"]}


@pytest.mark.parametrize("what", ["exit", "lose_core"])
def test_a_replica_that_dies_before_the_first_byte_costs_nobody_anything(
    fake: App, client: httpx.Client, what: str
) -> None:
    with ThreadPoolExecutor(12) as pool:
        others = [pool.submit(embed, client, "hello", fake={"delay_s": 1.0}) for _ in range(10)]
        until(lambda: sum(info["open"] for info in fake.info("Front")) == 10)
        # A stream whose first token was sent is not tried again: exactly one replica goes.
        cut = events(client, max_tokens=3, fake={"what": what, "after": 2, "gap_s": 0.2})
        assert [answer.result().status_code for answer in others] == [200] * 10
    assert cut[-1].startswith("event: error\ndata: {")
    assert "data: [DONE]" not in cut


def test_a_request_that_kills_its_replica_twice_is_given_up(client: httpx.Client) -> None:
    answer = embed(client, fake={"what": "exit"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
    assert int(answer.headers["retry-after"]) > 0


def test_metrics_of_all_replicas_and_the_front_come_together(fake: App, client: httpx.Client) -> None:
    embed(client)
    text = client.get("/metrics").text
    steps = [line for line in text.splitlines() if line.startswith("orthrus_engine_steps_total{")]
    assert len({line.split('replica="')[1].split('"')[0] for line in steps}) == 2
    assert 'orthrus_engine_step_tokens_total{part="embed",' in text
    ok = [line for line in text.splitlines() if line.startswith("orthrus_requests_total") and 'outcome="ok"' in line]
    assert any('kind="embed"' in line for line in ok)
    assert text.count("# TYPE process_cpu_seconds_total counter") == 1


def test_version_names_vllm_and_ray(client: httpx.Client) -> None:
    assert client.get("/version").json() == {"version": "0.32.0", "ray": "2.60.0", "orthrus_serve": "0.1.0"}


def test_a_refused_or_broken_user_config_changes_nothing_and_kills_nobody(fake: App, client: httpx.Client) -> None:
    before = {info["replica"] for info in fake.info("Engine")}
    for user_config, refused in [
        ({"policy": "unified_homo"}, None), ({"policy": "nonsense"}, "must be"), ({"step_tokens": 12}, "not known"),
        ({"step_tokens": 13}, "failed"), ([1], "mapping"), ({"topology": "unified_homo", "policy": None}, None),
    ]:  # fmt: skip
        serve.get_deployment_handle("Engine", "fake").broadcast("reconfigure", user_config).results(timeout_s=10)
        for info in fake.info("Engine"):
            assert info["settings"]["applied"] == {"policy": "unified_homo"}
            assert info["settings"]["refused"] is None if refused is None else refused in info["settings"]["refused"]
    assert {info["replica"] for info in fake.info("Engine")} == before
    assert embed(client).status_code == 200


def test_while_no_replica_runs_requests_get_a_503_and_health_says_so(serve_url: str) -> None:
    args = AppArgs.model_validate({**FAKE_ARGS, "num_replicas": 1})
    app = compose(args, never_start, replica_wait_s=0.5)
    serve.run_many([serve.RunTarget(app, "loading", "/loading")], wait_for_applications_running=False)
    try:
        with httpx.Client(base_url=f"{serve_url}/loading", timeout=60) as client:
            until(lambda: client.get("/version").status_code == 200, limit_s=60)
            answer = embed(client)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
            assert int(answer.headers["retry-after"]) > 0
            health = client.get("/health")
            assert (health.status_code, health.json()["pools"]["Engine"]["healthy"]) == (503, 0)
    finally:
        serve.delete("loading", _blocking=False)
