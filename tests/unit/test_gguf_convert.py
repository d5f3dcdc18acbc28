"""GGUF to Hugging Face: the row order, the names, and the settings that get lost on the usual route."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.errors import ModelError
from orthrus_serve.model.gguf_convert import hf_config, hf_name, make_tokenizer, permute, tokenizer_config, unpermute

FIELDS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.rope.freq_base": 100000.0,
    "llama.vocab_size": 49152,
    "tokenizer.chat_template": "{{ messages }}",
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "tokenizer.ggml.unknown_token_id": 0,
}


@given(heads=st.integers(1, 9), half=st.integers(1, 8), width=st.integers(1, 5), seed=st.integers(0, 99))
def test_unpermuting_undoes_the_permutation_of_llama_cpp(heads: int, half: int, width: int, seed: int) -> None:
    weight = np.random.default_rng(seed).normal(size=(heads * half * 2, width))
    assert np.array_equal(unpermute(permute(weight, heads), heads), weight)


def test_unpermuting_moves_rotary_pairs_half_a_head_apart() -> None:
    rows = np.arange(8)[:, None]  # two heads of four rows: pairs (0, 1), (2, 3) and (4, 5), (6, 7)
    assert unpermute(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("gguf", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.29.attn_q.weight", "model.layers.29.self_attn.q_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_names_are_those_of_transformers(gguf: str, expected: str) -> None:
    assert hf_name(gguf) == expected


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.x.attn_q.weight", "rope_freqs.weight", ""])
def test_a_tensor_of_another_architecture_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="GGUF"):
        hf_name(name)


def test_the_config_has_the_exact_epsilon_and_ties_the_embeddings() -> None:
    config = hf_config(FIELDS, is_tied=True, dtype="bfloat16")
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 8192
    assert config["head_dim"] == 64


def test_the_tokenizer_config_bounds_the_length_and_keeps_the_chat_template() -> None:
    config = tokenizer_config(FIELDS)
    assert config["model_max_length"] == 8192
    assert config["chat_template"] == "{{ messages }}"
    assert config["eos_token"] == "<|im_end|>"


def test_digits_are_split_one_by_one_and_control_tokens_are_whole() -> None:
    tokens = ["<|im_end|>", *(str(digit) for digit in range(10)), "19", "a"]
    tokenizer = make_tokenizer(tokens, [3] + [1] * 12, ["1 9"])
    assert tokenizer.encode("19a<|im_end|>").tokens == ["1", "9", "a", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("19a").ids) == "19a"
