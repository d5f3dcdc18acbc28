"""Which keys may stand under `vllm:`: every argument of vLLM's engine, except those that Orthrus sets or cannot honour yet.

Guards: an unknown key and a key that Orthrus owns both stop the start, with a sentence that says what to use instead.
Leaves out values, which vLLM checks itself.
"""

import ast
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path

from orthrus_serve.config.complaint import unknown_key
from orthrus_serve.errors import ConfigError

_NOT_TESTED = "is not supported in mixed batches yet"
_ONE_ENGINE = "is not supported: each replica is one engine, and more of them come from num_replicas"

# What to do instead, as the rest of the sentence "vllm.KEY ...".
REFUSED_VLLM_KEYS: Mapping[str, str] = {
    "model": "is set by Orthrus: write model.path",
    "model_weights": "is set by Orthrus: write model.path",
    "served_model_name": "is set by Orthrus: write model.name",
    "runner": "is set by Orthrus: the engine generates, and embeds through its adapters; remove it",
    "convert": "is set by Orthrus: the engine generates, and embeds through its adapters; remove it",
    "task": "is set by Orthrus: the engine generates, and embeds through its adapters; remove it",
    "enable_lora": "is set by Orthrus: adapters are always on; list them under adapters",
    "lora_modules": "is set by Orthrus: list adapters under adapters",
    "worker_cls": "is set by Orthrus: its worker pools and samples in the same step; remove it",
    "scheduler_cls": "is set by Orthrus: choose a topology instead",
    "additional_config": "is set by Orthrus: write engine settings under engine",
    "pooler_config": "is set by Orthrus: write pooling, normalize and dimensions on the adapter",
    "override_pooler_config": "is set by Orthrus: write pooling, normalize and dimensions on the adapter",
    "scheduling_policy": "is set by Orthrus: choose a topology instead; priorities never reach the engine",
    "max_logprobs": "is set by Orthrus: write limits.max_logprobs",
    "disable_log_stats": "is set by Orthrus: the router and the metrics need the engine's counts; remove it",
    "host": "is an option of vLLM's own server: write http_options.host at the top of the file",
    "port": "is an option of vLLM's own server: write http_options.port at the top of the file",
    "api_key": "is an option of vLLM's own server, which does not run here",
    "prefill_context_parallel_size": _NOT_TESTED,
    "decode_context_parallel_size": _NOT_TESTED,
    "dcp_comm_backend": _NOT_TESTED,
    "kv_sharing_fast_prefill": _NOT_TESTED,
    "enable_dbo": _NOT_TESTED,
    "enable_sleep_mode": _NOT_TESTED,
    "speculative_config": _NOT_TESTED,
    "spec_method": _NOT_TESTED,
    "spec_model": _NOT_TESTED,
    "spec_tokens": _NOT_TESTED,
    "diffusion_config": _NOT_TESTED,
    "kv_transfer_config": "is set by Orthrus: write kv_connector",
    "ec_transfer_config": _NOT_TESTED,
    "data_parallel_size": _ONE_ENGINE,
    "data_parallel_rank": _ONE_ENGINE,
    "data_parallel_size_local": _ONE_ENGINE,
    "data_parallel_backend": _ONE_ENGINE,
    "data_parallel_hybrid_lb": _ONE_ENGINE,
    "data_parallel_external_lb": _ONE_ENGINE,
}


def refused_vllm_keys(given: Iterable[str], path: str = "vllm") -> list[str]:
    """One sentence for each given key that Orthrus sets itself or cannot honour."""
    return [f"{path}.{key} {REFUSED_VLLM_KEYS[key]}" for key in given if key in REFUSED_VLLM_KEYS]


def check_vllm_keys(given: Iterable[str], known: Iterable[str], path: str = "vllm") -> None:
    """Refuse keys that Orthrus sets and keys that vLLM does not have.

    Args:
        given: the keys under `vllm:`.
        known: names of the arguments of vLLM's engine.
        path: where `given` stands in the file.

    Raises:
        ConfigError: one sentence per key.
    """
    keys, allowed = list(given), set(known) - REFUSED_VLLM_KEYS.keys()
    problems = refused_vllm_keys(keys, path)
    problems += [
        unknown_key((path, key), allowed) for key in keys if key not in allowed and key not in REFUSED_VLLM_KEYS
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def installed_vllm_keys() -> frozenset[str] | None:
    """The arguments of the installed vLLM's engine, read from its source; None when no vLLM is installed.

    Importing vLLM takes some ten seconds and looks for a device; `check` needs only the names.
    """
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return None
    source = Path(package.origin).parent / "engine" / "arg_utils.py"
    if not source.is_file():
        return None
    return field_names(source.read_text(encoding="utf-8"), ("EngineArgs", "AsyncEngineArgs"))


def field_names(source: str, class_names: Iterable[str]) -> frozenset[str]:
    """Names of the annotated fields in the bodies of these classes."""
    wanted = set(class_names)
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name in wanted]
    return frozenset(
        statement.target.id
        for body in classes
        for statement in body.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )
