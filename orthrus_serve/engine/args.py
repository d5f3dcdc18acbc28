"""From an application's configuration to one running engine: which vLLM arguments, which worker, which scheduler.

Guards: combinations that were never tested, or that would serve wrong vectors, are refused before a process starts.
"""

import importlib
from dataclasses import fields
from typing import Any

import torch
from vllm.config import KVTransferConfig, ModelConfig, PoolerConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor.abstract import Executor

from orthrus_serve.config.schema import AppArgs
from orthrus_serve.config.vllm_keys import check_vllm_keys
from orthrus_serve.engine.adapter_keys import prepare_adapter
from orthrus_serve.engine.engine_kwargs import engine_kwargs, scheduler_class
from orthrus_serve.engine.kv_handover import CONNECTOR
from orthrus_serve.engine.llm import MixedLLM
from orthrus_serve.errors import ConfigError


def make_engine(args: AppArgs, *, stat_loggers: list[Any] | None = None) -> MixedLLM:
    """Starts an engine. Blocks until its core has loaded the model (seconds on CPU, minutes on CUDA).

    Args:
        args: the application's configuration; one engine is made whatever `num_replicas` says.
        stat_loggers: vLLM stat logger factories, as AsyncLLM takes them.

    Raises:
        ConfigError, AdapterError: what cannot be run as configured.
    """
    if args.kv_connector is not None:
        require_connector(args.kv_connector)
    config = engine_config(args)
    engine = MixedLLM(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_requests=False,
        log_stats=True,
        stat_loggers=stat_loggers,
    )
    try:
        engine.configure(args.adapters)
    except ConfigError:
        engine.shutdown()
        raise
    return engine


def require_connector(name: str) -> None:
    """Raises ConfigError when the package that moves KV is not there, or cannot be loaded."""
    try:
        importlib.import_module(f"{name}._api")
    except ImportError as error:
        raise ConfigError(f"kv_connector: the package {name!r} cannot be loaded ({error})") from error


def engine_config(args: AppArgs) -> VllmConfig:
    """vLLM's resolved configuration, with our scheduler in it."""
    config = engine_args(args).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    refuse_untested(config)
    refuse_large_heads(args, config)
    # Only now is it known whether steps overlap; subclassing the wrong scheduler would turn that off.
    is_async = bool(config.scheduler_config.async_scheduling)
    config.scheduler_config.scheduler_cls = scheduler_class(async_scheduling=is_async)
    return config


def engine_args(args: AppArgs) -> AsyncEngineArgs:
    """vLLM's engine arguments: the user's `vllm` section as written, and what a mixed engine needs.

    Raises:
        ConfigError: a key that vLLM does not have, or that is ours to set.
    """
    check_vllm_keys(args.vllm, [field.name for field in fields(AsyncEngineArgs)])
    kwargs = engine_kwargs(args, on_cpu=current_platform.is_cpu())
    if args.tracing is not None:
        kwargs.setdefault("otlp_traces_endpoint", args.tracing.endpoint)
    kwargs["pooler_config"] = PoolerConfig(**kwargs["pooler_config"])
    if "kv_transfer_config" in kwargs:
        kwargs["kv_transfer_config"] = KVTransferConfig(**kwargs["kv_transfer_config"])
    return AsyncEngineArgs(**kwargs)


def prepared_adapters(args: AppArgs) -> dict[str, str]:
    """Served name → folder to load, with keys renamed for a generate engine where an adapter needs it."""
    specs = {**args.adapters, **args.generate_adapters}
    return {name: str(prepare_adapter(spec.path)) for name, spec in specs.items()}


def refuse_large_heads(args: AppArgs, config: VllmConfig) -> None:
    """Refuses a head whose kept hidden states could outgrow its bound: every slot full of its longest inputs.

    Raises:
        ConfigError: names the numbers and what to lower.
    """
    model, slots = config.model_config, config.scheduler_config.max_num_seqs
    for name, spec in args.adapters.items():
        if spec.head is None:
            continue
        tokens = min(spec.head.max_input_tokens, model.max_model_len)
        size = slots * tokens * model.get_hidden_size() * model.dtype.itemsize
        if size > spec.head.max_state_bytes:
            raise ConfigError(
                f"adapters.{name}.head: {slots} slots of {tokens} tokens would keep {size} bytes of hidden states, above "
                f"max_state_bytes={spec.head.max_state_bytes}; lower max_input_tokens or vllm.max_num_seqs, or raise it"
            )


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
    connector = config.kv_transfer_config
    if connector is not None and connector.kv_connector != CONNECTOR:
        raise ConfigError(f"vllm.kv_transfer_config: {connector.kv_connector} is not tested in mixed batches")
    if config.cache_config.kv_sharing_fast_prefill:
        raise ConfigError("vllm.kv_sharing_fast_prefill: skips hidden states that pooling needs")
    if config.model_config.dtype == torch.float32 and current_platform.is_cuda():
        raise ConfigError(
            "vllm.dtype: float32 does not run on CUDA; vLLM's LoRA kernels take float16 and bfloat16 only"
        )
    parallel = config.parallel_config
    for key in ("prefill_context_parallel_size", "decode_context_parallel_size", "data_parallel_size"):
        if getattr(parallel, key) > 1:
            raise ConfigError(f"vllm.{key}: not tested in mixed batches yet")
    if parallel.enable_dbo:
        raise ConfigError("vllm.enable_dbo: splits a step's rows, which pooling finds by their place")
    if config.model_config.enable_sleep_mode:
        raise ConfigError("vllm.enable_sleep_mode: not tested in mixed batches yet")
    _refuse_untested_model(config.model_config)


def _refuse_untested_model(model: ModelConfig) -> None:
    kinds = {
        "an encoder-decoder model": model.is_encoder_decoder,
        "a multimodal model": model.is_multimodal_model,
        "a model without attention": model.is_attention_free,
        "a model that mixes attention with other state": model.is_hybrid,
    }
    for kind, it_is in kinds.items():
        if it_is:
            raise ConfigError(f"model.path: {kind}; only decoders of text are tested in mixed batches yet")
