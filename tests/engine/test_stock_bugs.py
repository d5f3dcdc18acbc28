"""Bugs of stock vLLM 0.32 that a mixed engine meets: ours is right, and stock is still wrong.

Each has two halves. When a test named `stock_still_…` fails, vLLM mended the bug: delete the fix that its docstring names, and
both halves. Bug 1 (base rows get an adapter on CPU) has its own-side half in `test_states.py`.
"""

import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from vllm import PoolingParams, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor

from orthrus_serve.engine.adapter_keys import prepare_adapter
from orthrus_serve.engine.vllm_fixes import FixedOutputProcessor
from tests.engine.harness import Engine, TinyModel, token_ids

MakeEngine = Callable[..., Engine]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)


def greedy(engine: Engine, prompt: list[int], adapter: Path | None = None) -> list[int]:
    """Greedy tokens, alone, of the base model or under an adapter."""
    lora = LoRARequest(f"adapter-{adapter.name}", 1 + len(engine.results), str(adapter)) if adapter else None
    request_id = f"greedy-{len(engine.results)}"
    engine.llm.add_request(request_id, {"prompt_token_ids": prompt}, GREEDY, lora_request=lora)
    engine.run()
    return engine.tokens(request_id)


# --- 1: base rows beside adapter rows -------------------------------------------------------------------------------


def test_stock_still_gives_base_rows_the_adapter_on_cpu(make_engine: MakeEngine, rng: random.Random) -> None:
    """Fixed by `cpu_lora.py`."""
    engine = make_engine(mixed=False)
    prompt = token_ids(rng, 40)
    alone = greedy(engine, prompt)
    engine.generate("beside", prompt, 16)
    greedy(engine, prompt, engine.tiny.adapter)
    assert engine.tokens("beside") != alone


# --- 2: adapters saved from a headless model ------------------------------------------------------------------------


@pytest.fixture
def headless(tiny: TinyModel, tmp_path: Path) -> Path:
    """The tiny adapter as `AutoModel` would have saved it: `base_model.model.layers.…` without the head's `model.`."""
    folder = tmp_path / "headless"
    folder.mkdir()
    weights = safetensors.torch.load_file(tiny.adapter / "adapter_model.safetensors")
    renamed = {name.replace("base_model.model.model.", "base_model.model."): w for name, w in weights.items()}
    safetensors.torch.save_file(renamed, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_bytes((tiny.adapter / "adapter_config.json").read_bytes())
    return folder


def test_an_adapter_saved_from_a_headless_model_embeds_right(
    make_engine: MakeEngine, headless: Path, tmp_path: Path, rng: random.Random
) -> None:
    engine, tokens = make_engine(), token_ids(rng, 90)
    engine.embed("e", tokens, "last", adapter=prepare_adapter(headless, tmp_path / "cache"))
    engine.run()
    assert engine.cosine("e", tokens, "last") > 0.99999


def test_stock_still_ignores_an_adapter_saved_from_a_headless_model(
    make_engine: MakeEngine, headless: Path, rng: random.Random
) -> None:
    """Fixed by `adapter_keys.py`, and refused by `lora_check.py` where no renaming helps."""
    engine, prompt = make_engine(mixed=False), token_ids(rng, 40)
    base = greedy(engine, prompt)
    assert greedy(engine, prompt, engine.tiny.adapter) != base
    assert greedy(engine, prompt, headless) == base


# --- 3: an embedding that the engine ends ---------------------------------------------------------------------------


def processor_with_an_embedding(kind: type[OutputProcessor]) -> OutputProcessor:
    processor = kind(None, log_stats=False)
    request = EngineCoreRequest(
        request_id="e-internal", external_req_id="e", prompt_token_ids=[5, 6], mm_features=None, sampling_params=None,
        pooling_params=PoolingParams(task="embed"), arrival_time=0.0, lora_request=None, cache_salt=None,
        data_parallel_rank=None,
    )  # fmt: skip
    processor.add_request(request, prompt=None)
    return processor


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_an_embedding_that_the_engine_ends_comes_out_empty(reason: FinishReason) -> None:
    processor = processor_with_an_embedding(FixedOutputProcessor)
    outputs: list[Any] = [EngineCoreOutput(request_id="e-internal", new_token_ids=[], finish_reason=reason)]
    finished = processor.process_outputs(outputs).request_outputs
    assert [(output.request_id, output.finished, output.outputs.data.numel()) for output in finished] == [
        ("e", True, 0)
    ]


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_stock_still_fails_when_the_engine_ends_an_embedding(reason: FinishReason) -> None:
    """Fixed by `vllm_fixes.complete_aborted_poolings`. In a server the failed assertion ends the whole AsyncLLM."""
    processor = processor_with_an_embedding(OutputProcessor)
    outputs: list[Any] = [EngineCoreOutput(request_id="e-internal", new_token_ids=[], finish_reason=reason)]
    with pytest.raises(AssertionError):
        processor.process_outputs(outputs)


# --- 4: seeds and chunks on CPU -------------------------------------------------------------------------------------


def test_stock_still_fails_on_a_seeded_prompt_of_several_chunks(make_engine: MakeEngine, rng: random.Random) -> None:
    """Fixed by `vllm_fixes.unfinished_prompts_without_seeds`; `test_sampling_states.py` shows that ours is right."""
    engine = make_engine(mixed=False, enable_lora=False, budget=64)
    engine.generate("short", token_ids(rng, 40), 4, temperature=1.0, seed=7)
    engine.run()
    engine.generate("long", token_ids(rng, 100), 4, temperature=1.0, seed=7)
    with pytest.raises(RuntimeError, match="does not use offset"):
        engine.run()


# --- 7: NIXL on CPU -------------------------------------------------------------------------------------------------


def test_stock_still_ties_a_computing_thread_to_the_last_core_of_its_node() -> None:
    """Fixed by `same_cores` (`vllm_fixes.py`); its own half is in `test_kv_handover.py`."""
    source = inspect.getsource(NixlBaseConnectorWorker)
    assert "os.sched_setaffinity(0, rsv_cores_for_kv)" in source
