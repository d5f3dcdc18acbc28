"""Streams of which each token could be a chunk of its own, where a replica may send few: through proxy, Front and replica."""

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from orthrus_serve.app import compose
from orthrus_serve.config.schema import AppArgs
from tests.serve.conftest import FAKE_ARGS, App
from tests.serve.fakes import start_fake

NUM, NUM_TOKENS, GAP_S, CHUNKS_PER_S = 3, 200, 0.01, 10.0


@pytest.fixture(scope="module")
def paced(serve_url: str) -> Iterator[App]:
    args = AppArgs.model_validate({**FAKE_ARGS, "num_replicas": 1, "streams": {"chunks_per_s": CHUNKS_PER_S}})
    serve.run(compose(args, start_fake), name="paced", route_prefix="/paced")
    yield App("paced", f"{serve_url}/paced")
    serve.delete("paced", _blocking=False)


async def stream(client: httpx.AsyncClient) -> tuple[list[str], int]:
    """The texts of its events, and in how many pieces they came."""
    body = {"prompt": "x", "max_tokens": NUM_TOKENS, "stream": True, "fake": {"gap_s": GAP_S}}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        pieces = [piece async for piece in response.aiter_raw()]
    events = [event.removeprefix("data: ") for event in b"".join(pieces).decode().split("\n\n") if event]
    assert events[-1] == "[DONE]"
    return [json.loads(event)["choices"][0]["text"] for event in events[:-1]], len(pieces)


async def gap_s(client: httpx.AsyncClient) -> float:
    page = (await client.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    return max(sample.value for sample in families["orthrus_stream_gap_seconds"].samples)


async def test_each_token_is_an_event_of_its_own_and_few_chunks_carry_them(paced: App) -> None:
    async with httpx.AsyncClient(base_url=paced.url, timeout=60) as client:
        began_s = asyncio.get_running_loop().time()
        asking = [asyncio.create_task(stream(client)) for _ in range(NUM)]
        gaps = [await gap_s(client)]
        while not all(task.done() for task in asking):
            gaps.append(await gap_s(client))
            await asyncio.sleep(0.05)
        answers = [await task for task in asking]
        took_s = asyncio.get_running_loop().time() - began_s
        after = await gap_s(client)
    for texts, num_pieces in answers:
        assert texts == [f"t{number}" for number in range(NUM_TOKENS)]
        # The first and the end besides, and the short gaps at either end, when not all are sending.
        assert num_pieces <= took_s / (NUM / CHUNKS_PER_S) + 10
        assert num_pieces < NUM_TOKENS / 2
    assert max(gaps) == pytest.approx(NUM / CHUNKS_PER_S)
    assert after == 0.0
