"""Engines of the GPU suite: the harness of the engine suite on CUDA, and models at true size with random weights."""

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tests.engine.harness import ALL_LINEAR, Engine, TinyModel

SHAPES = Path(__file__).parent / "shapes"
# Graphs must cover the mixed step: beyond the largest captured size a step is launch-bound.
GRAPH_SIZES = [1, 2, 4, 8, *range(16, 257, 16), *range(288, 513, 32), *range(576, 1025, 64), *range(1152, 2049, 128)]


def engine_on_device(model: TinyModel, step_log: Path, *, on_cpu: bool, **overrides: Any) -> Engine:
    """A mixed engine as a replica runs it: async scheduling, V2 runner and CUDA graphs on CUDA; as the CPU suite's on CPU."""
    if on_cpu:
        for key in ("gpu_memory_utilization", "compilation_config", "attention_backend"):
            overrides.pop(key, None)
        return Engine(model, step_log, **overrides)
    options: dict[str, Any] = {
        "enforce_eager": False,
        # A stated size: memory profiling fails when another process on the card frees memory meanwhile.
        "kv_cache_memory_bytes": overrides.pop("kv_cache_memory_bytes", None) or 2 * 2**30,
        "block_size": None,
        "compilation_config": {"cudagraph_capture_sizes": GRAPH_SIZES},
    }
    mixed = overrides.get("mixed", True)
    if mixed:
        options["worker_cls"] = "orthrus_serve.engine.worker.MixedGPUWorker"
    return Engine(model, step_log, async_scheduling=mixed, **(options | overrides))


def random_model(folder: Path, shape: str, *, rank: int = 16) -> TinyModel:
    """A model folder with a true-size config (weights come from `load_format="dummy"`) and a random adapter."""
    model, adapter = folder / "model", folder / "adapter"
    shutil.copytree(SHAPES / shape, model, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = hidden // config["num_attention_heads"]
    keys = config["num_key_value_heads"] * head
    sizes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, keys), "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{key}.lora_A.weight"] = (torch.randn(rank, inputs, generator=generator) * 0.01).bfloat16()
            weights[f"{key}.lora_B.weight"] = (torch.randn(outputs, rank, generator=generator) * 0.01).bfloat16()
    adapter.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(weights, adapter / "adapter_model.safetensors", {"format": "pt"})
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 32,
        "target_modules": ALL_LINEAR,
    }
    (adapter / "adapter_config.json").write_text(
        json.dumps({**described, "bias": "none", "base_model_name_or_path": shape})
    )
    return TinyModel(model, adapter)


def copy_tokenizer(source: Path, model: Path) -> None:
    """Gives the model in folder `model` the byte-pair tokenizer in `source`, cut to the model's vocabulary.

    A token that the tokenizer knows and the model does not would pass vLLM's check and read beyond the embedding table.

    Raises:
        ValueError: a special token has a number beyond the vocabulary, as GPT-2's and Llama-3's have; cutting it would not
            keep Transformers from adding it again.
    """
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    bpe = tokenizer["model"]
    bpe["vocab"] = {token: i for token, i in bpe["vocab"].items() if i < size}
    pairs = [(merge, merge.split(" ") if isinstance(merge, str) else merge) for merge in bpe["merges"]]
    known = bpe["vocab"]
    bpe["merges"] = [merge for merge, (a, b) in pairs if a in known and b in known and a + b in known]
    beyond = [token["content"] for token in tokenizer["added_tokens"] if token["id"] >= size]
    if beyond:
        raise ValueError(f"{source}: special tokens beyond {size}: {beyond}")
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(source / "tokenizer_config.json", model)


def vocabulary_of(shape: str) -> int:
    """How many tokens the model of that shape knows."""
    return json.loads((SHAPES / shape / "config.json").read_text())["vocab_size"]


def token_ids(rng: random.Random, length: int, vocabulary: int) -> list[int]:
    """Random prompt tokens without the first, special ones."""
    return [rng.randrange(5, vocabulary) for _ in range(length)]


def say(row: dict[str, Any]) -> None:
    """Prints a row as soon as it is there, as one line of JSON."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
