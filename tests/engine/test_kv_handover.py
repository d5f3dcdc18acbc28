"""Prompts computed by one real engine on CPU and answered by another: the same tokens, and nothing kept that nobody fetches."""

import asyncio
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Iterator
from typing import Any, TypeVar

import pytest
from typing_extensions import override
from vllm import PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest

from orthrus_serve.config.schema import AppArgs
from orthrus_serve.engine.args import make_engine
from orthrus_serve.engine.kv_handover import DIGEST, give_up_late, is_to_fetch, with_deadline
from orthrus_serve.engine.llm import MixedLLM
from orthrus_serve.serving.handover import ASK_TO_KEEP
from tests.engine.harness import TinyModel, token_ids

pytest.importorskip("nixl")

T = TypeVar("T")
LEASE_S = 6
Params = dict[str, Any] | None


class Pair:
    """Two engines of one configuration on one event loop."""

    def __init__(self, tiny: TinyModel) -> None:
        self.tiny = tiny
        self.loop = asyncio.Runner()
        self.args = AppArgs.model_validate(
            {
                "topology": "disagg_pd",
                "num_replicas": 2,
                "kv_connector": "nixl",
                "kv_lease_s": LEASE_S,
                "model": {"path": str(tiny.model)},
                "adapters": {"orthrus-embed": {"path": str(tiny.adapter)}},
                "num_gpus_per_replica": 0,
                "vllm": {
                    "dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 16,
                    "kv_cache_memory_bytes": 64 * 2**20, "block_size": 32,
                },
            }
        )  # fmt: skip
        self.first, self.second = self.run(self._start()), self.run(self._start())

    async def _start(self) -> MixedLLM:
        return make_engine(self.args)

    def run(self, work: Awaitable[T], limit_s: float = 120) -> T:
        async def wrapped() -> T:
            return await asyncio.wait_for(work, limit_s)

        return self.loop.run(wrapped())

    async def prefill(self, ids: list[int], request_id: str) -> Params:
        """Has the first engine compute a prompt; what it hands over."""
        return (await generate(self.first, ids, request_id, 1, ASK_TO_KEEP)).kv_transfer_params

    async def shared(self, ids: list[int], request_id: str, max_tokens: int) -> list[int]:
        """The tokens of a generation that both engines share."""
        params = await self.prefill(ids, f"p-{request_id}")
        assert params
        return tokens(await generate(self.second, ids, f"d-{request_id}", max_tokens, params))

    async def kept(self) -> list[int]:
        return [(await engine.channel.remaining())["kept"] for engine in (self.first, self.second)]

    def until_nothing_is_kept(self, limit_s: float = 30) -> float:
        """Waits until no engine holds KV for another; returns how long that took."""
        began_s = time.monotonic()
        while self.run(self.kept()) != [0, 0]:
            assert time.monotonic() - began_s < limit_s
            time.sleep(0.05)
        return time.monotonic() - began_s

    def close(self) -> None:
        self.first.shutdown()
        self.second.shutdown()
        self.loop.close()


async def generate(engine: MixedLLM, ids: list[int], request_id: str, max_tokens: int, params: Params = None) -> Any:
    extra = None if params is None else {"kv_transfer_params": dict(params)}
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
    async for output in engine.generate({"type": "token", "prompt_token_ids": list(ids)}, sampling, request_id):
        last = output
    return last


