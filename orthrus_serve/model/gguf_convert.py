"""Turns a Llama GGUF file into a Hugging Face model folder: weights, config and tokenizer.

Decides names, row order and the settings that a GGUF file loses on the way. Leaves out where the file comes from
(`download.py`) and whether the result is the expected model (`demo_check.py`). Needs gguf, torch, safetensors and
tokenizers only, so it also runs on a machine that has no vLLM: `python -m orthrus_serve.model.gguf_convert SRC OUT`.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from orthrus_serve.errors import ModelError

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL
_FILE_MODE = 0o644  # safetensors writes 0600, which another user's engine could not read
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def hf_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`. Raises ModelError for a name it does not know."""
    parts = gguf_name.removesuffix(".weight").split(".")
    if len(parts) == 1 and parts[0] in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[parts[0]]}.weight"
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    raise ModelError(f"GGUF tensor {gguf_name!r} is not part of a Llama model that this converter knows")


def permute(weight: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """llama.cpp's row order of a q or k projection [heads * head_dim, in]: rotary pairs lie next to each other."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def unpermute(weight: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Inverse of `permute`: Transformers keeps the two halves of a rotary pair half a head apart."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def hf_config(fields: Mapping[str, Any], *, is_tied: bool, dtype: str) -> dict[str, Any]:
    """`config.json` of the model whose GGUF metadata is `fields`."""
    num_heads = int(fields["llama.attention.head_count"])
    hidden_size = int(fields["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "dtype": dtype,
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "max_position_embeddings": int(fields["llama.context_length"]),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": num_heads,
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
        # GGUF keeps a float32: 9.99999974e-06 where the model's own config says 1e-05.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.3g}"),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": is_tied,
        "use_cache": True,
        "vocab_size": int(fields["llama.vocab_size"]),
    }


def make_tokenizer(tokens: Sequence[str], token_types: Sequence[int], merges: Sequence[str]) -> Tokenizer:
    """The byte-level BPE of the GGUF arrays. Digits are split one by one, which the usual GGUF route forgets."""
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, right = merge.split(" ")
        pairs.append((left, right))
    bpe = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)}, merges=pairs, fuse_unk=False, byte_fallback=False
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, token_types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`tokenizer_config.json`: special tokens by name, the context length and the chat template."""
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "add_prefix_space": False,
        "bos_token": tokens[int(fields["tokenizer.ggml.bos_token_id"])],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[int(fields["tokenizer.ggml.eos_token_id"])],
        "model_max_length": int(fields["llama.context_length"]),
        "pad_token": tokens[int(fields["tokenizer.ggml.padding_token_id"])],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[int(fields["tokenizer.ggml.unknown_token_id"])],
    }


def convert(gguf_path: Path, out_dir: Path, dtype: str = "bfloat16") -> int:
    """Writes the model folder `out_dir` and returns the number of tensors. Raises ModelError for another kind of file."""
    reader = GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ModelError(f"{gguf_path}: architecture {fields.get('general.architecture')!r}, expected 'llama'")
    weights = _read_weights(reader, fields, DTYPES[dtype])
    out_dir.mkdir(parents=True, exist_ok=True)
    save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})
    config = hf_config(fields, is_tied="lm_head.weight" not in weights, dtype=dtype)
    _write_json(out_dir / "config.json", config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(out_dir / "generation_config.json", generation)
    tokens, types, merges = (fields[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "merges"))
    make_tokenizer(tokens, types, merges).save(str(out_dir / "tokenizer.json"))
    _write_json(out_dir / "tokenizer_config.json", tokenizer_config(fields))
    for path in out_dir.iterdir():
        path.chmod(_FILE_MODE)
    return len(weights)


def _read_weights(reader: GGUFReader, fields: Mapping[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    heads = {
        "attn_q": int(fields["llama.attention.head_count"]),
        "attn_k": int(fields["llama.attention.head_count_kv"]),
    }
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.removesuffix(".weight").rsplit(".", 1)[-1]
        if part in heads:
            weight = unpermute(weight, heads[part])
        weights[hf_name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(weight)).to(dtype)
    return weights


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: source file, output folder, dtype."""
    parser = argparse.ArgumentParser(description="Convert a Llama GGUF file into a Hugging Face folder.")
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    args = parser.parse_args(argv)
    count = convert(args.source, args.out, args.dtype)
    sys.stderr.write(f"wrote {count} tensors to {args.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
