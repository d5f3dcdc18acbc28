"""What may happen to a request beside mixed steps: abort, preemption, prefix-cache hits, an id used again, async scheduling."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from orthrus_serve.errors import AdapterError
from tests.engine.harness import POOLINGS, Engine, TinyModel, token_ids

MakeEngine = Callable[..., Engine]


def test_an_embedding_aborted_mid_chunk_leaves_nothing_and_disturbs_nobody(
    make_engine: MakeEngine, rng: random.Random
) -> None:
    engine = make_engine(budget=32)
    doomed, kept, prompt = token_ids(rng, 400), token_ids(rng, 300), token_ids(rng, 30)
    engine.embed("doomed", doomed, "mean")
    engine.embed("kept", kept, "mean")
    engine.generate("g", prompt, 10)
    for _ in range(3):
        engine.step()
    assert len(engine.runner.pooler_progress) >= 1
    engine.llm.abort_request(["doomed"])
    engine.run()
    assert set(engine.results) == {"kept", "g"}
    assert engine.cosine("kept", kept, "mean") > 0.99999
    assert not any(engine.leaks().values())

    engine.embed("doomed", kept[:70], "mean")  # the id again, with another text: nothing of the first may remain
    engine.run()
    assert engine.cosine("doomed", kept[:70], "mean") > 0.99999


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_preempted_requests_come_out_right(make_engine: MakeEngine, rng: random.Random, async_scheduling: bool) -> None:
    engine = make_engine(
        num_gpu_blocks_override=18, max_num_seqs=16, max_model_len=512, async_scheduling=async_scheduling
    )
    prompts = [token_ids(rng, 40) for _ in range(6)]
    inputs = [token_ids(rng, n) for n in (200, 180, 220, 150, 260, 90)]
    for i, prompt in enumerate(prompts):
        engine.generate(f"g{i}", prompt, 120)
    for i, tokens in enumerate(inputs):
        engine.embed(f"e{i}", tokens, POOLINGS[i % 4])
    for step in range(3000):
        if not engine.llm.has_unfinished_requests():
            break
        if step % 9 == 8:
            engine.llm.reset_prefix_cache(reset_running_requests=True)  # preempts everything that runs
        engine.step()
    engine.run()
    assert engine.totals()["preemptions"] > 20
    for i, tokens in enumerate(inputs):
        assert engine.cosine(f"e{i}", tokens, POOLINGS[i % 4]) > 0.99999
    for i, prompt in enumerate(prompts):
        alone = f"alone{i}"
        engine.generate(alone, prompt, 120)
        engine.run()
        assert engine.tokens(f"g{i}") == engine.tokens(alone)
    assert not any(engine.leaks().values())


def test_prefix_cache_hits_serve_last_and_are_not_read_by_other_poolings(
    make_engine: MakeEngine, rng: random.Random
) -> None:
    engine = make_engine(enable_prefix_caching=True)
    stem = token_ids(rng, 256)
    engine.generate("warm", [*stem, 7, 8, 9], 4)  # the base model caches the same tokens: not the adapter's to use
    engine.run()
    for pooling in POOLINGS:
        for i, tail in enumerate((50, 70)):
            tokens = [*stem, *token_ids(rng, tail)]
            engine.embed(f"{pooling}{i}", tokens, pooling)
            engine.run()
            assert engine.cosine(f"{pooling}{i}", tokens, pooling) > 0.99999
    assert engine.results["last1"].num_cached_tokens >= 224
    assert engine.results["mean1"].num_cached_tokens == 0
    engine.generate("again", [*stem, 7, 8, 9], 4)
    engine.run()
    assert engine.tokens("again") == engine.tokens("warm")


def test_async_scheduling_keeps_tokens_and_vectors_right(make_engine: MakeEngine, rng: random.Random) -> None:
    engine = make_engine(async_scheduling=True, budget=48)
    assert engine.llm.vllm_config.scheduler_config.async_scheduling
    jobs = [(token_ids(rng, rng.randrange(2, 120)), token_ids(rng, rng.randrange(2, 260))) for _ in range(10)]
    for i, (prompt, tokens) in enumerate(jobs):
        engine.generate(f"g{i}", prompt, 12)
        engine.embed(f"e{i}", tokens, POOLINGS[i % 4])
    engine.run()
    for i, (prompt, tokens) in enumerate(jobs):
        assert engine.cosine(f"e{i}", tokens, POOLINGS[i % 4]) > 0.99999
        engine.generate(f"alone{i}", prompt, 12)
        engine.run()
        assert engine.tokens(f"g{i}") == engine.tokens(f"alone{i}")
    assert not any(engine.leaks().values())


def test_switching_the_policy_mid_flight_loses_nothing(make_engine: MakeEngine, rng: random.Random) -> None:
    engine = make_engine(budget=40)
    inputs = [token_ids(rng, rng.randrange(20, 200)) for _ in range(16)]
    for i, tokens in enumerate(inputs):
        engine.embed(f"e{i}", tokens, POOLINGS[i % 4])
        engine.generate(f"g{i}", tokens[:30], 8)
    for policy in ("hetero_fcfs", "unified_homo", "orthrus"):
        for _ in range(6):
            engine.step()
        answer = engine.scheduler.answer("set", {"policy": policy})
        assert answer["refused"] is None
        engine.step()
        assert engine.steps()[-1]["policy"] == policy
    engine.run()
    assert len(engine.results) == 32
    assert all(engine.cosine(f"e{i}", tokens, POOLINGS[i % 4]) > 0.99999 for i, tokens in enumerate(inputs))
    assert not any(engine.leaks().values())


@pytest.mark.parametrize(
    "wanted",
    [
        {"policy": "fastest"},
        {"step_tokens": 0},
        {"step_tokens": 65},
        {"min_share": 0.6},
        {"min_share": True},
        {"embed_weight": 0},
        {"embed_weight": float("inf")},
        {"embed_weight": True},
        {"speed": 1},
    ],
)
def test_a_refused_setting_changes_nothing(shared_engine: Engine, wanted: dict[str, object]) -> None:
    before = shared_engine.scheduler.answer("set", {})["applied"]
    answer = shared_engine.scheduler.answer("set", {"policy": "hetero_fcfs", **wanted})
    assert answer["refused"]
    assert answer["applied"] == before


@pytest.fixture(scope="module")
def shared_engine(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory):
    engine = Engine(tiny, tmp_path_factory.mktemp("shared") / "steps.jsonl")
    yield engine
    engine.close()


def test_base_rows_are_untouched_by_adapter_rows_in_the_same_step(shared_engine: Engine, rng: random.Random) -> None:
    engine, prompt = shared_engine, token_ids(rng, 40)
    engine.generate("alone", prompt, 16)
    engine.run()
    engine.generate("beside", prompt, 16)
    engine.embed("adapter", prompt, "mean")
    engine.run()
    assert engine.tokens("beside") == engine.tokens("alone")
    assert engine.cosine("adapter", prompt, "mean") > 0.99999


@pytest.mark.parametrize("rename", [("base_model.model.model.", "base_model.model."), ("layers.0", "layers.7")])
def test_an_adapter_that_matches_no_module_is_refused_and_hurts_nobody(
    shared_engine: Engine, tiny: TinyModel, tmp_path: Path, rng: random.Random, rename: tuple[str, str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny.adapter, broken)
    weights = safetensors.torch.load_file(tiny.adapter / "adapter_model.safetensors")
    renamed = {name.replace(*rename): tensor for name, tensor in weights.items()}
    safetensors.torch.save_file(renamed, broken / "adapter_model.safetensors")
    from vllm.lora.request import LoRARequest

    with pytest.raises(AdapterError, match="match no module"):
        shared_engine.runner.add_lora(LoRARequest("broken", 9, str(broken)))
    shared_engine.runner.remove_lora(9)
    tokens = token_ids(rng, 33)
    shared_engine.embed("after", tokens, "last")
    shared_engine.run()
    assert shared_engine.cosine("after", tokens, "last") > 0.99999


def test_a_gap_in_the_hidden_states_gives_no_vector() -> None:
    from orthrus_serve.engine.pooling import ChunkRows, ProgressivePooler
    from orthrus_serve.engine.settings import PoolingSpec

    pooler = ProgressivePooler(4)
    pooler.add("r", PoolingSpec("mean"), 10)
    assert pooler.step(torch.ones(4, 8), [ChunkRows("r", 0, 4, 0)]) is None
    finished = pooler.step(torch.ones(4, 8), [ChunkRows("r", 0, 4, 6)])
    assert finished is not None
    assert finished.on_host(finished.vectors)["r"].numel() == 0
