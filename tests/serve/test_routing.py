"""Four Fronts and four replicas with fake engines of a known speed: how load is shared, and that every charge ends."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from ray import serve

from orthrus_serve.app import compose
from orthrus_serve.config.schema import AppArgs
from tests.serve.conftest import FAKE_ARGS, App
from tests.serve.metered import start_metered
from tests.serve.test_fake_app import until

EMBED, COMPLETE = "/v1/embeddings", "/v1/completions"
TOKENS_PER_S = 1000  # slow, so that the engines are busy however slow this machine is
NUM = 4
ARGS = {**FAKE_ARGS, "num_replicas": NUM, "front": {"num_replicas": NUM, "num_cpus": 0.1}}


@pytest.fixture(scope="module")
def four(serve_url: str) -> Iterator[App]:
    serve.run(compose(AppArgs.model_validate(ARGS), start_metered(TOKENS_PER_S)), name="four", route_prefix="/four")
    yield App("four", f"{serve_url}/four")
    serve.delete("four", _blocking=False)


def at_rest(app: App) -> bool:
    """All Fronts and engines answer, nothing is charged anywhere, by anybody, and the engines are empty."""
    fronts, engines = app.info("Front"), app.info("Engine")
    is_settled = all((f["open"], f["tokens"], f["loads"], f["drift"]) == (0, 0, {}, 0) for f in fronts)
    return len(fronts) == len(engines) == NUM and is_settled and all(e["open"] == e["in_engine"] == 0 for e in engines)


@pytest.fixture(autouse=True)
def _rested(four: App) -> Iterator[None]:
    until(lambda: at_rest(four), limit_s=60)
    yield
    until(lambda: at_rest(four), limit_s=60)


@asynccontextmanager
async def client_of(app: App) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=app.url, timeout=120, limits=limits) as client:
        yield client


def embedding(num_tokens: int) -> tuple[str, dict[str, Any]]:
    return EMBED, {"input": [[1] * num_tokens]}


def completion(num_prompt: int, num_output: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETE, {"prompt": [1] * num_prompt, "max_tokens": num_output, **fields}


def mixed(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Short embeddings, and generations of which a few are long."""
    if rng.random() < 0.6:
        return embedding(rng.randint(50, 400))
    return completion(rng.randint(50, 400), min(1000, int(40 * rng.paretovariate(1.2))))


