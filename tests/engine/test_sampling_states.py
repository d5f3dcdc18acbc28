"""What a generation may ask for, beside embeddings: its tokens equal stock vLLM's, the vectors equal the reference.

Stock here is stock scheduler, worker and runner with whole prompts, one request after the other. The mixed engine cuts the
same prompts into chunks, beside a flood of embeddings of all poolings.
"""

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.byte_tokenizer import make_byte_tokenizer
from tests.engine.harness import POOLINGS, Engine, TinyModel, token_ids

POLICIES = ("orthrus", "hetero_fcfs", "unified_homo")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Tours", "Paris"]}, "year": {"type": "integer", "minimum": 100, "maximum": 999}},
    "required": ["city", "year"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "SELECT " ("a" | "b" | "c") (", " ("a" | "b" | "c")){2} " FROM t"'
TEXT = {"detokenize": True, "ignore_eos": False}

# Name → sampling parameters. Each is asked for with prompts of three lengths (one, two and four chunks of a 64-token step).
STATES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.2},
    "seed": {"temperature": 1.0, "seed": 7},
    "seed_top_p_top_k_min_p": {"temperature": 1.5, "top_p": 0.9, "top_k": 40, "min_p": 0.001, "seed": 8},
    "seed_with_penalties": {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "seed": 9},
    "n": {"n": 3, "temperature": 1.0, "seed": 10},
    "logprobs": {"logprobs": 5},
    "prompt_logprobs": {"logprobs": 2, "prompt_logprobs": 4},
    "logit_bias": {"logit_bias": {50: 4.0, 60: -100.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(40, 90))},
    "bad_words": {"bad_words": ["a", "e"], **TEXT},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": list(range(3, 400)), "ignore_eos": False},
    "stop_token_ids": {"temperature": 1.0, "seed": 11, "stop_token_ids": list(range(3, 50)), "ignore_eos": False},
    "stop_strings": {"temperature": 1.0, "seed": 12, "stop": ["a", "e", "0", "~"], "max_tokens": 200, **TEXT},
    "json_schema": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 60, **TEXT},
    "regex": {"structured_outputs": {"regex": r"[a-f]{3}-[0-9]{4}"}, "max_tokens": 20, **TEXT},
    "choice": {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}, **TEXT},
    "grammar": {"structured_outputs": {"grammar": GRAMMAR}, "max_tokens": 60, **TEXT},
    "grammar_with_seed": {"structured_outputs": {"grammar": GRAMMAR}, "temperature": 1.0, "seed": 13, **TEXT, "max_tokens": 60},
}  # fmt: skip
PROMPT_LENGTHS = (20, 90, 230)


def sampling(state: str) -> dict[str, Any]:
    """Fresh parameters: vLLM completes a request's structured output parameters in place."""
    params = dict(STATES[state])
    if "structured_outputs" in params:
        params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
    return params


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        "tokenizer": str(make_byte_tokenizer(tmp_path_factory.mktemp("bytes"))),
        "skip_tokenizer_init": False,
        "max_logprobs": 20,
    }


