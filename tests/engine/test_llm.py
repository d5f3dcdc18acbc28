"""AsyncLLM with its core in another process: what an adapter means, vLLM's own OpenAI app, the channel, a dying core."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Iterator
from typing import Any, TypeVar

import httpx
import pytest
import torch
from prometheus_client import REGISTRY
from vllm import PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from orthrus_serve.config.schema import AppArgs
from orthrus_serve.engine.args import make_engine
from orthrus_serve.engine.llm import MixedLLM, embed_dimensions, note_request
from orthrus_serve.engine.openai_app import make_openai_app
from orthrus_serve.errors import ConfigError
from tests.engine.harness import TinyModel, token_ids

T = TypeVar("T")
EOS = 2
WORDS = "w20 w301 w77 w8 w450"
WORD_IDS = [20, 301, 77, 8, 450]


class Running:
    """An engine with its event loop and its OpenAI app, for tests that are plain functions."""

    def __init__(self, tiny: TinyModel, args: AppArgs | None = None) -> None:
        self.tiny = tiny
        self.loop = asyncio.Runner()
        self.args = args or app_args(tiny)
        self.engine: MixedLLM = self.loop.run(self._start())
        self.app: Any = self.loop.run(make_openai_app(self.engine, self.args))

    async def _start(self) -> MixedLLM:
        return make_engine(self.args)

    def run(self, work: Awaitable[T]) -> T:
        async def wrapped() -> T:
            return await asyncio.wait_for(work, 60)

        return self.loop.run(wrapped())

    async def embed(self, ids: list[int], request_id: str, **params: Any) -> Any:
        lora = LoRARequest("orthrus-embed", 1, str(self.tiny.adapter))
        prompt = {"type": "token", "prompt_token_ids": ids}
        async for output in self.engine.encode(
            prompt, PoolingParams(task="embed", **params), request_id, lora_request=lora
        ):
            last = output
        return last

    async def generate(self, ids: list[int], request_id: str, max_tokens: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        async for output in self.engine.generate({"type": "token", "prompt_token_ids": ids}, params, request_id):
            last = output
        return list(last.outputs[0].token_ids)

    async def seen(self) -> None:
        """Until the core reports a request: calls to it are carried out in order, so the next ones come after it."""
        while not (await self.engine.channel.watch(0.0))["requests"]:  # noqa: ASYNC110  an idle core answers at once
            await asyncio.sleep(0.001)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
                return await client.post(path, json=body)

        return self.run(call())

    def close(self) -> None:
        self.engine.shutdown()
        self.loop.close()


def app_args(tiny: TinyModel, **vllm: Any) -> AppArgs:
    return AppArgs.model_validate(
        {
            "topology": "orthrus",
            "model": {"path": str(tiny.model)},
            "adapters": {"orthrus-embed": {"path": str(tiny.adapter), "dimensions": [32]}},
            "num_gpus_per_replica": 0,
            "vllm": {
                "dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 16,
                "kv_cache_memory_bytes": 64 * 2**20, "block_size": 32,
            } | vllm,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def running(tiny: TinyModel) -> Iterator[Running]:
    engine = Running(tiny)
    yield engine
    engine.close()


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.float(), b, dim=0))


def test_generations_and_embeddings_run_together(running: Running, tiny: TinyModel, rng) -> None:
    prompts = [token_ids(rng, n) for n in (30, 90, 7)]
    inputs = [token_ids(rng, n) for n in (5, 64, 200, 400)]

    async def both() -> tuple[list[Any], list[Any]]:
        generations = [asyncio.ensure_future(running.generate(p, f"g{i}", 20)) for i, p in enumerate(prompts)]
        embeddings = [asyncio.ensure_future(running.embed(t, f"e{i}")) for i, t in enumerate(inputs)]
        return await asyncio.gather(*generations), await asyncio.gather(*embeddings)

    tokens, vectors = running.run(both())
    alone = [running.run(running.generate(p, f"alone{i}", 20)) for i, p in enumerate(prompts)]
    assert tokens == alone
    for ids, output in zip(inputs, vectors, strict=True):
        assert output.prompt_token_ids == [*ids, EOS]
        assert cosine(output.outputs.data, tiny.vector([*ids, EOS], "last")) > 0.99999


def test_the_end_token_is_not_doubled(running: Running, tiny: TinyModel) -> None:
    output = running.run(running.embed([5, 6, EOS], "ends"))
    assert output.prompt_token_ids == [5, 6, EOS]
    assert cosine(output.outputs.data, tiny.vector([5, 6, EOS], "last")) > 0.99999


def test_dimensions_come_from_the_context(running: Running, tiny: TinyModel) -> None:
    async def cut() -> Any:
        embed_dimensions.set(32)
        return await running.embed([5, 6, 7], "cut")

    vector = running.run(cut()).outputs.data
    assert vector.shape == (32,)
    assert cosine(vector, tiny.vector([5, 6, 7, EOS], "last", dimensions=32)) > 0.99999


def test_the_longest_input_fits_and_one_more_token_is_refused_with_the_limit(
    running: Running, tiny: TinyModel, rng
) -> None:
    longest = token_ids(rng, 510)
    output = running.run(running.embed(longest, "longest"))
    assert cosine(output.outputs.data, tiny.vector([*longest, EOS], "last")) > 0.99999
    with pytest.raises(ValueError, match="512 tokens .*at most 511"):
        running.run(running.embed([*longest, 5], "longer"))


def test_the_bare_model_does_not_embed(running: Running) -> None:
    async def bare() -> None:
        prompt = {"type": "token", "prompt_token_ids": [5, 6]}
        async for _ in running.engine.encode(prompt, PoolingParams(task="embed"), "bare"):
            pass

    with pytest.raises(ValueError, match="orthrus-embed"):
        running.run(bare())


def test_the_openai_app_serves_both_tasks(running: Running, tiny: TinyModel) -> None:
    for given in (WORDS, [WORDS, WORDS], WORD_IDS, [WORD_IDS]):
        embedding = running.post("/v1/embeddings", {"model": "orthrus-embed", "input": given})
        assert embedding.status_code == 200, embedding.text
        rows = embedding.json()["data"]
        assert embedding.json()["usage"]["prompt_tokens"] == 6 * len(rows)
        for row in rows:
            assert cosine(torch.tensor(row["embedding"]), tiny.vector([*WORD_IDS, EOS], "last")) > 0.99999
    chat = running.post(
        "/v1/chat/completions", {"model": "orthrus", "messages": [{"role": "user", "content": WORDS}], "max_tokens": 5}
    )
    assert chat.status_code == 200, chat.text
    assert chat.json()["usage"]["completion_tokens"] == 5


NOTHING_IN_COMMON = {"structured_outputs": {"choice": ["w5", "w6"]}, "allowed_token_ids": [9]}
NOT_IN_THE_VOCABULARY = {"response_format": {"type": "json_object"}}  # the tiny model has words alone


@pytest.mark.parametrize("asked", [NOTHING_IN_COMMON, NOT_IN_THE_VOCABULARY])
@pytest.mark.parametrize("n", [1, 2])
def test_a_format_that_leaves_no_token_is_the_callers_error_and_disturbs_nobody(
    running: Running, tiny: TinyModel, asked: dict[str, Any], n: int
) -> None:
    """Stock vLLM: a 500 (see `vllm_fixes.py`)."""
    body = {"prompt": WORDS, "max_tokens": 5, "n": n, "temperature": 1.0, **asked}
    refused = running.post("/v1/completions", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "structured_outputs")
    assert "no token may follow" in refused.json()["error"]["message"]
    streamed = running.post("/v1/completions", body | {"stream": True})
    assert "no token may follow" in streamed.text
    assert running.run(running.generate(WORD_IDS, f"after {n} {sorted(asked)}", 5)) == tiny.greedy(WORD_IDS, 5)


def test_the_other_outputs_of_a_refused_request_end_with_it(running: Running) -> None:
    async def decoded() -> int:
        while (report := await running.engine.channel.remaining())["requests"]:  # noqa: ASYNC110  polls another process
            await asyncio.sleep(0.02)
        return report["totals"]["decode_tokens"]

    # The vocabulary has no w9999: after w5 nothing may follow, after w6 250 words.
    choices = ["w5w9999", "w6" + "w7" * 250]
    body = {"prompt": WORDS, "max_tokens": 300, "n": 8, "temperature": 2.0, "structured_outputs": {"choice": choices}}
    before = running.run(decoded())
    refused = running.post("/v1/completions", {**body, "logit_bias": {"5": 0.0}, "seed": 3})
    assert refused.status_code == 400, refused.text
    assert running.run(decoded()) - before < 8 * 25


STUMBLED_OVER: tuple[dict[str, Any], ...] = (
    {"structured_outputs": []},
    {"structured_outputs": "regex"},
    {"tools": [1], "tool_choice": {"type": "function", "function": {"name": "x"}}},
    {"tools": [{}], "tool_choice": {"type": "function", "function": {"name": "x"}}},
    {"messages": [{"role": "assistant", "content": "x", "tool_calls": 5}]},
    {"messages": 5},
)


@pytest.mark.parametrize("fields", STUMBLED_OVER, ids=str)
def test_a_field_that_vllm_stumbles_over_is_the_callers_error(running: Running, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 2, **fields}
    refused = running.post("/v1/chat/completions", body)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["message"]


def test_requests_are_counted_as_vllm_counts_them(running: Running) -> None:
    def counted() -> float:
        return (
            REGISTRY.get_sample_value(
                "http_requests_total", {"handler": "/v1/completions", "status": "2xx", "method": "POST"}
            )
            or 0.0
        )

    before = counted()
    assert running.post("/v1/completions", {"prompt": WORDS, "max_tokens": 1}).status_code == 200
    assert counted() == before + 1


def test_a_fault_of_the_server_is_not_told_as_the_callers(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*_: Any, **__: Any) -> None:
        raise AttributeError("a fault of ours")

    monkeypatch.setattr(running.engine, "generate", stumble)
    with pytest.raises(AttributeError, match="a fault of ours"):
        running.post("/v1/completions", {"prompt": WORDS, "max_tokens": 2})


def test_watch_answers_at_once_when_idle(running: Running) -> None:
    report = running.run(running.engine.channel.watch())
    assert report["running"] == report["waiting"] == 0
    assert report["requests"] == {}
    assert report["totals"]["mixed_steps"] > 0


def test_watch_follows_the_work_of_a_running_request(running: Running, rng) -> None:
    async def observe() -> list[int]:
        left = []
        await running.engine.channel.set({"step_tokens": 16})
        work = asyncio.ensure_future(running.embed(token_ids(rng, 500), "watched"))
        await running.seen()
        while not work.done():
            report = await running.engine.channel.watch(0.0)
            left.append(report["prompt_left"]["embed"])
        await work
        await running.engine.channel.set({"step_tokens": 64})
        return left

    left = running.run(observe())
    assert left == sorted(left, reverse=True)
    assert len(set(left)) >= 4
    assert running.run(running.engine.channel.watch())["prompt_left"]["embed"] == 0


def test_the_ids_that_a_call_notes_are_those_of_the_reports(running: Running) -> None:
    async def ask(path: str, body: dict[str, Any]) -> tuple[list[str], set[str]]:
        """The ids noted by the call, and those that the core reported while it ran."""
        noted: list[str] = []
        reported: set[str] = set()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(running.app), base_url="http://engine") as client:
            token = note_request.set(noted.append)
            asking = asyncio.create_task(client.post(path, json=body))  # its tasks inherit the variable
            note_request.reset(token)
            while not asking.done():
                reported |= set((await running.engine.channel.watch(0.0))["requests"])
                await asyncio.sleep(0.001)
        assert asking.result().status_code == 200
        return noted, reported

    body = {"model": "orthrus", "prompt": [WORD_IDS, WORD_IDS], "n": 3, "max_tokens": 60, "ignore_eos": True}
    noted, reported = running.run(ask("/v1/completions", body))
    assert len(noted) == 6
    assert reported == set(noted)
    body = {"model": "orthrus-embed", "input": [WORD_IDS * 50, WORD_IDS]}
    noted, reported = running.run(ask("/v1/embeddings", body))
    assert len(noted) == 2
    assert reported <= set(noted)


def test_settings_change_live_and_refusals_are_values(running: Running) -> None:
    channel = running.engine.channel
    answer = running.run(channel.set({"policy": "unified_homo", "step_tokens": 32}))
    assert answer["refused"] is None
    assert running.run(channel.watch())["policy"] == "unified_homo"
    refused = running.run(channel.set({"policy": "fastest"}))
    assert "fastest" in refused["refused"]
    assert refused["applied"]["policy"] == "unified_homo"
    running.run(channel.set({"policy": "orthrus", "step_tokens": 64}))


def test_a_cancelled_embedding_frees_the_engine(running: Running, tiny: TinyModel, rng) -> None:
    async def cancel() -> dict[str, Any]:
        await running.engine.channel.set({"step_tokens": 4})
        work = asyncio.ensure_future(running.embed(token_ids(rng, 500), "cancelled"))
        await running.seen()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        while (report := await running.engine.channel.remaining())["requests"]:  # noqa: ASYNC110  polls another process
            await asyncio.sleep(0.02)
        return report

    assert running.run(cancel())["running"] == 0
    assert cosine(running.run(running.embed([9, 8], "after")).outputs.data, tiny.vector([9, 8, EOS], "last")) > 0.99999


def test_an_engine_side_abort_of_an_embedding_is_an_error_and_not_the_end(
    running: Running, tiny: TinyModel, rng
) -> None:
    """Stock vLLM ends the whole AsyncLLM here (see `vllm_fixes.py`)."""

    async def pause() -> None:
        await running.engine.channel.set({"step_tokens": 4})
        work = asyncio.ensure_future(running.embed(token_ids(rng, 500), "paused"))
        await running.seen()
        await running.engine.pause_generation(mode="abort")
        with pytest.raises(Exception, match="failed"):
            await work
        await running.engine.resume_generation()

    running.run(pause())
    assert not running.engine.errored
    assert (
        cosine(running.run(running.embed([9, 8], "resumed")).outputs.data, tiny.vector([9, 8, EOS], "last")) > 0.99999
    )


@pytest.mark.parametrize(
    ("vllm", "message"),
    [
        ({"max_num_seqs": 64}, "leaves no room"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 512}, "chunked"),
        ({"enforce_eager": False}, "enforce_eager"),
        ({"scheduler_cls": "x"}, "topology"),
        ({"max_num_sequences": 8}, "did you mean"),
    ],
)
def test_what_was_never_tested_is_refused_before_anything_starts(
    tiny: TinyModel, vllm: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(app_args(tiny, **vllm))


def test_pending_calls_fail_soon_after_the_core_died(running: Running, rng) -> None:
    """Last of the module: it takes the engine down."""

    async def kill() -> None:
        work = asyncio.ensure_future(running.generate(token_ids(rng, 30), "long", 480))
        await running.seen()
        pending = asyncio.ensure_future(running.engine.channel.watch(3600.0))
        await asyncio.sleep(0.1)
        os.kill(running.engine.engine_core.resources.engine_manager.processes[0].pid, signal.SIGKILL)  # pyright: ignore
        for call in (pending, work):
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(call, 20)

    running.run(kill())
    assert running.engine.errored
