"""Real forwards: steps mix kinds, tokens equal stock vLLM, vectors equal Transformers with peft."""

import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from tests.engine.harness import POOLINGS, Engine, token_ids

WHOLE = 2048
GENERATE_LENGTHS = (5, 40, 100, 17, 200, 64)
EMBED_LENGTHS = (1, 30, 64, 65, 150, 333, 500, 20)

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [token_ids(rng, n) for n in GENERATE_LENGTHS]


@pytest.fixture(scope="module")
def inputs() -> list[list[int]]:
    rng = random.Random(1)
    return [token_ids(rng, n) for n in EMBED_LENGTHS]


@pytest.fixture(scope="module")
def stock_tokens(tiny, tmp_path_factory, prompts) -> list[list[int]]:
    """Greedy tokens of stock vLLM: stock scheduler, worker and runner, no adapter, one prompt after the other."""
    engine = Engine(tiny, tmp_path_factory.mktemp("stock") / "none", mixed=False, enable_lora=False, budget=WHOLE)
    for i, prompt in enumerate(prompts):
        engine.generate(f"g{i}", prompt)
        engine.run()
    tokens = [engine.tokens(f"g{i}") for i in range(len(prompts))]
    engine.close()
    return tokens


@pytest.fixture(scope="module")
def shared(tiny, tmp_path_factory, stock_tokens) -> Iterator[Engine]:
    # After stock's: an engine that is shut down takes the process's communication groups with it.
    engine = Engine(tiny, tmp_path_factory.mktemp("mixed") / "steps.jsonl", budget=WHOLE)
    yield engine
    engine.close()


@pytest.fixture
def make_engine(shared: Engine) -> MakeEngine:
    """The shared engine as if it were new, with these live settings."""

    def make(*, policy: str = "orthrus", budget: int = 64, min_share: float = 0.125) -> Engine:
        shared.begin_anew(policy=policy, step_tokens=budget, min_share=min_share)
        return shared

    return make


@pytest.mark.parametrize("policy", ["orthrus", "hetero_fcfs", "unified_homo"])
@pytest.mark.parametrize("budget", [16, 32, 64, WHOLE])
def test_mixed_steps_keep_tokens_and_vectors_right(
    make_engine: MakeEngine, prompts, inputs, stock_tokens, budget: int, policy: str
) -> None:
    engine = make_engine(budget=budget, policy=policy)
    for i, prompt in enumerate(prompts):
        engine.generate(f"g{i}", prompt)
    for i, tokens in enumerate(inputs):
        for pooling in POOLINGS:
            engine.embed(f"e{i}-{pooling}", tokens, pooling)
    engine.run()

    assert [engine.tokens(f"g{i}") for i in range(len(prompts))] == stock_tokens
    for i, tokens in enumerate(inputs):
        for pooling in POOLINGS:
            assert engine.cosine(f"e{i}-{pooling}", tokens, pooling) > 0.99999
    assert max(step["decode"] + step["prefill"] + step["embed"] for step in engine.steps()) <= budget
    assert not any(engine.leaks().values())


def test_generation_without_embeddings_beside_it_equals_stock(make_engine: MakeEngine, prompts, stock_tokens) -> None:
    engine = make_engine()
    for i, prompt in enumerate(prompts):
        engine.generate(f"g{i}", prompt)
    engine.run()
    assert [engine.tokens(f"g{i}") for i in range(len(prompts))] == stock_tokens


@pytest.mark.parametrize("policy", ["orthrus", "hetero_fcfs"])
def test_steps_hold_both_kinds(make_engine: MakeEngine, prompts, inputs, policy: str) -> None:
    engine = make_engine(policy=policy)
    for i, (prompt, tokens) in enumerate(zip(prompts, inputs, strict=False)):
        engine.generate(f"g{i}", prompt)
        engine.embed(f"e{i}", tokens, "mean")
    engine.run()
    mixed = [step for step in engine.steps() if step["embed"] and step["decode"] + step["prefill"]]
    assert len(mixed) >= 5
    assert any(step["embed"] and step["decode"] for step in mixed)
    assert engine.totals()["mixed_steps"] == len(mixed)


def test_homogeneous_steps_never_hold_both_kinds_and_alternate(make_engine: MakeEngine, prompts, inputs) -> None:
    engine = make_engine(policy="unified_homo")
    for i, (prompt, tokens) in enumerate(zip(prompts, inputs, strict=False)):
        engine.generate(f"g{i}", prompt)
        engine.embed(f"e{i}", tokens, "mean")
    engine.run()
    kinds = ["embed" if step["embed"] else "generate" for step in engine.steps()]
    assert not any(step["embed"] and step["decode"] + step["prefill"] for step in engine.steps())
    both = kinds[: len(kinds) - 1 - kinds[::-1].index("embed")]  # until the last embedding step both kinds have work
    assert all(a != b for a, b in pairwise(both))


def test_arrival_order_gives_the_budget_to_whoever_came_first(make_engine: MakeEngine, rng) -> None:
    engine = make_engine(policy="hetero_fcfs", budget=64)
    engine.embed("e0", token_ids(rng, 300), "mean")
    engine.generate("g0", token_ids(rng, 40), 4)
    engine.run()
    assert [step["prefill"] for step in engine.steps()[:4]] == [0, 0, 0, 0]


def test_a_short_prompt_is_prefilled_in_one_step_beside_a_flood(make_engine: MakeEngine, rng) -> None:
    engine = make_engine(policy="orthrus", budget=300, min_share=0.125)
    for i in range(12):
        engine.embed(f"e{i}", token_ids(rng, 400), "mean")
    engine.step()
    engine.generate("g", token_ids(rng, 37), 2)
    engine.run()
    prefills = [step["prefill"] for step in engine.steps() if step["prefill"]]
    assert prefills == [37]


@pytest.mark.parametrize("policy", ["orthrus", "hetero_fcfs", "unified_homo"])
def test_first_in_first_out_within_a_kind(make_engine: MakeEngine, rng, policy: str) -> None:
    engine = make_engine(policy=policy, budget=48)
    for i in range(12):
        engine.embed(f"e{i}", token_ids(rng, rng.randrange(20, 150)), "mean")
        engine.generate(f"g{i}", token_ids(rng, rng.randrange(20, 150)), 3)
    engine.run()
    first_seen: dict[str, list[str]] = {"e": [], "g": []}
    for step in engine.steps():
        for request_id in step["rows"]:
            kind = first_seen[request_id[0]]
            if request_id not in kind:
                kind.append(request_id)
    assert [int(name[1:].split("-")[0]) for name in first_seen["e"]] == list(range(12))
    assert [int(name[1:].split("-")[0]) for name in first_seen["g"]] == list(range(12))


def test_dimensions_are_cut_before_normalising(make_engine: MakeEngine, tiny, rng) -> None:
    engine = make_engine()
    tokens = token_ids(rng, 90)
    engine.embed("cut", tokens, "mean", dimensions=32)
    engine.embed("whole", tokens, "mean")
    engine.embed("raw", tokens, "weighted_mean", normalize=False)
    engine.run()
    cut = engine.vector("cut")
    assert cut.shape == (32,)
    assert float(cut @ tiny.vector(tokens, "mean", dimensions=32)) > 0.99999
    assert engine.vector("whole").shape == (128,)
    assert (engine.vector("raw") - tiny.vector(tokens, "weighted_mean", normalize=False)).abs().max() < 1e-5