@pytest.fixture(scope="module")
def mixed(
    tiny: TinyModel, tokenizer: dict[str, Any], stock: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    # After `stock`: an engine that is shut down takes the process's communication groups with it.
    engine = Engine(tiny, tmp_path_factory.mktemp("mixed") / "steps.jsonl", budget=64, **tokenizer)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random("sampling states")
    return [token_ids(rng, length) for length in PROMPT_LENGTHS]


@pytest.fixture(scope="module")
def stock(
    tiny: TinyModel, tokenizer: dict[str, Any], prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Outputs of stock vLLM by "state-prompt"."""
    engine = Engine(
        tiny, tmp_path_factory.mktemp("stock") / "none", mixed=False, enable_lora=False, budget=2048, **tokenizer
    )
    for state in STATES:
        for i, prompt in enumerate(prompts):
            engine.generate(f"{state}-{i}", prompt, **sampling(state))
            engine.run()
    engine.close()
    return engine.results


def same_answer(ours: Any, theirs: Any) -> None:
    """Same tokens, texts, reasons and logprobs of all outputs."""
    assert [list(o.token_ids) for o in ours.outputs] == [list(o.token_ids) for o in theirs.outputs]
    assert [(o.text, o.finish_reason, o.stop_reason) for o in ours.outputs] == [
        (o.text, o.finish_reason, o.stop_reason) for o in theirs.outputs
    ]
    for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
        same_logprobs(mine.logprobs, other.logprobs)
    same_logprobs(ours.prompt_logprobs, theirs.prompt_logprobs)


def same_logprobs(ours: Any, theirs: Any) -> None:
    assert (ours is None) == (theirs is None)
    for mine, other in zip(ours or (), theirs or (), strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert {k: v.logprob for k, v in mine.items()} == pytest.approx(
                {k: v.logprob for k, v in other.items()}, abs=1e-4
            )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("state", STATES)
def test_a_generation_beside_embeddings_equals_stock(
    mixed: Engine, stock: dict[str, Any], prompts: list[list[int]], rng: random.Random, state: str, policy: str
) -> None:
    assert mixed.scheduler.answer("set", {"policy": policy})["refused"] is None
    inputs = [token_ids(rng, rng.randrange(2, 200)) for _ in range(8)]
    for i, tokens in enumerate(inputs):
        mixed.embed(f"e{i}", tokens, POOLINGS[i % 4])
    for i, prompt in enumerate(prompts):
        mixed.generate(f"{state}-{i}", prompt, **sampling(state))
    mixed.run()
    for i in range(len(prompts)):
        same_answer(mixed.results[f"{state}-{i}"], stock[f"{state}-{i}"])
    assert min(mixed.cosine(f"e{i}", tokens, POOLINGS[i % 4]) for i, tokens in enumerate(inputs)) > 0.99999
    assert not any(mixed.leaks().values())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_grammar_that_still_compiles_holds_nobody_up(
    mixed: Engine, stock: dict[str, Any], prompts: list[list[int]], rng: random.Random, policy: str
) -> None:
    mixed.scheduler.answer("set", {"policy": policy})
    compilers = mixed.scheduler.structured_output_manager.executor
    release = threading.Event()
    for _ in range(compilers._max_workers):
        compilers.submit(release.wait)
    mixed.generate("json_schema-1", prompts[1], **sampling("json_schema"))
    inputs = [token_ids(rng, rng.randrange(2, 200)) for _ in range(12)]
    for i, tokens in enumerate(inputs):
        mixed.embed(f"e{i}", tokens, POOLINGS[i % 4])
    mixed.generate("greedy-2", prompts[2])
    for name in ("json_schema-1", "greedy-2"):
        mixed.results.pop(name, None)
    others = {"greedy-2", *(f"e{i}" for i in range(12))}
    for _ in range(300):
        mixed.step()
        if others <= mixed.results.keys():
            break
    assert "json_schema-1" not in mixed.results
    same_answer(mixed.results["greedy-2"], stock["greedy-2"])
    release.set()
    mixed.run()
    same_answer(mixed.results["json_schema-1"], stock["json_schema-1"])
    assert min(mixed.cosine(f"e{i}", tokens, POOLINGS[i % 4]) for i, tokens in enumerate(inputs)) > 0.99999
    assert not any(mixed.leaks().values())


@pytest.fixture(scope="module")
def overlapping(
    tiny: TinyModel, tokenizer: dict[str, Any], stock: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("overlapping")
    engine = Engine(tiny, folder / "steps.jsonl", budget=64, async_scheduling=True, **tokenizer)
    yield engine
    engine.close()


@pytest.mark.parametrize("state", STATES)
def test_a_generation_beside_embeddings_equals_stock_while_steps_overlap(
    overlapping: Engine, stock: dict[str, Any], prompts: list[list[int]], rng: random.Random, state: str
) -> None:
    """As above with async scheduling, which CUDA uses."""
    assert overlapping.llm.vllm_config.scheduler_config.async_scheduling
    inputs = [token_ids(rng, rng.randrange(2, 200)) for _ in range(8)]
    for i, tokens in enumerate(inputs):
        overlapping.embed(f"e{i}", tokens, POOLINGS[i % 4])
    for i, prompt in enumerate(prompts):
        overlapping.generate(f"{state}-{i}", prompt, **sampling(state))
    overlapping.run()
    for i in range(len(prompts)):
        same_answer(overlapping.results[f"{state}-{i}"], stock[f"{state}-{i}"])
    assert min(overlapping.cosine(f"e{i}", tokens, POOLINGS[i % 4]) for i, tokens in enumerate(inputs)) > 0.99999
    assert not any(overlapping.leaks().values())
