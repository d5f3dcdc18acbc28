"""The LoRA row tables made on the host equal the ones that stock vLLM makes on the GPU. Runs on CPU tensors; no kernel runs."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
from vllm.lora.punica_wrapper import punica_gpu

from orthrus_serve.engine.gpu_lora import HostSortedPunicaWrapperGPU, slots_of

MAX_LORAS, MAX_TOKENS, VOCAB_SIZE = 3, 256, 1000
TABLES = (
    "token_lora_mapping", "token_indices_sorted_by_lora_ids", "active_lora_ids", "num_tokens_per_lora",
    "lora_token_start_loc", "no_lora_flag_cpu", "num_active_loras_cpu",
)  # fmt: skip
INDICES = ("token_lora_indices", "sampler_indices", "sampler_indices_padded")


@pytest.fixture
def wrappers(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Ours and stock's, on the CPU."""
    # Without Triton the module leaves the name out; the class itself is plain torch.
    monkeypatch.setattr(punica_gpu, "LoRAKernelMeta", LoRAKernelMeta, raising=False)
    return make(HostSortedPunicaWrapperGPU), make(punica_gpu.PunicaWrapperGPU)


def make(wrapper: Any, *, specialize: bool = True) -> Any:
    config = SimpleNamespace(max_loras=MAX_LORAS, specialize_active_lora=specialize)
    made = wrapper(MAX_TOKENS, 16, "cpu", lora_config=config)
    for meta in (made.token_mapping_meta, made.prompt_mapping_meta):
        meta.token_lora_mapping.zero_()
        meta.token_indices_sorted_by_lora_ids.zero_()
    return made


def update(wrapper: Any, rows: list[int], lengths: list[int], slots: list[int | None]) -> None:
    tokens = tuple(np.repeat(np.array(rows, dtype=np.int32), lengths))  # what the V2 runner hands over
    wrapper.update_metadata(
        LoRAMapping(tokens, tuple(np.array(rows, dtype=np.int32))), slots, MAX_LORAS + 1, VOCAB_SIZE
    )


def test_tables_equal_stock_for_any_mix(wrappers: tuple[Any, Any]) -> None:
    ours, stock = wrappers
    rng = random.Random(0)
    for _ in range(300):  # one after the other, so that what a step leaves behind would show in the next
        slots: list[int | None] = [*rng.sample([11, 7, 42, 5], MAX_LORAS - 1), None]
        rng.shuffle(slots)
        known = [0, *(s for s in slots if s is not None)]
        choice = rng.choice((known, [0], known[1:2]))
        rows = [rng.choice(choice) for _ in range(rng.randint(1, 16))]
        lengths = [rng.randint(1, 16) for _ in rows]
        for wrapper in wrappers:
            update(wrapper, rows, lengths, slots)
        for name in INDICES:
            assert torch.equal(getattr(ours, name), getattr(stock, name)), name
        count = sum(lengths)
        assert torch.equal(ours._embeddings_indices[:count], stock._embeddings_indices[:count])
        for meta in ("token_mapping_meta", "prompt_mapping_meta"):
            for name in TABLES:
                assert torch.equal(getattr(getattr(ours, meta), name), getattr(getattr(stock, meta), name)), (
                    meta,
                    name,
                )


def test_an_adapter_without_a_slot_is_an_error() -> None:
    with pytest.raises(KeyError):
        slots_of([1, 0, 9], {1: 0})
