"""Replicas that fail, hang, die, come and go, on a real local Ray: who is asked then, and that every request ends once."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema, ServeInstanceDetails

from orthrus_serve.app import compose
from orthrus_serve.config.schema import AppArgs
from orthrus_serve.ops.deployed_config import scaled
from orthrus_serve.ops.scale import replica_states
from tests.serve.conftest import FAKE_ARGS, REPOSITORY, App
from tests.serve.fakes import start_fake

EMBED, COMPLETE = "/v1/embeddings", "/v1/completions"
# A stall shows after 1 s and costs the replica its life 2 s later; one probe may take 2 s.
ARGS = {
    **FAKE_ARGS,
    "num_replicas": 3,
    "front": {"num_replicas": 1},
    "health": {"stall_s": 1.0, "replace_after_s": 2.0, "probe_timeout_s": 2.0},
}


LIFE = {
    "name": "life",
    "route_prefix": "/life",
    "import_path": "tests.serve.fakes:build_fake",
    "args": ARGS,
    "runtime_env": {"env_vars": {"PYTHONPATH": str(REPOSITORY)}},
    "deployments": [{"name": "Front"}, {"name": "Engine"}],
}


@pytest.fixture(scope="module")
def app(serve_url: str) -> Iterator[App]:
    """Three replicas with fake engines, and one Front."""
    put({"applications": [LIFE]})
    until(lambda: deployed()["applications"]["life"]["status"] == "RUNNING", limit_s=60)
    yield App("life", f"{serve_url}/life")
    serve.delete("life", _blocking=False)


def put(config: dict[str, Any]) -> None:
    """As Serve's REST API does with a configuration."""
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))


def deployed() -> dict[str, Any]:
    """As Serve's REST API tells it."""
    details = ServeInstanceDetails.model_validate(_get_global_client().get_serve_details())
    return details.model_dump(mode="json", exclude_unset=True)


@pytest.fixture
def client(app: App) -> Iterator[httpx.Client]:
    """An HTTP client; before and after each test all replicas are well and nothing is charged."""
    until(lambda: is_well(app), limit_s=60)
    with httpx.Client(base_url=app.url, timeout=60, limits=httpx.Limits(max_connections=200)) as opened:
        yield opened
    until(lambda: is_well(app), limit_s=60)


def is_well(app: App) -> bool:
    engines = app.info("Engine")
    fronts = [(front["open"], front["tokens"], front["quarantined"]) for front in app.info("Front")]
    return len(engines) == 3 and fronts == [(0, 0, {})] and all(e["open"] == e["in_engine"] == 0 for e in engines)


