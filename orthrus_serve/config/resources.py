"""Whether the numbers of a configuration can work together: budget, slots, context, KV memory. Pure.

Guards: what vLLM would refuse minutes later, or accept and starve on, is refused with the number to change. Looks only at
numbers that are given; what vLLM chooses itself, it chooses to fit. Leaves out memory that only the machine
knows, which vLLM looks at when it starts.
"""

from collections.abc import Mapping
from typing import Any, cast

# Bytes of a number in the KV cache, by vLLM's names; unknown ones are left to vLLM.
_ITEM_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


def resource_problems(vllm: Mapping[str, Any], model: Mapping[str, Any], path: str = "vllm") -> list[str]:
    """One sentence for each contradiction.

    Args:
        vllm: the keys under `vllm:`.
        model: the model's `config.json`; empty when it cannot be read.
        path: where `vllm` stands in the file.
    """
    problems: list[str] = []
    budget, slots = _number(vllm, "max_num_batched_tokens"), _number(vllm, "max_num_seqs")
    if budget is not None and slots is not None and budget < slots + 2:
        problems.append(
            f"{path}.max_num_batched_tokens: {budget} leaves no room for prompts beside max_num_seqs={slots} decodes of one "
            f"token each; raise it to at least {slots + 2}, or lower max_num_seqs to at most {budget - 2}"
        )
    if vllm.get("enable_chunked_prefill") is False:
        problems.append(f"{path}.enable_chunked_prefill: must be on, since kinds share a step by chunks; remove it")
    return problems + _context_problems(vllm, model, path) + _memory_problems(vllm, model, path)


def kv_bytes_per_token(vllm: Mapping[str, Any], model: Mapping[str, Any]) -> int | None:
    """KV cache of one token on one worker; None when the model's shape or its number format is not an ordinary one."""
    layers, heads = _number(model, "num_hidden_layers"), _number(model, "num_attention_heads")
    hidden = _number(model, "hidden_size")
    if layers is None or heads is None or hidden is None:
        return None
    item_bytes = _ITEM_BYTES.get(_kv_format(vllm, model))
    if item_bytes is None:
        return None
    kv_heads = _number(model, "num_key_value_heads") or heads
    head_size = _number(model, "head_dim") or hidden // heads
    tensor, pipeline = (_number(vllm, f"{kind}_parallel_size") or 1 for kind in ("tensor", "pipeline"))
    return 2 * max(1, layers // pipeline) * max(1, kv_heads // tensor) * head_size * item_bytes


def _context_problems(vllm: Mapping[str, Any], model: Mapping[str, Any], path: str) -> list[str]:
    wanted, trained = _number(vllm, "max_model_len"), _number(model, "max_position_embeddings")
    if wanted is None or trained is None or wanted <= trained or _is_stretched(model) or "hf_overrides" in vllm:
        return []
    return [f"{path}.max_model_len: {wanted} is above the model's own {trained} (max_position_embeddings); lower it"]


def _is_stretched(model: Mapping[str, Any]) -> bool:
    rope = model.get("rope_scaling") or model.get("rope_parameters")
    if not isinstance(rope, dict):
        return False
    given = cast(dict[str, Any], rope)
    return "factor" in given or (given.get("rope_type") or given.get("type") or "default") != "default"


def _memory_problems(vllm: Mapping[str, Any], model: Mapping[str, Any], path: str) -> list[str]:
    given, per_token = _number(vllm, "kv_cache_memory_bytes"), kv_bytes_per_token(vllm, model)
    length = _number(vllm, "max_model_len") or _number(model, "max_position_embeddings")
    if given is None or per_token is None or length is None or model.get("sliding_window"):
        return []
    needed = length * per_token
    if given >= needed:
        return []
    return [
        f"{path}.kv_cache_memory_bytes: {given} holds {given // per_token} tokens of this model, and one request may have "
        f"{length} (max_model_len); raise it to at least {needed}, or lower max_model_len"
    ]


def _kv_format(vllm: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    for name in (vllm.get("kv_cache_dtype"), vllm.get("dtype")):
        if name not in (None, "auto"):
            return str(name)
    saved = str(model.get("dtype") or model.get("torch_dtype") or "")
    return "float16" if saved == "float32" else saved  # vLLM's own rule


def _number(section: Mapping[str, Any], key: str) -> int | None:
    """A whole number above 0; None for anything else, which vLLM judges."""
    value = cast(object, section.get(key))
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
