"""Several adapters in one batch: two that embed (one through a dense head over all states), one that generates, and none."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from orthrus_serve.config.schema import AppArgs
from orthrus_serve.engine.args import engine_config
from orthrus_serve.engine.pooling_head import DenseHead, head_size
from orthrus_serve.engine.settings import HeadSettings
from orthrus_serve.errors import AdapterError, ConfigError
from tests.engine.harness import ALL_LINEAR, HIDDEN_SIZE, POOLINGS, Engine, TinyModel, token_ids

OUT = 160  # longer than the hidden size: rows of both lengths share one copy to the host


@pytest.fixture(scope="module")
def second(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Another adapter on the same model, of another rank and on fewer modules."""
    folder = tmp_path_factory.mktemp("second") / "adapter"
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=16, bias="none", target_modules=ALL_LINEAR[:4])
    adapted = get_peft_model(LlamaForCausalLM.from_pretrained(tiny.model, dtype=torch.float32), config)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.15)
    adapted.save_pretrained(folder)
    return TinyModel(tiny.model, folder)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(3)
    file = tmp_path_factory.mktemp("head") / "head.safetensors"
    weight = torch.randn(OUT, HIDDEN_SIZE, generator=generator) / 8
    safetensors.torch.save_file({"weight": weight, "bias": torch.randn(OUT, generator=generator)}, file)
    return file


@torch.no_grad()
def through_head(tiny: TinyModel, head: Path, tokens: list[int], reduction: str) -> torch.Tensor:
    """The reference: Transformers and peft, then the layer written out."""
    model = PeftModel.from_pretrained(
        LlamaForCausalLM.from_pretrained(tiny.model, dtype=torch.float32), tiny.adapter
    ).eval()
    states = model.base_model.model.model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    layer = safetensors.torch.load_file(head)
    rows = torch.tanh(states @ layer["weight"].T + layer["bias"])
    vector = rows.mean(0) if reduction == "mean" else rows.max(0).values
    return torch.nn.functional.normalize(vector, dim=0)


@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_a_dense_head_over_all_states_matches_the_reference_in_chunks(
    make_engine: Callable[..., Engine], tiny: TinyModel, head: Path, rng: random.Random, reduction: str
) -> None:
    spec = {"pooling": "all", "head": {"path": str(head), "activation": "tanh", "reduction": reduction}}
    engine = make_engine(
        budget=32, num_gpu_blocks_override=20, max_num_seqs=8, adapters={"orthrus-embed": spec}, max_model_len=512
    )
    inputs = [token_ids(rng, n) for n in (3, 70, 150, 220)]
    for i, tokens in enumerate(inputs):
        engine.embed(f"all{i}", tokens, "all")
        engine.embed(f"mean{i}", tokens, "mean")
        engine.generate(f"g{i}", tokens[:20], 20)
    for step in range(400):
        if not engine.llm.has_unfinished_requests():
            break
        if step % 12 == 11:
            engine.llm.reset_prefix_cache(reset_running_requests=True)
        engine.step()
    engine.run()
    for i, tokens in enumerate(inputs):
        vector = engine.vector(f"all{i}")
        assert vector.shape == (OUT,)
        assert float(vector @ through_head(tiny, head, tokens, reduction)) > 0.9999
        assert engine.vector(f"mean{i}").shape == (HIDDEN_SIZE,)
        assert engine.cosine(f"mean{i}", tokens, "mean") > 0.99999
    assert engine.totals()["preemptions"] > 0
    assert not any(engine.leaks().values())


def test_adapters_of_both_kinds_and_the_bare_model_share_steps(
    make_engine: Callable[..., Engine], tiny: TinyModel, second: TinyModel, rng: random.Random
) -> None:
    engine = make_engine(max_loras=2, budget=96)
    prompt = token_ids(rng, 40)
    lora = LoRARequest(second.adapter.name, 2, str(second.adapter))
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)

    def add(suffix: str) -> None:
        engine.generate(f"bare{suffix}", prompt, 12)
        engine.llm.add_request(f"adapted{suffix}", {"prompt_token_ids": prompt}, greedy, lora_request=lora)

    add("-alone")
    engine.run()
    add("")
    inputs = [token_ids(rng, n) for n in (30, 90, 140)]
    for i, tokens in enumerate(inputs):
        engine.embed(f"first{i}", tokens, POOLINGS[i])
        engine.embed(f"second{i}", tokens, POOLINGS[i], adapter=second.adapter)
    engine.run()
    assert engine.tokens("bare") == engine.tokens("bare-alone")
    assert engine.tokens("adapted") == engine.tokens("adapted-alone") != engine.tokens("bare")
    for i, tokens in enumerate(inputs):
        assert engine.cosine(f"first{i}", tokens, POOLINGS[i]) > 0.99999
        reference = second.vector(tokens, POOLINGS[i])
        assert float(torch.nn.functional.cosine_similarity(engine.vector(f"second{i}"), reference, dim=0)) > 0.99999


def test_a_head_of_another_size_is_refused(head: Path) -> None:
    assert head_size(str(head)) == OUT
    with pytest.raises(AdapterError, match=r"expected \[out, 64\]"):
        DenseHead(HeadSettings(str(head)), 64, torch.device("cpu"))


def test_heads_that_could_outgrow_their_bound_are_refused_at_start(tiny: TinyModel, head: Path) -> None:
    spec = {"path": str(tiny.adapter), "pooling": "all", "head": {"path": str(head), "max_state_bytes": 2**20}}
    args = AppArgs.model_validate(
        {
            "topology": "orthrus", "model": {"path": str(tiny.model)}, "adapters": {"e": spec},
            "vllm": {"dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 512},
        }
    )  # fmt: skip
    with pytest.raises(ConfigError, match="max_state_bytes"):
        engine_config(args)
