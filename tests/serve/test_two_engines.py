"""Two real engines on CPU behind two Fronts: load is shared in tokens, followed by reports, and leaves no charge."""

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from ray import serve

from orthrus_serve.app import build
from orthrus_serve.config.schema import AppArgs
from tests.serve.conftest import App
from tests.serve.test_fake_app import until
from tests.serve.test_routing import client_of, completion, embedding, info_of

PARTS = ("decode_tokens", "prefill_tokens", "embed_tokens")


@pytest.fixture(scope="module")
def two(serve_url: str, tiny: Any) -> Iterator[App]:
    args = {
        "topology": "orthrus",
        "model": {"path": str(tiny.model)},
        "adapters": {"orthrus-embed": {"path": str(tiny.adapter)}},
        "num_replicas": 2,
        "num_gpus_per_replica": 0,
        "num_cpus_per_replica": 0.5,
        "front": {"num_replicas": 2, "num_cpus": 0.1},
        "limits": {"max_inputs": 64, "max_n": 8},
        "vllm": {
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 128,
            "kv_cache_memory_bytes": 64 * 2**20,
        },
    }
    serve.run(build(AppArgs.model_validate(args)), name="two", route_prefix="/two")
    yield App("two", f"{serve_url}/two")
    serve.delete("two", _blocking=False)


def at_rest(app: App) -> bool:
    fronts, engines = app.info("Front"), app.info("Engine")
    is_settled = all((f["open"], f["tokens"], f["loads"], f["drift"]) == (0, 0, {}, 0) for f in fronts)
    return len(fronts) == len(engines) == 2 and is_settled and all(e["open"] == e["in_engine"] == 0 for e in engines)


def mixed(rng: random.Random) -> tuple[str, dict[str, Any]]:
    if rng.random() < 0.5:
        return embedding(rng.randint(10, 200))
    return completion(rng.randint(10, 200), rng.randint(5, 80), ignore_eos=True, n=rng.choice([1, 1, 1, 3]))


async def test_two_real_engines_share_a_mixed_load_in_tokens_and_end_with_nothing_charged(two: App) -> None:
    rng, num_left = random.Random(4), 0

    async def ask(client: Any, ends_s: float) -> None:
        nonlocal num_left
        while time.monotonic() < ends_s:
            path, body = mixed(rng)
            asking = asyncio.create_task(client.post(path, json=body))
            if rng.random() < 0.1:
                await asyncio.wait({asking}, timeout=rng.uniform(0, 0.2))
                num_left += asking.cancel()
                await asyncio.wait({asking})
            else:
                assert (await asking).status_code == 200

    async def computed() -> dict[str, int]:
        engines = await info_of(two, "Engine")
        return {engine["replica"]: sum(engine["report"]["totals"][part] for part in PARTS) for engine in engines}

    async with client_of(two) as client:
        await asyncio.gather(*[ask(client, time.monotonic() + 2) for _ in range(4)])  # their first steps are slow
        before = await computed()
        await asyncio.gather(*[ask(client, time.monotonic() + 10) for _ in range(16)])
        by_engine = {replica: tokens - before[replica] for replica, tokens in (await computed()).items()}
    assert num_left > 0
    assert max(by_engine.values()) <= 1.1 * min(by_engine.values()), by_engine
    await asyncio.to_thread(until, lambda: at_rest(two), 20.0)


async def test_a_front_follows_a_real_engine_through_a_prompt_and_an_answer(two: App) -> None:
    async with client_of(two) as client:
        path, body = completion(300, 150, ignore_eos=True)
        asking = asyncio.create_task(client.post(path, json=body))
        seen: list[int] = []

        def is_seen_to_the_end() -> bool:
            seen.append(max(sum(info["loads"].values()) for info in two.info("Front")))
            return seen[-1] == 0 and max(seen) > 0

        await asyncio.to_thread(until, is_seen_to_the_end, 30.0)
        assert (await asking).status_code == 200
    falling = [left for left in seen if left]
    assert falling == sorted(falling, reverse=True), seen
    assert len({left for left in falling if left < max(falling)}) >= 2, (
        seen
    )  # it fell while it ran, not only at the end
