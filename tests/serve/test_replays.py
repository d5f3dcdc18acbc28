"""Faults that users of other servers reported in public, acted out against the real server. `docs/replays.md` has the list."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
import ray
from ray import serve

from orthrus_serve.app import compose
from orthrus_serve.config.schema import AppArgs
from orthrus_serve.serving.engine_replica import start_engine
from tests.serve.conftest import FAKE_ARGS, TINY_VLLM, App, log_folder
from tests.serve.fakes import start_fake
from tests.serve.test_fake_app import in_engine, until
from tests.serve.test_real_app import cosine
from tests.serve.test_stall import core_of

EMBED, COMPLETE, CHAT = "/v1/embeddings", "/v1/completions", "/v1/chat/completions"
EOS = 2
LONGEST = 511  # of the tiny model's inputs
HOP_BY_HOP = {"keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade"}


@pytest.fixture(scope="module")
def http(real: App) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=real.url, timeout=60) as opened:
        yield opened


def is_right(row: dict[str, Any], ids: list[int], tiny: Any) -> bool:
    return cosine(row["embedding"], tiny.vector([*ids, EOS], "last").tolist()) > 0.9999


def test_a_short_input_and_one_cut_to_the_very_limit_both_come_back_in_either_order(
    http: httpx.Client, tiny: Any
) -> None:
    short, long = [7, 8, 9], [3 + index % 500 for index in range(700)]
    for inputs in ([short, long], [long, short], [short, long, short, long]):
        answer = http.post(EMBED, json={"input": inputs, "truncate_prompt_tokens": -1})
        rows = answer.json()["data"]
        for row, ids in zip(rows, inputs, strict=True):
            assert is_right(row, ids[: LONGEST - 1], tiny)
    assert http.post(EMBED, json={"input": long[: LONGEST - 1]}).json()["usage"]["prompt_tokens"] == LONGEST


def test_many_short_inputs_beside_some_longer_than_a_step_come_back_twice_with_the_prefix_cache_on(
    http: httpx.Client, tiny: Any
) -> None:
    rng = random.Random(5)
    inputs = [[rng.randrange(3, 500) for _ in range(length)] for length in [1, 2, 3, 5, 8] * 8 + [129, 256, 400, 510]]
    rng.shuffle(inputs)

    def embed(ids: list[int]) -> dict[str, Any]:
        return http.post(EMBED, json={"input": ids}).json()["data"][0]

    with ThreadPoolExecutor(len(inputs)) as pool:
        for _ in range(2):
            for row, ids in zip(pool.map(embed, inputs), inputs, strict=True):
                assert is_right(row, ids, tiny), len(ids)


async def test_a_hundred_embeddings_with_shared_prefixes_of_which_many_are_abandoned_hurt_nobody(
    real: App, tiny: Any
) -> None:
    rng = random.Random(6)
    stems = [[rng.randrange(3, 500) for _ in range(200)] for _ in range(4)]
    inputs = [[*rng.choice(stems), *(rng.randrange(3, 500) for _ in range(rng.randrange(1, 200)))] for _ in range(120)]

    async def embed(ids: list[int], leaves: bool) -> dict[str, Any] | None:
        asking = asyncio.create_task(client.post(EMBED, json={"input": ids}))
        await asyncio.wait({asking}, timeout=rng.uniform(0.0, 2.0) if leaves else None)
        if leaves and not asking.done():
            asking.cancel()
            await asyncio.wait({asking})
            return None
        return asking.result().json()["data"][0]

    async with httpx.AsyncClient(base_url=real.url, timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        rows = await asyncio.gather(*(embed(ids, index % 3 == 0) for index, ids in enumerate(inputs)))
    stayed = [(row, ids) for row, ids in zip(rows, inputs, strict=True) if row is not None]
    assert 80 <= len(stayed) < 120
    assert all(is_right(row, ids, tiny) for row, ids in stayed)
    await asyncio.to_thread(until, lambda: in_engine(real) == 0)


@pytest.mark.parametrize("value", [None, "absent", "float", "base64"])
def test_every_way_of_asking_for_an_encoding_that_clients_have_is_accepted(http: httpx.Client, value: Any) -> None:
    asked = {} if value == "absent" else {"encoding_format": value}
    answer = http.post(
        EMBED, json={"model": "orthrus-embed", "input": "w3 w4", "dimensions": None, "user": None, **asked}
    )
    assert answer.status_code == 200, answer.text
    assert isinstance(answer.json()["data"][0]["embedding"], str) == (value == "base64")


@pytest.mark.parametrize(
    ("path", "body", "content_type"),
    [
        (EMBED, {"input": "w3"}, "application/json"),
        (CHAT, {"messages": [{"role": "user", "content": "w3"}], "max_tokens": 3}, "application/json"),
        (COMPLETE, {"prompt": "w3", "max_tokens": 3, "stream": True}, "text/event-stream"),
        (COMPLETE, {"prompt": "w3", "max_tokens": 0, "stream": True}, "application/json"),  # an error is no stream
    ],
)
def test_headers_say_what_the_body_is_and_nothing_of_the_hops_between(
    http: httpx.Client, path: str, body: Any, content_type: str
) -> None:
    answer = http.post(path, json=body, headers={"accept-encoding": "gzip, br", "te": "trailers"})
    names = [name.lower() for name, _ in answer.headers.multi_items()]
    assert answer.headers["content-type"].split(";")[0] == content_type
    assert not HOP_BY_HOP & set(names)
    for name in ("server", "date", "content-type", "content-length", "x-request-id", "transfer-encoding"):
        assert names.count(name) <= 1, name
    assert not {"content-length", "transfer-encoding"} <= set(names)


# --- a server of its own: a long list of inputs, and at last the death of its engine ---------------------------------


@pytest.fixture(scope="module")
def own(serve_url: str, tiny: Any) -> Iterator[App]:
    args = AppArgs.model_validate({
        "topology": "orthrus",
        "model": {"path": str(tiny.model)},
        "adapters": {"orthrus-embed": {"path": str(tiny.adapter)}},
        "num_gpus_per_replica": 0,
        "num_cpus_per_replica": 0.5,
        "limits": {"max_inputs": 6000},
        "vllm": {**TINY_VLLM, "max_num_seqs": 64},
    })  # fmt: skip
    serve.run(compose(args, start_engine, replica_wait_s=1.0), name="own", route_prefix="/own")
    yield App("own", f"{serve_url}/own")
    serve.delete("own", _blocking=False)


def test_six_thousand_inputs_in_one_request_come_back_in_order_or_are_refused_by_a_limit(own: App, tiny: Any) -> None:
    inputs = [[3 + index % 7] for index in range(6000)]
    with httpx.Client(base_url=own.url, timeout=300) as client:
        rows = client.post(EMBED, json={"input": inputs}).json()["data"]
        assert [row["index"] for row in rows] == list(range(6000))
        expected = [tiny.vector([3 + number, EOS], "last").tolist() for number in range(7)]
        assert all(cosine(row["embedding"], expected[index % 7]) > 0.9999 for index, row in enumerate(rows))
        refused = client.post(EMBED, json={"input": [*inputs, [3]]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
        assert "6000" in refused.json()["error"]["message"]


def test_a_killed_engine_is_told_by_health_is_logged_once_and_comes_back(own: App) -> None:
    """Five requests a second go on all the while: each is answered, with 200 or with 503 and when to come back."""
    core, replica = core_of(own), own.info("Engine")[0]["pid"]
    logged = num_tracebacks()
    with httpx.Client(base_url=own.url, timeout=120) as client, ThreadPoolExecutor(64) as pool:

        def ask(_: int) -> httpx.Response:
            return client.post(COMPLETE, json={"prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True})

        asked = [pool.submit(ask, number) for number in range(3)]
        os.kill(core.pid, signal.SIGKILL)
        until(lambda: client.get("/health").status_code == 503, limit_s=20)
        while not is_back(own, replica):
            asked.append(pool.submit(ask, len(asked)))
            time.sleep(0.2)
            assert len(asked) < 600, "it did not come back"
        answers = [future.result() for future in asked]
        assert ask(0).status_code == 200
    assert {answer.status_code for answer in answers} <= {200, 503}
    for answer in answers:
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) > 0
            assert answer.json()["error"]["type"] == "server_error"
    assert not psutil.pid_exists(core.pid) or core.status() == psutil.STATUS_ZOMBIE
    assert num_tracebacks() - logged <= 12, "more tracebacks than the death of one engine is worth"


def is_back(app: App, former: int) -> bool:
    return any(info["pid"] != former for info in app.info("Engine"))


def num_tracebacks() -> int:
    """Tracebacks in all logs of this Ray."""
    files = [path for path in log_folder().rglob("*") if path.is_file() and path.suffix in (".log", ".err", ".out")]
    return sum(path.read_text(encoding="utf-8", errors="replace").count("Traceback (most recent") for path in files)


def test_a_front_that_starts_beside_running_engines_answers_its_first_requests(serve_url: str) -> None:
    args = AppArgs.model_validate({**FAKE_ARGS, "front": {"num_replicas": 1}})
    serve.run(compose(args, start_fake), name="fresh", route_prefix="/fresh")
    app = App("fresh", f"{serve_url}/fresh")
    try:
        with httpx.Client(base_url=app.url, timeout=60) as client, ThreadPoolExecutor(8) as pool:
            engines = {info["replica"] for info in app.info("Engine")}
            (front,) = [info["front"] for info in app.info("Front")]
            (name,) = [row["name"] for row in ray.util.list_named_actors(all_namespaces=True) if front in row["name"]]
            ray.kill(ray.get_actor(name, namespace="serve"))
            until(lambda: any(info["front"] != front for info in app.info("Front")), limit_s=60)

            def embed(_: int) -> httpx.Response:
                return client.post(EMBED, json={"model": "orthrus-embed", "input": "hello"})

            assert [answer.status_code for answer in pool.map(embed, range(40))] == [200] * 40
            assert {info["replica"] for info in app.info("Engine")} == engines
            until(lambda: [info["tokens"] for info in app.info("Front")] == [0])
    finally:
        serve.delete("fresh", _blocking=False)
