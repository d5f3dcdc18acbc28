"""A generator and an unrelated embedder on one card: both answer as if alone; steps are scaled by what the other has left."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import torch
from vllm import SamplingParams

from orthrus_serve.config.load import parse_args
from orthrus_serve.config.schema import AppArgs
from orthrus_serve.engine.card_page import FOLDER, PREFIX
from orthrus_serve.engine.llm import embed_dimensions, note_request
from orthrus_serve.engine.separate import SeparateModels, start_separate
from orthrus_serve.errors import ConfigError
from orthrus_serve.policy.card_share import most_steps
from tests.engine.harness import TinyModel, token_ids
from tests.engine.tiny_embedder import CLS, HIDDEN_SIZE, MAX_TOKENS, SEP, TinyEmbedder, make_tiny_embedder

T = TypeVar("T")
BUDGET, FLOOR = 128, 0.125
WORDS, WORD_IDS = "w20 W301 w577", [CLS, 20, 301, 577, SEP]
EMBED, COMPLETE = "/v1/embeddings", "/v1/completions"


def separate_args(tiny: TinyModel, embedder: TinyEmbedder, folder: Path, **engine: Any) -> AppArgs:
    vllm = {"dtype": "float32", "max_num_batched_tokens": BUDGET, "max_num_seqs": 16}
    return parse_args(
        {
            "topology": "separate_models",
            "model": {"path": str(tiny.model)},
            "embedder": {
                "path": str(embedder.model),
                "dimensions": [16],
                "vllm": {**vllm, "kv_cache_memory_bytes": 2**24},
            },
            "num_gpus_per_replica": 0,
            "engine": {"step_log": str(folder / "steps"), **engine},
            "vllm": {**vllm, "max_model_len": 1024, "kv_cache_memory_bytes": 64 * 2**20, "block_size": 32},
        }
    )


class Running:
    """Both engines with their event loop and their app, for tests that are plain functions."""

    def __init__(self, args: AppArgs, folder: Path) -> None:
        self.folder = folder
        self.loop = asyncio.Runner()
        self.models: SeparateModels = self.loop.run(start_separate(args))
        self.engines = self.models.engines

    def run(self, work: Awaitable[T]) -> T:
        async def wrapped() -> T:
            return await asyncio.wait_for(work, 100)

        return self.loop.run(wrapped())

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(self.models.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=90) as client:
            return await client.post(path, json=body)

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(self.models.app), base_url="http://engine"
        ) as client:
            return await client.get(path)

    async def embed(self, *inputs: list[int]) -> list[torch.Tensor]:
        answer = await self.post(EMBED, {"model": "orthrus-embed", "input": list(inputs)})
        assert answer.status_code == 200, answer.text
        return [torch.tensor(row["embedding"]) for row in answer.json()["data"]]

    async def generate(self, ids: list[int], request_id: str, max_tokens: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        async for output in self.engines.generator.generate(
            {"type": "token", "prompt_token_ids": ids}, params, request_id
        ):
            last = output
        return list(last.outputs[0].token_ids)

    async def set(self, **settings: Any) -> None:
        assert (await self.engines.channel.set(settings))["refused"] is None

    def steps(self, embedder: bool) -> list[dict[str, Any]]:
        name = "steps.embed" if embedder else "steps"
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def begin_anew(self) -> None:
        """No step from before, and the settings of the start."""
        self.run(self.set(card_share="remaining", min_share=FLOOR, step_tokens=BUDGET))
        for name in ("steps", "steps.embed"):
            os.truncate(self.folder / name, 0)

    def close(self) -> None:
        self.engines.shutdown()
        self.loop.close()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> TinyEmbedder:
    return make_tiny_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def both(tiny: TinyModel, embedder: TinyEmbedder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("both")
    running = Running(separate_args(tiny, embedder, folder), folder)
    yield running
    running.close()


@pytest.fixture
def running(both: Running) -> Running:
    both.begin_anew()
    return both


def inputs_of(rng: random.Random, *lengths: int) -> list[list[int]]:
    return [[CLS, *(rng.randrange(103, 600) for _ in range(length - 2)), SEP] for length in lengths]


def cosine(left: torch.Tensor, right: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(left, right, dim=0))


def test_both_answer_as_their_references_do_while_both_run(
    running: Running, tiny: TinyModel, embedder: TinyEmbedder, rng: random.Random
) -> None:
    prompts = [token_ids(rng, length) for length in (30, 200, 7, 90)]
    inputs = inputs_of(rng, 3, 64, 128, 100, 40, 128, 17, 90)

    async def all_at_once() -> tuple[list[list[int]], list[torch.Tensor]]:
        generations = [running.generate(prompt, f"g{i}", 24) for i, prompt in enumerate(prompts)]
        *tokens, vectors = await asyncio.gather(*generations, running.embed(*inputs * 4))
        return tokens, vectors

    tokens, vectors = running.run(all_at_once())
    assert tokens == [tiny.greedy(prompt, 24) for prompt in prompts]
    for ids, vector in zip(inputs * 4, vectors, strict=True):
        assert cosine(vector, embedder.vector(ids)) > 0.99999
        assert float(vector.norm()) == pytest.approx(1.0, abs=1e-4)
    others = [[line["card"]["other"] for line in running.steps(embedder)] for embedder in (False, True)]
    assert max(others[0]) > 0, "the generator never heard of the embedder's work"
    assert max(others[1]) > 0, "the embedder never heard of the generator's work"


def test_texts_are_tokenised_by_the_model_that_they_are_for(running: Running, embedder: TinyEmbedder) -> None:
    answer = running.run(running.post(EMBED, {"model": "orthrus-embed", "input": WORDS})).json()
    vector = torch.tensor(answer["data"][0]["embedding"])
    assert (answer["usage"]["prompt_tokens"], answer["model"]) == (len(WORD_IDS), "orthrus-embed")
    assert cosine(vector, embedder.vector(WORD_IDS)) > 0.99999
    for name, ids in (("orthrus-embed", WORD_IDS), ("orthrus", [20, 0, 0]), (None, [20, 0, 0])):
        body = {"prompt": WORDS} if name is None else {"model": name, "prompt": WORDS}
        assert running.run(running.post("/tokenize", body)).json()["tokens"] == ids
    text = running.run(running.post("/detokenize", {"model": "orthrus-embed", "tokens": [577]})).json()
    assert text["prompt"] == "w577"
    names = [model["id"] for model in running.run(running.get("/v1/models")).json()["data"]]
    assert names == ["orthrus", "orthrus-embed"]


def test_a_vector_is_cut_then_normalised_and_left_alone_when_asked(running: Running, embedder: TinyEmbedder) -> None:
    ids = [CLS, 9, 8, 7, SEP]

    async def cut() -> torch.Tensor:
        embed_dimensions.set(16)
        return (await running.embed(ids))[0]

    vector = running.run(cut())
    assert vector.shape == (16,)
    assert cosine(vector, embedder.vector(ids, dimensions=16)) > 0.99999
    body = {"model": "orthrus-embed", "input": ids, "use_activation": False}
    raw = torch.tensor(running.run(running.post(EMBED, body)).json()["data"][0]["embedding"])
    assert torch.allclose(raw, embedder.vector(ids, normalize=False), atol=1e-3)
    assert running.models.vector_size == HIDDEN_SIZE


def test_bad_inputs_are_a_clean_400_and_the_engines_go_on(running: Running) -> None:
    for body, text in (({"input": [5] * (MAX_TOKENS + 1)}, str(MAX_TOKENS)), ({"input": []}, "")):
        answer = running.run(running.post(EMBED, {"model": "orthrus-embed", **body}))
        assert (answer.status_code, text in answer.text) == (400, True)
    assert running.run(running.post(EMBED, {"model": "orthrus-embed", "input": [5] * MAX_TOKENS})).status_code == 200


def test_budgets_shrink_while_the_other_is_busy_and_grow_back(running: Running, rng: random.Random) -> None:
    async def a_flood_beside_a_generation() -> None:
        generating = asyncio.ensure_future(running.generate(token_ids(rng, 300), "long", 400))
        await running.embed(*inputs_of(rng, *[100] * 60))
        await generating
        await running.embed(*inputs_of(rng, *[100] * 4))

    running.run(a_flood_beside_a_generation())
    generated, embedded = running.steps(embedder=False), running.steps(embedder=True)
    for steps in (generated, embedded):
        shared = [line["card"]["share"] for line in steps if line["card"]["other"]]
        alone = [line["card"]["share"] for line in steps if not line["card"]["other"]]
        assert shared
        assert all(FLOOR <= share <= 1 - FLOOR for share in shared)
        assert alone
        assert set(alone) == {1.0}
        for line in steps:
            assert line["decode"] + line["prefill"] + line["embed"] <= line["budget"] <= BUDGET
    small = [line["budget"] for line in generated if line["card"]["other"] > 2 * line["card"]["own"]]
    assert small
    assert max(small) < BUDGET / 2
    assert generated[-1]["card"]["other"] == 0
    assert generated[-1]["budget"] == BUDGET
    assert embedded[-1]["card"]["other"] == 0
    assert embedded[-1]["budget"] == BUDGET


def test_an_input_longer_than_its_share_is_computed_whole_within_the_bound(
    running: Running, embedder: TinyEmbedder, rng: random.Random
) -> None:
    """With the generator's work by far the larger, the embedder has the floor: 16 tokens a step, for inputs of up to 128."""
    running.run(running.set(min_share=FLOOR))
    lengths = [128, 90, 5, 128, 64]
    inputs = inputs_of(rng, *lengths)

    async def beside_many_generations() -> list[torch.Tensor]:
        generating = [asyncio.ensure_future(running.generate(token_ids(rng, 900), f"many{i}", 100)) for i in range(12)]
        while not (await running.engines.generator.channel.watch(0.0))["prompt_left"]["generate"]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        before = (await running.engines.embedder.channel.remaining())["totals"]
        vectors = await running.embed(*inputs)
        after = (await running.engines.embedder.channel.remaining())["totals"]
        assert after["embed_tokens"] - before["embed_tokens"] == sum(lengths)
        for task in generating:
            task.cancel()
        await asyncio.gather(*generating, return_exceptions=True)
        return vectors

    vectors = running.run(beside_many_generations())
    for ids, vector in zip(inputs, vectors, strict=True):
        assert cosine(vector, embedder.vector(ids)) > 0.99999
    steps = running.steps(embedder=True)
    assert any(line["card"]["share"] == FLOOR for line in steps)
    whole = {row_id: row for line in steps for row_id, row in line["rows"].items()}
    assert sorted(row[2] for row in whole.values()) == sorted(lengths), "an input was cut"
    # Steps with nothing in them are not recorded; those that are cannot be more than the inputs, nor the bound.
    assert len(steps) <= min(len(lengths), most_steps(lengths, BUDGET, FLOOR))


