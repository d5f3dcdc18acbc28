"""The arguments of vLLM's two engines of topology `separate_models`, as plain values: a stock generator and a stock embedder.

Neither mixes anything: workers and runners are vLLM's own, and adapters are on only where the generator has some. The scheduler
is ours, for the shared card and the channel. Imports no vLLM. Leaves out how the engines are made (`separate.py`).
"""

from dataclasses import replace
from typing import Any

from orthrus_serve.config.embedder import EmbedderSpec
from orthrus_serve.config.schema import AppArgs
from orthrus_serve.engine.engine_kwargs import rank_to_allow
from orthrus_serve.engine.settings import EngineSettings


def generator_kwargs(args: AppArgs, *, on_cpu: bool) -> dict[str, Any]:
    """Keyword arguments for the generator's `AsyncEngineArgs`, all of them JSON-able.

    Raises:
        AdapterError: an adapter's configuration cannot be read.
    """
    given = _given(args, args.vllm, on_cpu=on_cpu)
    if args.generate_adapters:
        given.setdefault("max_loras", len(args.generate_adapters))
        given.setdefault("max_lora_rank", rank_to_allow(args))
        given["enable_lora"] = True
    return {
        **given,
        "model": args.model.path,
        "served_model_name": [args.model.name],
        "runner": "generate",
        "max_logprobs": args.limits.max_logprobs,
        "additional_config": EngineSettings.from_args(args).to_additional_config(),
    }


def embedder_kwargs(args: AppArgs, embedder: EmbedderSpec, *, on_cpu: bool) -> dict[str, Any]:
    """The same for the embedder. `pooler_config` is there only where the file says what the model's own files do not."""
    settings = EngineSettings.from_args(args)
    log = settings.step_log and f"{settings.step_log}.embed"  # two processes, two files
    given = _given(args, embedder.vllm, on_cpu=on_cpu)
    pooler = {"seq_pooling_type": embedder.pooling and embedder.pooling.upper(), "use_activation": embedder.normalize}
    pooler = {key: value for key, value in pooler.items() if value is not None}
    if pooler:
        given["pooler_config"] = pooler
    if embedder.dimensions:
        # vLLM cuts vectors only where the model's configuration says that it may be done.
        overrides = {"is_matryoshka": True, "matryoshka_dimensions": list(embedder.dimensions)}
        given["hf_overrides"] = {**(given.get("hf_overrides") or {}), **overrides}
    return {
        **given,
        "model": embedder.path,
        "served_model_name": [embedder.name],
        "runner": "pooling",
        "additional_config": replace(settings, step_log=log).to_additional_config(),
    }


def _given(args: AppArgs, vllm: dict[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    given = dict(vllm)
    if on_cpu:
        given.setdefault("enforce_eager", True)
    if args.tracing is not None:
        given.setdefault("otlp_traces_endpoint", args.tracing.endpoint)
    return given
