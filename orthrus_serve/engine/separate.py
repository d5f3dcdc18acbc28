"""A generator and an unrelated embedder as two engines on one card, behind the interface of one: topology `separate_models`.

Guards: what one engine takes of the card leaves room for the other, before either starts; the death of either core is the death
of both; a page of shared memory joins their schedulers and has no name any more once both have it. Leaves out how steps
are shared (`card.py`) and how requests find their engine (`separate_app.py`).
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from vllm.config import PoolerConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor.abstract import Executor

from orthrus_serve.config.embedder import EmbedderSpec, memory_sum_problems
from orthrus_serve.config.schema import AppArgs
from orthrus_serve.engine.args import prepared_adapters, refuse_untested
from orthrus_serve.engine.card_page import make_page, sweep_pages
from orthrus_serve.engine.channel import EngineChannel, Report
from orthrus_serve.engine.embedder_llm import EmbedderLLM, own_metrics
from orthrus_serve.engine.engine_kwargs import scheduler_class
from orthrus_serve.engine.llm import MixedLLM
from orthrus_serve.engine.openai_app import openai_app
from orthrus_serve.engine.separate_app import SeparateApp
from orthrus_serve.engine.separate_kwargs import embedder_kwargs, generator_kwargs
from orthrus_serve.errors import ConfigError

# Settings of steps that hold decodes, or whose inputs can be cut: the embedder has no such steps.
GENERATOR_ONLY = ("target_tpot_ms", "step_tokens")


class BothChannels:
    """The channels of two engines as one: settings to both, reports added up."""

    def __init__(self, generator: EngineChannel, embedder: EngineChannel) -> None:
        self._generator = generator
        self._embedder = embedder

    async def set(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """As `EngineChannel.set`. The generator says what is applied; the embedder takes no value that it would not."""
        answer = await self._generator.set(wanted)
        if answer["refused"] is None:
            for_both = {name: value for name, value in wanted.items() if name not in GENERATOR_ONLY}
            answer = {**answer, "refused": (await self._embedder.set(for_both))["refused"]}
        return answer

    async def watch(self, gap_s: float = 0.05) -> Report:
        """The next reports of both, added up: an idle engine answers at once, a busy one within its next step.

        Both are asked anew each time, since whoever reads a report takes a request that it does not name for finished.
        """
        return added(*await asyncio.gather(self._generator.watch(gap_s), self._embedder.watch(gap_s)))

    async def remaining(self) -> Report:
        """Reports of both now, added up. Waits for the running step of each."""
        return added(*await asyncio.gather(self._generator.remaining(), self._embedder.remaining()))


def added(generator: Report, embedder: Report) -> Report:
    """Two engines' reports as one; what is said of KV blocks, adapters and the time target is the generator's.

    `card_busy_s` is what the busier one was: both run at once, and their card is busy once.
    """
    totals = {name: value + embedder["totals"].get(name, 0) for name, value in generator["totals"].items()}
    totals["card_busy_s"] = max(generator["totals"]["busy_s"], embedder["totals"]["busy_s"])
    return {
        **generator,
        "running": generator["running"] + embedder["running"],
        "waiting": generator["waiting"] + embedder["waiting"],
        "pooling_states": generator["pooling_states"] + embedder["pooling_states"],
        "prompt_left": {
            kind: left + embedder["prompt_left"].get(kind, 0) for kind, left in generator["prompt_left"].items()
        },
        "oldest_wait_s": {
            kind: max(wait_s, embedder["oldest_wait_s"].get(kind, 0.0))
            for kind, wait_s in generator["oldest_wait_s"].items()
        },
        "totals": totals,
        "requests": {**generator["requests"], **embedder["requests"]},
    }


class SeparateEngines:
    """Two engines as a replica sees one."""

    def __init__(self, generator: MixedLLM, embedder: EmbedderLLM) -> None:
        self.generator = generator
        self.embedder = embedder
        self.channel = BothChannels(generator.channel, embedder.channel)

    @property
    def errored(self) -> bool:
        """Whether the core of either is gone."""
        return self.generator.errored or self.embedder.errored

    @property
    def vocab_size(self) -> int:
        """Of the generator."""
        return self.generator.vocab_size

    @property
    def max_model_len(self) -> int:
        """Of the generator."""
        return self.generator.max_model_len

    async def check_health(self) -> None:
        """Raises when either is not well."""
        await self.generator.check_health()
        await self.embedder.check_health()

    def shutdown(self) -> None:
        """Ends both cores."""
        try:
            self.embedder.shutdown()
        finally:
            self.generator.shutdown()


class SeparateModels:
    """Two engines that are up and share their card, their app, and the metrics of the second."""

    def __init__(self, engines: SeparateEngines, app: SeparateApp, registry: CollectorRegistry) -> None:
        self.engines = engines
        self.app = app
        self._registry = registry

    @property
    def vector_size(self) -> int:
        """Numbers of an embedding, uncut."""
        return self.engines.embedder.model_config.get_hidden_size()

    def more_metrics(self) -> bytes:
        """What vLLM publishes of the embedder. The generator's is in the process's own registry, where one engine fits."""
        return generate_latest(self._registry)


async def start_separate(args: AppArgs, *, stat_loggers: list[Any] | None = None) -> SeparateModels:
    """Starts both engines, one after the other: vLLM measures the memory that is free.

    Args:
        stat_loggers: vLLM stat logger factories of both, as AsyncLLM takes them.

    Raises:
        ConfigError, AdapterError: what cannot be run as configured.
    """
    spec = args.embedder
    assert spec is not None  # the schema says so
    on_cpu = current_platform.is_cpu()
    embed_args = _engine_args(embedder_kwargs(args, spec, on_cpu=on_cpu))
    generate_args = _engine_args(generator_kwargs(args, on_cpu=on_cpu))
    embed_config, generate_config = _config(embed_args), _config(generate_args)
    refuse_untested(generate_config)
    _refuse_untested_embedder(embed_config, spec)
    if not on_cpu:
        _refuse_memory(generate_config, embed_config)

    registry = CollectorRegistry()
    embedder: EmbedderLLM = _start(EmbedderLLM, embed_config, [own_metrics(registry), *(stat_loggers or [])])
    try:
        generator: MixedLLM = _start(MixedLLM, generate_config, stat_loggers)
    except BaseException:
        embedder.shutdown()
        raise
    embedder.open_channel()
    generator.configure({})
    engines = SeparateEngines(generator, embedder)
    try:
        await _share_card(engines)
        app = SeparateApp(
            await openai_app(generator, generate_args, prepared_adapters(args)),
            await openai_app(embedder, embed_args, {}),
            spec.name,
        )
    except BaseException:
        engines.shutdown()
        raise
    return SeparateModels(engines, app, registry)


async def _share_card(engines: SeparateEngines) -> None:
    with _page() as path:
        await engines.generator.channel.join_card(path, 0)
        await engines.embedder.channel.join_card(path, 1)


@contextmanager
def _page() -> Iterator[str]:
    """A page that has its name for as long as it takes to be found by it."""
    sweep_pages()
    path = make_page()
    try:
        yield path
    finally:
        Path(path).unlink(missing_ok=True)


def _engine_args(kwargs: Mapping[str, Any]) -> AsyncEngineArgs:
    pooler = kwargs.get("pooler_config")
    return AsyncEngineArgs(**(kwargs if pooler is None else {**kwargs, "pooler_config": PoolerConfig(**pooler)}))


def _config(arguments: AsyncEngineArgs) -> VllmConfig:
    config = arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    is_async = bool(config.scheduler_config.async_scheduling)
    config.scheduler_config.scheduler_cls = scheduler_class(async_scheduling=is_async)
    return config


def _start(kind: Any, config: VllmConfig, stat_loggers: list[Any] | None) -> Any:
    return kind(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_requests=False,
        log_stats=True,
        stat_loggers=stat_loggers,
    )


def _refuse_untested_embedder(config: VllmConfig, spec: EmbedderSpec) -> None:
    model = config.model_config
    if model.is_multimodal_model:
        raise ConfigError(f"embedder.path: {spec.path} is a multimodal model; only models of text are tested")
    size = model.get_hidden_size()
    if any(length > size for length in spec.dimensions):
        raise ConfigError(f"embedder.dimensions: {max(spec.dimensions)} is more than its {size} numbers")


def _refuse_memory(generator: VllmConfig, embedder: VllmConfig) -> None:
    shares = {
        "vllm.gpu_memory_utilization": generator.cache_config.gpu_memory_utilization,
        "embedder.vllm.gpu_memory_utilization": embedder.cache_config.gpu_memory_utilization,
    }
    problems = memory_sum_problems(shares)
    if problems:
        raise ConfigError(problems[0])