def until(condition: Callable[[], bool], limit_s: float = 20.0) -> float:
    """Waits for `condition`; returns how long it took."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < limit_s, "it did not happen in time"
        time.sleep(0.02)
    return time.monotonic() - began_s


def embed(client: httpx.Client, **fake: Any) -> httpx.Response:
    return client.post(EMBED, json={"model": "orthrus-embed", "input": "hello", "fake": fake})


def pid_of(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return answer.json()["pid"]


def out(app: App) -> dict[str, str]:
    return app.info("Front")[0]["quarantined"]


def stream(client: httpx.Client, num_tokens: int, texts: list[str] | None = None, **fake: Any) -> list[str]:
    """The texts of a streamed answer, put into `texts` as they come; the last entry is the line that ended it."""
    body = {"prompt": "x", "stream": True, "max_tokens": num_tokens, "fake": fake}
    texts = [] if texts is None else texts
    with client.stream("POST", COMPLETE, json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("event: error") or line == "data: [DONE]":
                texts.append(line)
                break
            if line:
                texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
    return texts


def test_a_replica_that_fails_everything_leaves_at_once_and_returns_when_it_is_well(
    app: App, client: httpx.Client
) -> None:
    sick = pid_of(embed(client, sick_s=3.0))
    fell_sick_s = time.monotonic()
    # Fast failures make it look idle, so it is asked first; whoever met it is answered by another replica.
    answers = [pid_of(embed(client)) for _ in range(30)]
    assert sick not in answers
    assert len(set(answers)) == 2
    ((replica, reason),) = out(app).items()
    assert reason == "3 embed requests in a row: status 500"
    assert {e["pid"]: e["replica"] for e in app.info("Engine")}[sick] == replica
    until(lambda: not out(app))
    assert time.monotonic() - fell_sick_s > 3.0
    with ThreadPoolExecutor(12) as pool:
        again = Counter(pid_of(f.result()) for f in [pool.submit(embed, client, delay_s=0.2) for _ in range(12)])
    assert again[sick] == 4


def test_a_request_that_fails_everywhere_is_answered_with_its_error_and_puts_nobody_out(
    app: App, client: httpx.Client
) -> None:
    with ThreadPoolExecutor(8) as pool:
        poisoned = [pool.submit(embed, client, what="raise") for _ in range(40)]
        others = [pool.submit(embed, client) for _ in range(40)]
        assert {answer.result().status_code for answer in poisoned} == {500}
        assert {answer.result().status_code for answer in others} == {200}
    assert out(app) == {}


def test_a_hung_replica_is_found_by_its_own_report_and_its_requests_end_once_elsewhere(
    app: App, client: httpx.Client
) -> None:
    with ThreadPoolExecutor(20) as pool:
        sent: list[list[str]] = [[] for _ in range(6)]
        streams = [pool.submit(stream, client, 8, texts, gap_s=0.4) for texts in sent]  # two on each replica
        until(lambda: all(sent))
        hung = pid_of(embed(client, hang=True))
        stuck = [pool.submit(embed, client) for _ in range(9)]
        until(lambda: "stalled" in "".join(out(app).values()))
        began_s = time.monotonic()
        assert hung not in [pid_of(embed(client)) for _ in range(10)]
        assert time.monotonic() - began_s < 1.0, "nobody waits for a replica that is known to be stalled"
        ends = Counter(future.result()[-1] for future in streams)
        assert ends == {"data: [DONE]": 4, "event: error": 2}, "those that had sent bytes are cut, and told so"
        assert hung not in [pid_of(future.result()) for future in stuck]


def test_a_killed_replica_comes_back_and_is_used_again(app: App, client: httpx.Client) -> None:
    before = {e["pid"] for e in app.info("Engine")}
    assert stream(client, 3, what="exit", after=2, gap_s=0.1)[-1] == "event: error"
    until(lambda: len(app.info("Engine")) == 3 and {e["pid"] for e in app.info("Engine")} != before, limit_s=60)
    with ThreadPoolExecutor(12) as pool:
        used = Counter(pid_of(f.result()) for f in [pool.submit(embed, client, delay_s=0.3) for _ in range(12)])
    assert len(set(used) - before) == 1
    assert sorted(used.values()) == [4, 4, 4]


def test_scaling_down_under_streams_drops_nothing_and_restarts_nobody(app: App, client: httpx.Client) -> None:
    put(scaled(deployed(), "life", 4))
    until(lambda: len(app.info("Engine")) == 4, limit_s=60)
    before = {engine["pid"] for engine in app.info("Engine")}
    with ThreadPoolExecutor(60) as pool:
        streams = [pool.submit(stream, client, 60, gap_s=0.05) for _ in range(16)]  # 3 s each, four on each replica
        until(lambda: [engine["open"] for engine in app.info("Engine")] == [4, 4, 4, 4])
        put(scaled(deployed(), "life", 2))
        until(lambda: len(app.info("Engine")) == 2)
        assert replica_states(deployed(), "life") == {"RUNNING": 2, "STOPPING": 2}, (
            "those that leave finish what they run"
        )
        streams += [pool.submit(stream, client, 60, gap_s=0.01) for _ in range(16)]
        assert {tuple(future.result()) for future in streams} == {(*(f"t{n}" for n in range(60)), "data: [DONE]")}
    assert {engine["pid"] for engine in app.info("Engine")} < before
    put(scaled(deployed(), "life", 3))


def test_replicas_follow_the_load_in_tokens_and_leave_only_when_they_have_finished(serve_url: str) -> None:
    # A stream is 60 tokens, one in 0.1 s: twenty at once are some 600 tokens, half done as they are on average.
    scaling = {"max_replicas": 3, "target_tokens_per_replica": 200, "upscale_delay_s": 1.0, "downscale_delay_s": 2.0}
    args = AppArgs.model_validate({**ARGS, "num_replicas": 1, "front": {"num_replicas": 1}, "autoscaling": scaling})
    serve.run(compose(args, start_fake), name="scaled", route_prefix="/scaled")
    app = App("scaled", f"{serve_url}/scaled")
    try:
        with httpx.Client(base_url=app.url, timeout=60, limits=httpx.Limits(max_connections=200)) as client:
            with ThreadPoolExecutor(40) as pool:
                streams = []
                while len(app.info("Engine")) < 3:
                    streams += [pool.submit(stream, client, 60, gap_s=0.1) for _ in range(2)]
                    time.sleep(0.6)
                    assert len(streams) < 200, "no replica came in a minute"
                # The last ones run everywhere while the load falls.
                streams += [pool.submit(stream, client, 60, gap_s=0.1) for _ in range(6)]
                sizes = [3]
                while sizes[-1] > 1 or not all(future.done() for future in streams):
                    sizes.append(sum(engine["open"] >= 0 for engine in app.info("Engine")))
                    assert len(sizes) < 600, "the replicas did not leave in a minute"
                    time.sleep(0.1)
            assert {tuple(future.result()) for future in streams} == {(*(f"t{n}" for n in range(60)), "data: [DONE]")}
            assert sorted(sizes, reverse=True) == sizes
            assert embed(client).status_code == 200
    finally:
        serve.delete("scaled", _blocking=False)
