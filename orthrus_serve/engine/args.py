"""From an application's configuration to one running engine: which vLLM arguments, which worker, which scheduler.

Guards: combinations that were never tested, or that would serve wrong vectors, are refused before a process starts.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm.config import PoolerConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor.abstract import Executor

from orthrus_serve.config.schema import AppArgs
from orthrus_serve.config.vllm_keys import check_vllm_keys
from orthrus_serve.engine.adapter_keys import prepare_adapter
from orthrus_serve.engine.llm import MixedLLM
from orthrus_serve.engine.settings import EngineSettings
from orthrus_serve.errors import AdapterError, ConfigError

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def make_engine(args: AppArgs, *, stat_loggers: list[Any] | None = None) -> MixedLLM:
    """Starts an engine. Blocks until its core has loaded the model (seconds on CPU, minutes on CUDA).

    Args:
        args: the application's configuration; one engine is made whatever `num_replicas` says.
        stat_loggers: vLLM stat logger factories, as AsyncLLM takes them.

    Raises:
        ConfigError, AdapterError: what cannot be run as configured.
    """
    config = engine_config(args)
    engine = MixedLLM(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_requests=False,
        log_stats=True,
        stat_loggers=stat_loggers,
    )
    engine.configure(args.adapters)
    if engine.eos_token_id is None and any(spec.append_eos for spec in args.adapters.values()):
        engine.shutdown()
        raise ConfigError("adapters: append_eos is on, but the model's tokenizer has no end-of-sequence token")
    return engine


def engine_config(args: AppArgs) -> VllmConfig:
    """vLLM's resolved configuration, with our scheduler in it."""
    config = engine_args(args).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    refuse_untested(config)
    # Only now is it known whether steps overlap; subclassing the wrong scheduler would turn that off.
    name = "MixedAsyncScheduler" if config.scheduler_config.async_scheduling else "MixedScheduler"
    config.scheduler_config.scheduler_cls = f"orthrus_serve.engine.scheduler.{name}"
    return config


def engine_args(args: AppArgs) -> AsyncEngineArgs:
    """vLLM's engine arguments: the user's `vllm` section as written, and what a mixed engine needs.

    Raises:
        ConfigError: a key that vLLM does not have, or that is ours to set.
    """
    check_vllm_keys(args.vllm, [field.name for field in fields(AsyncEngineArgs)])
    on_cpu = current_platform.is_cpu()
    given = dict(args.vllm)
    if on_cpu and given.setdefault("enforce_eager", True) is not True:
        raise ConfigError("vllm.enforce_eager: must be true on CPU; grouped LoRA products are not traced")
    given.setdefault("max_loras", max(1, len(args.adapters)))
    given.setdefault("max_lora_rank", _rank_to_allow(args))
    return AsyncEngineArgs(
        **given,
        model=args.model.path,
        served_model_name=[args.model.name],
        runner="generate",  # keeps every stock pooling path off; the mixed runner adds the task "embed"
        # MEAN or CLS here would switch chunked prefill and prefix caching off for the whole engine.
        pooler_config=PoolerConfig(seq_pooling_type="LAST", task="embed"),
        enable_lora=True,
        max_logprobs=args.limits.max_logprobs,
        worker_cls=f"orthrus_serve.engine.worker.{'MixedCPUWorker' if on_cpu else 'MixedGPUWorker'}",
        additional_config=EngineSettings.from_args(args).to_additional_config(),
    )


def prepared_adapters(args: AppArgs) -> dict[str, str]:
    """Served name → folder to load, with keys renamed for a generate engine where an adapter needs it."""
    return {name: str(prepare_adapter(spec.path)) for name, spec in args.adapters.items()}


def refuse_untested(config: VllmConfig) -> None:
    """Refuses what a mixed step has not been shown to keep right.

    Raises:
        ConfigError: names the key.
    """
    scheduler = config.scheduler_config
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs + 2:
        raise ConfigError(
            f"vllm.max_num_batched_tokens: {scheduler.max_num_batched_tokens} leaves no room for prompts beside "
            f"max_num_seqs={scheduler.max_num_seqs} decodes; make it larger, or max_num_seqs smaller"
        )
    if not scheduler.enable_chunked_prefill:
        raise ConfigError("vllm.enable_chunked_prefill: must be on; kinds share a step by chunks")
    if config.speculative_config is not None:
        raise ConfigError("vllm.speculative_config: not tested in mixed batches yet")
    if config.kv_transfer_config is not None:
        raise ConfigError("vllm.kv_transfer_config: not tested in mixed batches yet")
    if config.cache_config.kv_sharing_fast_prefill:
        raise ConfigError("vllm.kv_sharing_fast_prefill: skips hidden states that pooling needs")
    if config.parallel_config.prefill_context_parallel_size > 1:
        raise ConfigError("vllm.prefill_context_parallel_size: not tested in mixed batches yet")


def _rank_to_allow(args: AppArgs) -> int:
    ranks = [_rank_of(name, spec.path) for name, spec in args.adapters.items()]
    allowed = [rank for rank in _LORA_RANKS if rank >= max(ranks)]
    if not allowed:
        raise ConfigError(f"adapters: rank {max(ranks)} is above vLLM's largest, {_LORA_RANKS[-1]}")
    return allowed[0]


def _rank_of(name: str, path: str) -> int:
    file = Path(path) / "adapter_config.json"
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["r"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise AdapterError(f"adapters.{name}.path: {file} is not a readable LoRA configuration ({error})") from error