async def until_there(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    await asyncio.to_thread(until, condition, limit_s)


async def info_of(app: App, deployment: str) -> list[dict[str, Any]]:
    return await asyncio.to_thread(app.info, deployment)


async def test_busiest_and_idlest_engine_are_within_a_tenth_in_tokens_under_mixed_load(four: App) -> None:
    rng, ends_s = random.Random(1), time.monotonic() + 10

    async def ask(client: httpx.AsyncClient) -> None:
        while time.monotonic() < ends_s:
            path, body = mixed(rng)
            assert (await client.post(path, json=body)).status_code == 200

    async def computed() -> dict[str, int]:
        return {info["replica"]: info["report"]["computed"] for info in await info_of(four, "Engine")}

    before = await computed()
    async with client_of(four) as client:
        asking = [asyncio.create_task(ask(client)) for _ in range(24)]
        await asyncio.sleep(9.5)
        by_engine = {replica: tokens - before[replica] for replica, tokens in (await computed()).items()}
        await asyncio.gather(*asking)
    assert max(by_engine.values()) <= 1.1 * min(by_engine.values()), by_engine
    assert sum(by_engine.values()) > 0.8 * 9.5 * TOKENS_PER_S * NUM, by_engine  # they were busy, so it says something


async def test_a_front_sees_its_requests_progress_and_those_of_others(four: App) -> None:
    async with client_of(four) as client:
        path, body = completion(100, 2000)  # charged 100 + 256: longer than what is expected, as far as anybody knows
        asking = asyncio.create_task(client.post(path, json=body))
        await until_there(lambda: sum(info["open"] for info in four.info("Front")) == 1)
        seen: list[tuple[int, int]] = []

        def is_followed_to_the_end() -> bool:
            loads = [sum(info["loads"].values()) for info in four.info("Front")]
            seen.append((min(loads), max(loads)))
            return max(loads) == 0

        await until_there(is_followed_to_the_end)
        assert not asking.done()  # 2 s of computing: its charge went down to nothing while it was under way
        assert all(highest - lowest <= 0.5 * TOKENS_PER_S for lowest, highest in seen[1:]), seen
        assert (await asking).status_code == 200


async def test_every_front_knows_its_place_among_all(four: App) -> None:
    """By which each has a home of its own among many replicas."""
    async with client_of(four) as client:
        path, body = embedding(50)
        await asyncio.gather(*[client.post(path, json=body) for _ in range(8)])
    places = [[rank, NUM] for rank in range(NUM)]
    await asyncio.to_thread(until, lambda: sorted(front["place"] or [] for front in four.info("Front")) == places)


async def test_four_fronts_bursting_at_once_give_no_replica_more_than_half_again_its_share(four: App) -> None:
    rng = random.Random(2)
    asked = [embedding(rng.randint(50, 150)) if rng.random() < 0.5 else completion(50, 50) for _ in range(120)]

    async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[int, int]:
        answer = (await client.post(path, json=body)).json()
        return answer["pid"], answer["usage"]["prompt_tokens"] + answer["usage"].get("completion_tokens", 0)

    before = {info["front"]: info["routed"] for info in await info_of(four, "Front")}
    async with client_of(four) as client:
        answers = await asyncio.gather(*[ask(client, path, body) for path, body in asked])
    routed = {info["front"]: info["routed"] - before[info["front"]] for info in await info_of(four, "Front")}
    tokens: Counter[int] = Counter()
    for pid, num_tokens in answers:
        tokens[pid] += num_tokens
    assert min(routed.values()) > 0, routed
    assert len(tokens) == NUM
    assert max(tokens.values()) <= 1.5 * tokens.total() / NUM, tokens


async def test_a_thousand_clients_that_leave_leave_no_charge(four: App) -> None:
    rng = random.Random(3)

    async def leave(client: httpx.AsyncClient) -> None:
        path, body = embedding(750) if rng.random() < 0.5 else completion(10, 750, stream=rng.random() < 0.5)
        asking = asyncio.create_task(client.post(path, json=body))
        await asyncio.wait({asking}, timeout=rng.uniform(0.0, 0.6))
        asking.cancel()
        await asyncio.wait({asking})

    async def leave_many(client: httpx.AsyncClient) -> None:
        for _ in range(20):
            await leave(client)

    async with client_of(four) as client:
        await asyncio.gather(*[leave_many(client) for _ in range(50)])
    await until_there(lambda: at_rest(four))


async def test_a_replica_that_is_killed_costs_only_the_answers_that_had_begun(four: App) -> None:
    victim = (await info_of(four, "Engine"))[0]["pid"]

    async def stream(client: httpx.AsyncClient) -> tuple[bool, bool]:
        """Whether it came from the victim at first, and whether it came whole."""
        path, body = completion(5, 750, stream=True)
        events: list[str] = []
        async with client.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            events += [line async for line in response.aiter_lines() if line]
        return f'"pid": {victim}' in events[0], events[-1] == "data: [DONE]"

    async with client_of(four) as client:
        streams = [asyncio.create_task(stream(client)) for _ in range(8)]
        await asyncio.sleep(0.2)
        path, body = embedding(150)
        whole = [asyncio.create_task(client.post(path, json=body)) for _ in range(40)]
        # Not all of them: where clients are slow to send, the first are answered before the last are there.
        await until_there(lambda: sum(info["open"] for info in four.info("Front")) >= 16)
        os.kill(victim, signal.SIGKILL)
        answers = await asyncio.gather(*whole)
        streamed = await asyncio.gather(*streams)
    assert [answer.status_code for answer in answers] == [200] * 40
    assert all(is_whole or was_on_victim for was_on_victim, is_whole in streamed), streamed
    assert sum(not is_whole for _, is_whole in streamed) <= 2, streamed  # one after the other: few had begun
    await until_there(lambda: at_rest(four), 60)