def tokens(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


class Thief(threading.Thread):
    """Takes the port of a side channel as soon as this process knows one, as any connection may while a model loads.

    A connector whose port is taken waits for ever, and so does whoever starts its engine.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()
        self.taken: list[int] = []

    @override
    def run(self) -> None:
        while not self.stop.wait(0.001):
            if port := int(os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")):
                with socket.create_server(("", port)):
                    self.taken.append(port)
                    self.stop.wait()


@pytest.fixture(scope="module")
def thief() -> Iterator[Thief]:
    thief = Thief()
    thief.start()
    yield thief
    thief.stop.set()
    thief.join()


@pytest.fixture(scope="module")
def pair(tiny: TinyModel, thief: Thief) -> Iterator[Pair]:
    engines = Pair(tiny)
    yield engines
    engines.close()


def test_no_port_of_an_engine_is_known_to_anybody_before_it_is_listened_to(pair: Pair, thief: Thief) -> None:
    assert thief.is_alive()
    assert thief.taken == []


def totals(pair: Pair, engine: MixedLLM) -> dict[str, Any]:
    return pair.run(engine.channel.remaining())["totals"]


def test_engines_compute_on_the_cores_that_this_process_has(pair: Pair) -> None:
    assert os.sched_getaffinity(core_pid(pair.first)) == os.sched_getaffinity(0)


def test_short_and_chunked_prompts_get_the_tokens_that_they_get_alone(pair: Pair, tiny: TinyModel, rng) -> None:
    # The step holds 64 tokens, a block 32: one token, within and at the end of a block, many chunks.
    prompts = [token_ids(rng, n) for n in (1, 5, 31, 32, 33, 64, 65, 130, 400)]
    before = totals(pair, pair.second)["prefill_tokens"]

    async def all_at_once() -> list[list[int]]:
        return await asyncio.gather(*[pair.shared(ids, f"a{i}", 12) for i, ids in enumerate(prompts)])

    answers = pair.run(all_at_once())
    assert answers == [tiny.greedy(ids, 12) for ids in prompts]
    # The second engine computes the last token of each prompt, and nothing else of them.
    assert totals(pair, pair.second)["prefill_tokens"] - before == len(prompts)
    pair.until_nothing_is_kept()


def test_a_prompt_whose_beginning_the_second_engine_has_is_fetched_in_part(pair: Pair, tiny: TinyModel, rng) -> None:
    common = token_ids(rng, 96)
    prompts = [common + token_ids(rng, n) for n in (10, 40, 1)] + [common]
    for i, ids in enumerate([*prompts, *prompts]):  # the second time, all of it is there
        assert pair.run(pair.shared(ids, f"c{i}", 8)) == tiny.greedy(ids, 8)
    pair.until_nothing_is_kept()


def test_embeddings_beside_shared_generations_are_right(pair: Pair, tiny: TinyModel, rng) -> None:
    inputs, prompts = [token_ids(rng, n) for n in (3, 70, 200)], [token_ids(rng, n) for n in (90, 10)]

    async def embed(ids: list[int], request_id: str) -> Any:
        lora = LoRARequest("orthrus-embed", 1, str(tiny.adapter))
        prompt: Any = {"type": "token", "prompt_token_ids": ids}
        async for output in pair.first.encode(prompt, PoolingParams(task="embed"), request_id, lora_request=lora):
            last = output
        return last.outputs.data

    async def both() -> tuple[list[Any], list[list[int]]]:
        vectors = asyncio.gather(*[embed(ids, f"e{i}") for i, ids in enumerate(inputs)])
        answers = asyncio.gather(*[pair.shared(ids, f"b{i}", 8) for i, ids in enumerate(prompts)])
        return await vectors, await answers

    vectors, answers = pair.run(both())
    assert answers == [tiny.greedy(ids, 8) for ids in prompts]
    for vector, ids in zip(vectors, inputs, strict=True):
        assert float(vector.float() @ tiny.vector([*ids, 2], "last")) > 0.9999


def test_what_nobody_fetches_is_freed_when_its_lease_ends(pair: Pair, rng) -> None:
    assert pair.run(pair.prefill(token_ids(rng, 100), "left"))
    assert pair.run(pair.kept()) == [1, 0]
    assert pair.until_nothing_is_kept() < 4 * LEASE_S


def test_a_handover_of_another_prompt_is_not_fetched(pair: Pair, tiny: TinyModel, rng) -> None:
    ids, others = token_ids(rng, 80), token_ids(rng, 80)
    params = pair.run(pair.prefill(others, "others"))
    assert params
    assert tokens(pair.run(generate(pair.second, ids, "mixed-up", 8, params))) == tiny.greedy(ids, 8)
    assert DIGEST in params
    pair.until_nothing_is_kept()


def test_a_handover_that_waited_for_half_its_lease_is_not_fetched() -> None:
    params = with_deadline({"do_remote_prefill": True, "remote_request_id": "r"}, lease_s=10.0, now_s=100.0)
    assert not give_up_late(params, 105.0)
    assert is_to_fetch(params)
    assert give_up_late(params, 105.1)
    assert not is_to_fetch(params)
    assert not give_up_late(params, 200.0), "told once"
    assert not give_up_late(None, 0.0)


def test_its_own_handover_is_not_fetched(pair: Pair, tiny: TinyModel, rng) -> None:
    ids = token_ids(rng, 80)
    params = pair.run(pair.prefill(ids, "own"))
    assert tokens(pair.run(generate(pair.first, ids, "own-again", 8, params))) == tiny.greedy(ids, 8)
    pair.until_nothing_is_kept()


def test_aborts_at_any_moment_leave_nothing_behind(pair: Pair, tiny: TinyModel) -> None:
    rng = random.Random(3)

    async def left(i: int) -> None:
        asking = asyncio.create_task(pair.shared(token_ids(rng, rng.randint(1, 300)), f"x{i}", 20))
        await asyncio.wait({asking}, timeout=rng.uniform(0, 0.5))
        asking.cancel()
        await asyncio.wait({asking})

    async def all_of_them() -> None:
        await asyncio.gather(*[left(i) for i in range(40)])

    pair.run(all_of_them())
    pair.until_nothing_is_kept()
    ids = token_ids(rng, 100)
    assert pair.run(pair.shared(ids, "after", 8)) == tiny.greedy(ids, 8)


def test_prompts_whose_engine_died_are_computed_by_the_second(pair: Pair, tiny: TinyModel, rng) -> None:
    """The last test of these engines."""
    prompts = [token_ids(rng, n) for n in (20, 90, 200)]
    handed = [pair.run(pair.prefill(ids, f"k{i}")) for i, ids in enumerate(prompts)]
    os.kill(core_pid(pair.first), signal.SIGKILL)

    async def answers() -> list[list[int]]:
        asked = [generate(pair.second, ids, f"z{i}", 8, handed[i]) for i, ids in enumerate(prompts)]
        return [tokens(answer) for answer in await asyncio.gather(*asked)]

    assert pair.run(answers()) == [tiny.greedy(ids, 8) for ids in prompts]
    assert pair.run(pair.second.channel.remaining())["requests"] == {}


def core_pid(engine: MixedLLM) -> int:
    (process,) = engine.engine_core.resources.engine_manager.processes  # type: ignore[attr-defined]
    return process.pid
