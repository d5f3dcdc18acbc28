"""What the model and its adapters may be, beside mixed steps: sliding windows, several adapters, more of them than slots."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM
from vllm import PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest

from tests.engine.harness import HIDDEN_SIZE, POOLINGS, VOCAB_SIZE, Engine, TinyModel, add_tiny_adapter, token_ids

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def adapters(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> list[TinyModel]:
    """The tiny model under three adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    model = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)
    more = [TinyModel(tiny.model, add_tiny_adapter(model, folder / f"a{seed}", seed)) for seed in (11, 12)]
    return [tiny, *more]


def lora(number: int, tiny: TinyModel) -> LoRARequest:
    return LoRARequest(f"adapter{number}", number + 1, str(tiny.adapter))


@pytest.mark.parametrize(
    ("policy", "max_loras"), [("orthrus", 1), ("orthrus", 2), ("hetero_fcfs", 1), ("unified_homo", 2)]
)
def test_more_adapters_than_slots_take_turns_and_stay_right(
    make_engine: MakeEngine, adapters: list[TinyModel], rng: random.Random, policy: str, max_loras: int
) -> None:
    """Adapters are evicted and loaded again between steps; generations under an adapter and without one run beside."""
    engine = make_engine(policy=policy, budget=48, max_loras=max_loras, max_cpu_loras=2)
    inputs = [token_ids(rng, rng.randrange(2, 150)) for _ in range(15)]
    prompt = token_ids(rng, 60)
    for i, tokens in enumerate(inputs):
        params = PoolingParams(task="embed", extra_kwargs={"pooling": POOLINGS[i % 4]})
        number = i % 3
        request = lora(number, adapters[number])
        engine.llm.add_request(f"e{i}", {"prompt_token_ids": tokens}, params, lora_request=request)
    engine.generate("base", prompt, 12)
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    for number, tiny in enumerate(adapters):
        request = lora(number, tiny)
        engine.llm.add_request(f"g{number}", {"prompt_token_ids": prompt}, sampling, lora_request=request)
    engine.run()
    for i, tokens in enumerate(inputs):
        reference = adapters[i % 3].vector(tokens, POOLINGS[i % 4])
        assert float(engine.vector(f"e{i}") @ reference) > 0.99999, i
    assert engine.tokens("base") == adapters[0].greedy(prompt, 12)
    for number, tiny in enumerate(adapters):
        assert engine.tokens(f"g{number}") == tiny.greedy(prompt, 12, adapted=True)
    assert not any(engine.leaks().values())


@pytest.fixture(scope="module")
def windowed(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A two-layer Mistral whose tokens see the last 48 tokens only, with an adapter."""
    folder = tmp_path_factory.mktemp("windowed")
    torch.manual_seed(2)
    config = MistralConfig(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, sliding_window=48,
    )  # fmt: skip
    model = MistralForCausalLM(config).to(torch.float32)
    model.save_pretrained(folder / "model")
    return TinyModel(folder / "model", add_tiny_adapter(model, folder / "adapter", 3))


def test_a_sliding_window_keeps_tokens_and_vectors_right(
    windowed: TinyModel, tmp_path: Path, rng: random.Random
) -> None:
    engine = Engine(windowed, tmp_path / "steps.jsonl", budget=64, enable_prefix_caching=True)
    stem = token_ids(rng, 130)
    inputs = [[*stem, *token_ids(rng, n)] for n in (1, 30, 64, 200)]
    prompts = [token_ids(rng, n) for n in (10, 100, 300)]
    for turn in range(2):  # the second finds the first's blocks
        for i, prompt in enumerate(prompts):
            engine.generate(f"g{turn}{i}", prompt, 60)
        for i, tokens in enumerate(inputs):
            for pooling in POOLINGS:
                engine.embed(f"{pooling}{turn}{i}", tokens, pooling)
        engine.run()
    engine.close()
    for turn in range(2):
        assert [engine.tokens(f"g{turn}{i}") for i in range(3)] == [windowed.greedy(prompt, 60) for prompt in prompts]
        for i, tokens in enumerate(inputs):
            for pooling in POOLINGS:
                assert engine.cosine(f"{pooling}{turn}{i}", tokens, pooling) > 0.99999, (pooling, turn, i)


def test_the_window_of_that_model_matters(windowed: TinyModel, rng: random.Random) -> None:
    tail = token_ids(rng, 100)
    one, other = [*token_ids(rng, 200), *tail], [*token_ids(rng, 200), *tail]
    assert (
        float(windowed.vector(one, "last") @ windowed.vector(other, "last")) > 0.9999
    )  # two layers see 96 tokens back
    assert float(windowed.vector(one, "mean") @ windowed.vector(other, "mean")) < 0.999


@pytest.mark.parametrize(
    ("quantised", "least_cosine"),
    [({"quantization": "int8_per_channel_weight_only", "dtype": "bfloat16"}, 0.999), ({"kv_cache_dtype": "fp8"}, 0.98)],
    ids=["int8 weights", "fp8 KV"],
)
def test_a_quantised_engine_gives_its_own_answers_beside_others(
    make_engine: MakeEngine, tiny: TinyModel, rng: random.Random, quantised: dict[str, str], least_cosine: float
) -> None:
    """How far they are from the whole-precision ones is vLLM's: here is only looked at what mixing adds."""
    engine = make_engine(budget=128, **quantised)
    prompt, inputs = token_ids(rng, 60), [token_ids(rng, n) for n in (30, 100, 110, 64)]
    engine.generate("alone", prompt, 1, logprobs=1)
    engine.run()
    for i, tokens in enumerate(inputs):
        engine.embed(f"alone{i}", tokens, POOLINGS[i])
        engine.run()
        engine.embed(f"beside{i}", tokens, POOLINGS[i])
    engine.generate("beside", prompt, 1, logprobs=1)
    engine.run()
    alone, beside = (engine.results[name].outputs[0].logprobs[0] for name in ("alone", "beside"))
    assert next(iter(beside.values())).logprob == pytest.approx(next(iter(alone.values())).logprob, abs=0.05)
    for i, tokens in enumerate(inputs):
        assert float(engine.vector(f"beside{i}") @ engine.vector(f"alone{i}")) > least_cosine
        assert engine.cosine(f"beside{i}", tokens, POOLINGS[i]) > least_cosine
    assert not any(engine.leaks().values())
