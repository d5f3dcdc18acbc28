"""What was never shown to be right in a mixed step does not start, and says why."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from orthrus_serve.engine import args as engine_args_module
from orthrus_serve.engine.args import engine_config, refuse_untested
from orthrus_serve.errors import ConfigError
from tests.engine.harness import TinyModel
from tests.engine.test_llm import app_args


def resolved(**sections: dict[str, Any]) -> Any:
    """vLLM's resolved configuration as far as it is looked at, good but for the given changes."""
    good: dict[str, Any] = {
        "scheduler_config": {"max_num_batched_tokens": 64, "max_num_seqs": 16, "enable_chunked_prefill": True},
        "cache_config": {"kv_sharing_fast_prefill": False},
        "parallel_config": {
            "prefill_context_parallel_size": 1, "decode_context_parallel_size": 1, "data_parallel_size": 1,
            "enable_dbo": False,
        },
        "model_config": {
            "enable_sleep_mode": False, "is_encoder_decoder": False, "is_multimodal_model": False,
            "is_attention_free": False, "is_hybrid": False, "dtype": torch.float32,
        },
    }  # fmt: skip
    made = {name: SimpleNamespace(**(values | sections.get(name, {}))) for name, values in good.items()}
    return SimpleNamespace(**made, speculative_config=None, kv_transfer_config=None)


def test_the_good_configuration_of_these_tests_passes(tiny: TinyModel) -> None:
    refuse_untested(resolved())
    config = engine_config(app_args(tiny))  # and so does vLLM's own, which has all that is looked at
    assert config.scheduler_config.scheduler_cls == "orthrus_serve.engine.scheduler.MixedScheduler"


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("scheduler_config", "max_num_seqs", 63, "max_num_seqs smaller"),
        ("scheduler_config", "enable_chunked_prefill", False, "vllm.enable_chunked_prefill: must be on"),
        ("cache_config", "kv_sharing_fast_prefill", True, "vllm.kv_sharing_fast_prefill"),
        ("parallel_config", "prefill_context_parallel_size", 2, "vllm.prefill_context_parallel_size"),
        ("parallel_config", "decode_context_parallel_size", 2, "vllm.decode_context_parallel_size"),
        ("parallel_config", "data_parallel_size", 2, "vllm.data_parallel_size"),
        ("parallel_config", "enable_dbo", True, "vllm.enable_dbo"),
        ("model_config", "enable_sleep_mode", True, "vllm.enable_sleep_mode"),
        ("model_config", "is_encoder_decoder", True, "model.path: an encoder-decoder model"),
        ("model_config", "is_multimodal_model", True, "model.path: a multimodal model"),
        ("model_config", "is_attention_free", True, "model.path: a model without attention"),
        ("model_config", "is_hybrid", True, "model.path: a model that mixes attention"),
    ],
)
def test_what_was_never_tested_is_refused(section: str, key: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_untested(resolved(**{section: {key: value}}))
    assert words in str(caught.value)


@pytest.mark.parametrize("key", ["speculative_config", "kv_transfer_config"])
def test_speculation_and_kv_connectors_are_refused(key: str) -> None:
    config = resolved()
    setattr(config, key, SimpleNamespace(kv_connector="ExampleConnector"))
    with pytest.raises(ConfigError, match=f"vllm.{key}"):
        refuse_untested(config)


def test_float32_is_refused_on_cuda_where_the_lora_kernels_take_none(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_untested(resolved())
    monkeypatch.setattr(engine_args_module, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    with pytest.raises(ConfigError, match=r"vllm\.dtype: float32 does not run on CUDA"):
        refuse_untested(resolved())
    refuse_untested(resolved(model_config={"dtype": torch.bfloat16}))
