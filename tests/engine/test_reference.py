"""The reference itself: what the engine's vectors and tokens are held against must not be wrong in the same way."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from orthrus_serve.errors import AdapterError
from orthrus_serve.reference.decoder import ReferenceDecoder
from orthrus_serve.reference.pooling import pad, pool
from tests.engine.harness import POOLINGS, TinyModel, add_tiny_adapter, token_ids


def renamed(tiny: TinyModel, folder: Path, old: str, new: str) -> Path:
    """The tiny adapter with other names of its weights."""
    shutil.copytree(tiny.adapter, folder)
    weights = safetensors.torch.load_file(tiny.adapter / "adapter_model.safetensors")
    changed = {name.replace(old, new): tensor for name, tensor in weights.items()}
    safetensors.torch.save_file(changed, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_is_applied_as_peft_merges_it(tiny: TinyModel, rng: random.Random) -> None:
    ids = token_ids(rng, 30)
    base = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)
    merged: Any = PeftModel.from_pretrained(base, tiny.adapter).merge_and_unload()
    with torch.no_grad():
        states = merged.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    torch.testing.assert_close(tiny.reference.states(ids, "adapter"), states, atol=1e-5, rtol=1e-4)


def test_several_adapters_and_none_take_turns_and_none_stays_on(
    tiny: TinyModel, tmp_path: Path, rng: random.Random
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)
    with torch.no_grad():
        ids = token_ids(rng, 20)
        bare = base.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    second = add_tiny_adapter(base, tmp_path / "second", 9)
    both = ReferenceDecoder.load(tiny.model, {"a.first": tiny.adapter, "second": second})
    alone = ReferenceDecoder.load(tiny.model, {"second": second})
    for _ in range(2):
        torch.testing.assert_close(both.states(ids, None), bare, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(both.states(ids, "a.first"), tiny.reference.states(ids, "adapter"))
        torch.testing.assert_close(both.states(ids, "second"), alone.states(ids, "second"))
    assert not torch.allclose(both.states(ids, "second"), bare, atol=1e-2)


def test_an_adapter_saved_from_a_headless_model_is_the_same_adapter(
    tiny: TinyModel, tmp_path: Path, rng: random.Random
) -> None:
    headless = renamed(tiny, tmp_path / "headless", "base_model.model.model.", "base_model.model.")
    loaded = ReferenceDecoder.load(tiny.model, {"plain": tiny.adapter, "headless": headless})
    ids = token_ids(rng, 25)
    torch.testing.assert_close(loaded.states(ids, "headless"), loaded.states(ids, "plain"))


def test_an_adapter_with_a_weight_that_finds_no_place_is_refused(tiny: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="find no place in the model"):
        ReferenceDecoder.load(tiny.model, {"other": renamed(tiny, tmp_path / "other", "layers.1", "layers.7")})


def test_logits_before_given_tokens_are_those_of_one_token_after_the_other(tiny: TinyModel, rng: random.Random) -> None:
    prompt = token_ids(rng, 12)
    made = tiny.greedy(prompt, 5, adapted=True)
    logits = tiny.next_logits(prompt, made, adapted=True)
    assert logits.shape[0] == 5
    assert logits.argmax(-1).tolist() == made


@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_of_padded_rows_is_that_of_each_row_alone(pooling: Any) -> None:
    rows = [[1], [1, 2, 3], [4, 5]]
    hidden = torch.randn(3, 3, 8, generator=torch.Generator().manual_seed(4))
    _, lengths = pad(rows, 0, "cpu")
    for row, pooled in enumerate(pool(hidden, lengths, pooling)):
        states = hidden[row, : len(rows[row])]
        weights = torch.arange(1.0, len(states) + 1)[:, None]
        expected = {
            "last": states[-1],
            "cls": states[0],
            "mean": states.mean(0),
            "weighted_mean": (states * weights).sum(0) / weights.sum(),
        }[pooling]
        torch.testing.assert_close(pooled, expected)


def test_pooling_of_all_states_is_a_heads_work() -> None:
    with pytest.raises(ValueError, match="no single vector"):
        pool(torch.zeros(1, 2, 3), torch.tensor([2]), "all")
