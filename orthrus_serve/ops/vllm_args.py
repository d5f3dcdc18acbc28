"""The command line that serves an application's engine with plain `vllm serve`, without Ray. Starts nothing.

One engine: several replicas, the router and live switching need Ray Serve. Every argument is the one that a replica would use.
"""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from orthrus_serve.config.environment import replica_environment
from orthrus_serve.config.load import Application, ServeFile
from orthrus_serve.engine.adapter_keys import prepare_adapter
from orthrus_serve.engine.engine_kwargs import FRONT_KEY, engine_kwargs, front_settings, scheduler_class
from orthrus_serve.errors import ConfigError
from orthrus_serve.policy.topology import PRESETS

MIDDLEWARE = "orthrus_serve.serving.vllm_middleware.OrthrusMiddleware"


def vllm_command_line(file: ServeFile) -> str:
    """One line for a shell: environment, `vllm serve`, and every option.

    Raises:
        ConfigError, AdapterError: no or several applications, or what a mixed engine cannot honour.
    """
    if len(file.applications) != 1:
        raise ConfigError(
            f"{file.source}: vllm serves one engine, and the file has {len(file.applications)} applications"
        )
    args = file.applications[0].args
    if args.arms:
        raise ConfigError(f"{file.source}: vllm serves one engine, and the file has {len(args.arms)} arms")
    if args.api_keys is not None:
        raise ConfigError(
            f"{file.source}: args.api_keys: vLLM checks keys itself; leave it out, and add --api-key there"
        )
    if args.embedder is not None:
        raise ConfigError(f"{file.source}: topology {args.topology} runs two engines on a card, and vllm serves one")
    environment = [f"{name}={value}" for name, value in replica_environment(args).items()]
    # vLLM's CPU package installs a `vllm` command that looks for the CUDA package's version and fails.
    program = ["vllm", "serve"] if args.num_gpus_per_replica else ["python", "-m", "vllm.entrypoints.openai.api_server"]
    where = ["--host", file.host, "--port", str(file.port)]
    return shlex.join(["env", *environment, *program, *vllm_arguments(file.applications[0]), *where])


def vllm_arguments(application: Application) -> list[str]:
    """The arguments of vLLM's server, without host and port."""
    args = application.args
    on_cpu = args.num_gpus_per_replica == 0
    kwargs = engine_kwargs(args, on_cpu=on_cpu)
    # Which scheduler is right depends on whether steps overlap, so that is said rather than left to vLLM.
    is_async = not on_cpu and kwargs.get("async_scheduling") is not False
    kwargs |= {"async_scheduling": is_async, "scheduler_cls": scheduler_class(async_scheduling=is_async)}
    kwargs["additional_config"] = {
        **_live_settings(application, kwargs["additional_config"]),
        FRONT_KEY: front_settings(args),
    }
    specs = {**args.adapters, **args.generate_adapters}
    adapters = [f"{name}={prepare_adapter(spec.path)}" for name, spec in specs.items()]
    # `vllm serve` takes the model as its first word, the module by an option.
    model = [kwargs.pop("model")] if args.num_gpus_per_replica else []
    return [*model, *_options(kwargs), "--lora-modules", *adapters, "--middleware", MIDDLEWARE]


def _live_settings(application: Application, additional_config: Mapping[str, Any]) -> dict[str, Any]:
    """What `user_config` would have set right after the start, since there is no channel for it here."""
    live = application.live.model_dump(exclude_none=True, exclude={"topology"})
    if application.live.topology is not None:
        live.setdefault("policy", PRESETS[application.live.topology].pool.policy)
    settings = dict(additional_config["orthrus"])
    return {**additional_config, "orthrus": {**settings, "live": {**settings["live"], **live}}}


def _options(kwargs: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in kwargs.items():
        words += _option(name.replace("_", "-"), value)
    return words


def _option(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