@pytest.mark.parametrize(("rule", "share"), [("static", 0.5), ("whole", 1.0)])
def test_without_the_page_shares_are_fixed_and_answers_the_same(
    running: Running, tiny: TinyModel, rng: random.Random, rule: str, share: float
) -> None:
    running.run(running.set(card_share=rule))
    prompt = token_ids(rng, 200)

    async def at_once() -> list[int]:
        tokens, _ = await asyncio.gather(
            running.generate(prompt, f"g-{rule}", 16), running.embed(*inputs_of(rng, *[90] * 20))
        )
        return tokens

    assert running.run(at_once()) == tiny.greedy(prompt, 16)
    for embedder in (False, True):
        assert {line["card"]["share"] for line in running.steps(embedder)} == {share}


def test_reports_are_the_sum_of_both_and_ids_are_told(running: Running, rng: random.Random) -> None:
    ids: list[str] = []

    async def both_busy() -> dict[str, Any]:
        note_request.set(ids.append)
        work = [
            asyncio.ensure_future(running.generate(token_ids(rng, 40), "noted", 300)),
            asyncio.ensure_future(running.embed(*inputs_of(rng, *[100] * 80))),
        ]
        report = await running.engines.channel.watch(0.0)
        while {lane for lane, *_ in report["requests"].values()} != {0, 1}:
            report = await running.engines.channel.watch(0.0)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        while (await running.engines.channel.watch(0.0))["requests"]:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return report

    report = running.run(both_busy())
    assert set(report["requests"]) <= set(ids)
    assert report["prompt_left"]["embed"] > 0
    total = running.run(running.engines.channel.remaining())["totals"]
    parts = [
        running.run(e.channel.remaining())["totals"] for e in (running.engines.generator, running.engines.embedder)
    ]
    assert total["steps"] == parts[0]["steps"] + parts[1]["steps"]
    assert (total["decode_tokens"], total["embed_tokens"]) == (parts[0]["decode_tokens"], parts[1]["embed_tokens"])


