"""Two adapters, and one place (`max_loras=1`): who cannot be admitted holds no budget, and nobody waits for ever."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from tests.engine.harness import Engine, TinyModel, add_tiny_adapter, token_ids

BUDGET = 64


@pytest.fixture(scope="module")
def second(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another adapter on the same model."""
    model = LlamaForCausalLM.from_pretrained(tiny.model)
    return add_tiny_adapter(model, tmp_path_factory.mktemp("second") / "second", 2)


def fill(step: dict) -> int:
    return step["decode"] + step["prefill"] + step["embed"]


@pytest.mark.parametrize("policy", ["orthrus", "hetero_fcfs"])
def test_generations_without_a_place_for_their_adapter_leave_their_budget_to_embeddings(
    make_engine: Callable[..., Engine], rng: random.Random, second: Path, policy: str
) -> None:
    engine = make_engine(policy=policy, budget=BUDGET, max_num_seqs=8)
    inputs = [token_ids(rng, 300) for _ in range(3)]
    engine.embed("e0", inputs[0], "mean")
    engine.step()
    for i in range(4):
        engine.generate(f"g{i}", token_ids(rng, 100), 4, adapter=second)
    engine.embed("e1", inputs[1], "mean")
    engine.embed("e2", inputs[2], "mean")
    engine.run()
    steps = engine.steps()
    assert [fill(step) for step in steps[:14]] == [BUDGET] * 14  # 900 tokens: 14 full steps and 4 tokens
    assert not any(step["prefill"] for step in steps[:14])
    assert sum(step["wasted"] for step in steps[:14]) == 0
    assert all(engine.cosine(f"e{i}", tokens, "mean") > 0.99999 for i, tokens in enumerate(inputs))
    assert not any(engine.leaks().values())


@pytest.mark.parametrize("policy", ["orthrus", "hetero_fcfs"])
def test_embeddings_without_a_place_for_their_adapter_leave_their_budget_to_generations(
    make_engine: Callable[..., Engine], rng: random.Random, second: Path, policy: str
) -> None:
    engine = make_engine(policy=policy, budget=BUDGET, max_num_seqs=8)
    prompt = token_ids(rng, 20)
    engine.generate("holder", prompt, 30, adapter=second)
    engine.step()
    tokens = token_ids(rng, 200)
    engine.embed("e", tokens, "mean")
    prompts = [token_ids(rng, 300) for _ in range(2)]
    for i, base in enumerate(prompts):
        engine.generate(f"g{i}", base, 2)
    engine.run()
    steps = engine.steps()
    assert [fill(step) for step in steps[1:10]] == [BUDGET] * 9
    assert all(step["decode"] and not step["embed"] for step in steps[1:10])
    assert engine.finish_order[-1] == "e"
    assert engine.cosine("e", tokens, "mean") > 0.99999
    assert engine.tokens("holder") == TinyModel(engine.tiny.model, second).greedy(prompt, 30, adapted=True)
    assert engine.tokens("g0") == engine.tiny.greedy(prompts[0], 2)


def test_an_endless_stream_with_another_adapter_does_not_starve_an_embedding(
    make_engine: Callable[..., Engine], rng: random.Random, second: Path
) -> None:
    engine = make_engine(budget=BUDGET, max_num_seqs=4, live={"max_wait_steps": 10})
    tokens = token_ids(rng, 40)
    started = 0
    for step in range(120):
        if step % 4 == 0:  # two at least are always running
            engine.generate(f"g{started}", token_ids(rng, 10), 12, adapter=second)
            started += 1
        if step == 8:
            engine.embed("e", tokens, "mean")
        engine.step()
        if "e" in engine.results:
            break
    assert step <= 8 + 10 + 12 + 3  # it waits, is overdue, and then the running ones end
    assert engine.cosine("e", tokens, "mean") > 0.99999
    engine.run()
    assert len(engine.results) == started + 1
    assert not any(engine.leaks().values())


def test_a_request_that_is_skipped_keeps_its_age(
    make_engine: Callable[..., Engine], rng: random.Random, second: Path
) -> None:
    engine = make_engine(budget=BUDGET, live={"max_wait_steps": 5, "policy": "hetero_fcfs"})
    engine.generate("holder", token_ids(rng, 10), 40, adapter=second)
    engine.embed("e", token_ids(rng, 10), "mean")
    for _ in range(8):
        engine.step()
    assert engine.scheduler.waiting.ages(5).overdue
    engine.run()
    assert set(engine.results) == {"holder", "e"}


@pytest.mark.parametrize("policy", ["orthrus", "hetero_fcfs"])
def test_leaving_alternating_steps_with_more_adapters_running_than_a_step_holds_loses_nothing(
    make_engine: Callable[..., Engine], rng: random.Random, second: Path, policy: str
) -> None:
    """Alternating steps need one place per kind, a mixed step one per adapter; stock vLLM asserts that there are enough."""
    engine = make_engine(policy="unified_homo", budget=BUDGET, max_num_seqs=8)
    tokens, prompt = token_ids(rng, 400), token_ids(rng, 20)
    engine.generate("g", prompt, 30, adapter=second)
    engine.embed("e", tokens, "mean")
    for _ in range(4):
        engine.step()
    assert {len(used - {0}) for used in engine.scheduler._used} == {1}
    engine.scheduler.answer("set", {"policy": policy})
    late = token_ids(rng, 30)
    engine.embed("late", late, "mean")
    engine.run()
    assert engine.cosine("e", tokens, "mean") > 0.99999
    assert engine.cosine("late", late, "mean") > 0.99999
    assert engine.tokens("g") == TinyModel(engine.tiny.model, second).greedy(prompt, 30, adapted=True)
    assert not any(engine.leaks().values())


def test_a_running_request_that_got_no_token_keeps_its_place(
    make_engine: Callable[..., Engine], rng: random.Random, second: Path
) -> None:
    """A flood of prompts before it leaves it no token in a step; nobody with another adapter may start meanwhile."""
    engine = make_engine(budget=BUDGET, max_num_seqs=8, min_share=0.125)
    prompts = {name: token_ids(rng, 200) for name in ("base", "adapted")}
    engine.generate("base", prompts["base"], 2)
    engine.step()
    engine.generate("adapted", prompts["adapted"], 2, adapter=second)
    for _ in range(4):
        engine.step()
    tokens = token_ids(rng, 100)
    engine.embed("e", tokens, "mean")
    engine.run()
    assert engine.tokens("adapted") == TinyModel(engine.tiny.model, second).greedy(prompts["adapted"], 2, adapted=True)
    assert engine.cosine("e", tokens, "mean") > 0.99999
