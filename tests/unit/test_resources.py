"""Numbers that cannot work together are refused with the one to change."""

from typing import Any

import pytest

from orthrus_serve.config.resources import kv_bytes_per_token, resource_problems

MODEL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "dtype": "bfloat16",
    "max_position_embeddings": 1000,
}  # fmt: skip
PER_TOKEN = 2 * 2 * 2 * 16 * 2  # keys and values, layers, heads, numbers in a head, bytes


@pytest.mark.parametrize(
    "vllm",
    [
        {},
        {"max_num_batched_tokens": 18, "max_num_seqs": 16},
        {"max_num_batched_tokens": 5},
        {"enable_chunked_prefill": True},
        {"max_model_len": 1000},
        {"max_model_len": 500, "kv_cache_memory_bytes": 500 * PER_TOKEN},
        {"kv_cache_memory_bytes": 500 * PER_TOKEN, "max_model_len": 2 * 500, "kv_cache_dtype": "fp8"},
        {"kv_cache_memory_bytes": 1000, "kv_cache_dtype": "something_new"},
        {"max_model_len": "auto", "max_num_seqs": True},
    ],
)
def test_numbers_that_fit_pass(vllm: dict[str, Any]) -> None:
    assert resource_problems(vllm, MODEL) == []
    assert resource_problems({key: vllm[key] for key in vllm if key != "max_num_seqs"}, {}) == []


@pytest.mark.parametrize(
    ("vllm", "expected"),
    [
        ({"max_num_batched_tokens": 17, "max_num_seqs": 16}, "raise it to at least 18, or lower max_num_seqs to at most 15"),
        ({"enable_chunked_prefill": False}, "a.vllm.enable_chunked_prefill: must be on"),
        ({"max_model_len": 1001}, "a.vllm.max_model_len: 1001 is above the model's own 1000"),
        (
            {"max_model_len": 500, "kv_cache_memory_bytes": 500 * PER_TOKEN - 1},
            f"holds 499 tokens of this model, and one request may have 500 (max_model_len); raise it to at "
            f"least {500 * PER_TOKEN}, "
            "or lower max_model_len",
        ),
        ({"kv_cache_memory_bytes": PER_TOKEN}, "holds 1 tokens of this model, and one request may have 1000"),
        (
            {"kv_cache_memory_bytes": 499 * PER_TOKEN, "max_model_len": 500, "dtype": "float32"},
            f"raise it to at least {1000 * PER_TOKEN}",
        ),
    ],
)  # fmt: skip
def test_numbers_that_cannot_work_name_the_one_to_change(vllm: dict[str, Any], expected: str) -> None:
    (problem,) = resource_problems(vllm, MODEL, "a.vllm")
    assert expected in problem


def test_a_context_that_the_model_stretches_and_a_window_are_left_to_vllm() -> None:
    assert resource_problems({"max_model_len": 2000}, {**MODEL, "rope_scaling": {"factor": 2}}) == []
    assert resource_problems({"max_model_len": 2000}, {**MODEL, "rope_parameters": {"rope_type": "default"}})
    assert resource_problems({"kv_cache_memory_bytes": 1}, {**MODEL, "sliding_window": 10}) == []


def test_the_kv_cache_is_shared_out_among_workers() -> None:
    assert kv_bytes_per_token({}, MODEL) == PER_TOKEN
    assert kv_bytes_per_token({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, MODEL) == PER_TOKEN // 4
    assert kv_bytes_per_token({}, {}) is None