def test_what_such_engines_cannot_follow_is_refused_and_changes_nothing(running: Running) -> None:
    for wanted, text in (
        ({"policy": "orthrus"}, "arrival order"),
        ({"card_share": "mine"}, "remaining, static, whole"),
        ({"card_share": None}, "card_share"),
        ({"step_tokens": BUDGET + 1}, str(BUDGET)),
    ):
        answer = running.run(running.engines.channel.set(wanted))
        assert text in answer["refused"]
        assert answer["applied"]["card_share"] == "remaining"


def test_vllms_metrics_of_both_are_published(running: Running) -> None:
    from prometheus_client import generate_latest

    for text, name in ((generate_latest(), "orthrus"), (running.models.more_metrics(), "orthrus-embed")):
        lines = [line for line in text.decode().splitlines() if line.startswith("vllm:prompt_tokens_total")]
        assert len(lines) == 1
        assert f'model_name="{name}"' in lines[0]


def test_no_page_is_left_in_memory(running: Running) -> None:
    assert not list(Path(FOLDER).glob(f"{PREFIX}{os.getpid()}-*"))


def test_the_death_of_either_core_is_an_error_of_both(running: Running) -> None:
    """Last of the module: it takes the engines down."""
    process = running.engines.embedder.engine_core.resources.engine_manager.processes[0]  # pyright: ignore
    os.kill(process.pid, signal.SIGKILL)

    async def noticed() -> None:
        while not running.engines.errored:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    running.run(noticed())
    assert not running.engines.generator.errored
    with pytest.raises(Exception, match="EngineCore"):
        running.run(running.engines.check_health())


def test_an_embedder_whose_cut_lengths_do_not_fit_stops_the_start(
    tiny: TinyModel, embedder: TinyEmbedder, tmp_path: Path
) -> None:
    args = separate_args(tiny, embedder, tmp_path)
    wrong = args.model_copy(update={"embedder": args.embedder.model_copy(update={"dimensions": (65,)})})  # pyright: ignore
    with pytest.raises(ConfigError, match="65 is more than its 64"):
        asyncio.run(start_separate(wrong))
