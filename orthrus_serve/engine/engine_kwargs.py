"""The arguments of vLLM's engine for a mixed engine, as plain values: the user's `vllm` section and what mixing needs.

The same whether the engine runs in a replica (`args.py`) or under `vllm serve` (`ops/vllm_args.py`). Imports no vLLM, so that a
command line can be printed on a machine without a device. Leaves out what vLLM makes of them.
"""

import json
from pathlib import Path
from typing import Any

from orthrus_serve.config.schema import AppArgs
from orthrus_serve.engine.kv_handover import kv_transfer_kwargs
from orthrus_serve.engine.settings import EngineSettings
from orthrus_serve.errors import AdapterError, ConfigError

# In vLLM's `additional_config`, beside `settings.KEY`: what the process that speaks HTTP needs where no replica does it.
FRONT_KEY = "orthrus_front"
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def engine_kwargs(args: AppArgs, *, on_cpu: bool) -> dict[str, Any]:
    """Keyword arguments for `AsyncEngineArgs`, all of them JSON-able.

    Args:
        args: the application's configuration; its `vllm` keys were checked before (`config/vllm_keys.py`).
        on_cpu: whether the engine runs on vLLM's CPU platform.

    Raises:
        ConfigError, AdapterError: a value that a mixed engine cannot honour.
    """
    given = dict(args.vllm)
    if on_cpu and given.setdefault("enforce_eager", True) is not True:
        raise ConfigError("vllm.enforce_eager: must be true on CPU; grouped LoRA products are not traced")
    given.setdefault("max_loras", len(args.adapters) + len(args.generate_adapters))
    given.setdefault("max_lora_rank", rank_to_allow(args))
    return {
        **given,
        **kv_transfer_kwargs(args, on_cpu=on_cpu),
        "model": args.model.path,
        "served_model_name": [args.model.name],
        "runner": "generate",  # keeps every stock pooling path off; the mixed runner adds the task "embed"
        # MEAN or CLS here would switch chunked prefill and prefix caching off for the whole engine.
        "pooler_config": {"seq_pooling_type": "LAST", "task": "embed"},
        "enable_lora": True,
        "max_logprobs": args.limits.max_logprobs,
        "worker_cls": f"orthrus_serve.engine.worker.{'MixedCPUWorker' if on_cpu else 'MixedGPUWorker'}",
        "additional_config": EngineSettings.from_args(args).to_additional_config(),
    }


def scheduler_class(*, async_scheduling: bool) -> str:
    """The dotted name of the mixed scheduler. The wrong one of the two would turn async scheduling off, or run it unready."""
    return f"orthrus_serve.engine.scheduler.{'MixedAsyncScheduler' if async_scheduling else 'MixedScheduler'}"


def front_settings(args: AppArgs) -> dict[str, Any]:
    """What checks and completes requests, JSON-able: `AppArgs` without the parts that only a cluster reads."""
    parts = {
        "topology",
        "num_replicas",
        "dedicated",
        "disagg_pd",
        "kv_connector",
        "model",
        "adapters",
        "generate_adapters",
        "embed_adapter",
        "limits",
    }
    return args.model_dump(mode="json", include=parts)


def rank_to_allow(args: AppArgs) -> int:
    """The least rank that vLLM can be told, of those that all adapters fit into.

    Raises:
        ConfigError, AdapterError: a rank that is too large or cannot be read.
    """
    ranks = [_rank_of(f"adapters.{name}", spec.path) for name, spec in args.adapters.items()]
    ranks += [_rank_of(f"generate_adapters.{name}", spec.path) for name, spec in args.generate_adapters.items()]
    allowed = [rank for rank in _LORA_RANKS if rank >= max(ranks)]
    if not allowed:
        raise ConfigError(f"adapters: rank {max(ranks)} is above vLLM's largest, {_LORA_RANKS[-1]}")
    return allowed[0]


def _rank_of(name: str, path: str) -> int:
    file = Path(path) / "adapter_config.json"
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["r"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise AdapterError(f"{name}.path: {file} is not a readable LoRA configuration ({error})") from error
