"""What Serve is told about each deployment, and what stops the start."""

import re
from typing import Any

import pytest
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

from orthrus_serve.app import GRACEFUL_SHUTDOWN_S, build
from orthrus_serve.config.environment import replica_environment
from orthrus_serve.config.schema import AppArgs
from orthrus_serve.errors import ConfigError, UnsupportedVersionError
from orthrus_serve.policy.stream_pacing import Sharers
from orthrus_serve.serving import ray_compat

ARGS: dict[str, Any] = {
    "topology": "unified_homo",
    "model": {"path": "/m"},
    "adapters": {"orthrus-embed": {"path": "/a"}},
    "num_replicas": 4,
    "engine": {"min_share": 0.25},
}


def deployments(**changes: Any) -> tuple[Any, Any]:
    application: Any = build({**ARGS, **changes})
    front = application._bound_deployment
    return front, front.init_args[1][""]._bound_deployment


def test_engines_are_one_gpu_each_and_there_is_a_front_for_each_of_them() -> None:
    front, engine = deployments()
    assert (front.name, front.num_replicas) == ("Front", 4)
    assert (engine.name, engine.num_replicas, engine.ray_actor_options["num_gpus"]) == ("Engine", 4, 1.0)
    assert engine.user_config == {"topology": "unified_homo", "policy": "unified_homo", "min_share": 0.25}
    assert engine.max_ongoing_requests > 10_000
    assert engine._deployment_config.graceful_shutdown_timeout_s == GRACEFUL_SHUTDOWN_S
    router = engine._deployment_config.request_router_config
    assert router.request_router_class == "orthrus_serve.serving.router.RemainingTokenRouter"
    assert router.request_router_kwargs == {"replica_wait_s": 30.0}


def test_with_autoscaling_serve_scales_from_the_first_number_and_fronts_are_there_for_the_most() -> None:
    scaled = {"min_replicas": 2, "max_replicas": 8, "target_tokens_per_replica": 20_000}
    front, engine = deployments(autoscaling=scaled)
    config = engine._deployment_config.autoscaling_config
    assert (config.min_replicas, config.initial_replicas, config.max_replicas, front.num_replicas) == (2, 4, 8, 8)
    assert config.policy.policy_kwargs["target_tokens_per_replica"] == 20_000
    switches = engine.ray_actor_options["runtime_env"]["env_vars"]
    assert switches["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] == "10"


def test_engines_know_with_whom_they_share_the_way_to_the_clients() -> None:
    _, engine = deployments()
    assert engine.init_args[2] == Sharers(num_fronts=4, num_replicas=0)
    arms = {"a": {"topology": "orthrus", "num_replicas": 3}, "b": {"topology": "hetero_fcfs", "num_replicas": 2}}
    application: Any = build({**{key: ARGS[key] for key in ("model", "adapters")}, "arms": arms})
    others = {
        arm: bound._bound_deployment.init_args[2] for arm, bound in application._bound_deployment.init_args[1].items()
    }
    assert others == {"a": Sharers(5, 2), "b": Sharers(5, 3)}


@pytest.mark.parametrize(("gpus", "v2", "dynamo"), [(0, "0", "1"), (1, "1", None), (0.5, "1", None)])
def test_replicas_get_the_switches_of_their_device(gpus: float, v2: str, dynamo: str | None) -> None:
    _, engine = deployments(num_gpus_per_replica=gpus)
    switches = engine.ray_actor_options["runtime_env"]["env_vars"]
    assert switches == replica_environment(AppArgs.model_validate({**ARGS, "num_gpus_per_replica": gpus}))
    assert (switches["VLLM_USE_V2_MODEL_RUNNER"], switches.get("TORCHDYNAMO_DISABLE")) == (v2, dynamo)
    assert switches["HF_HUB_OFFLINE"] == switches["VLLM_NO_USAGE_STATS"] == "1"


@pytest.mark.parametrize(("changes", "reason"), [({"num_replicas": "2"}, "a whole number, got the text '2'"),
                                                 ({"num_replicas": True}, "got true"), ({"vlm": {}}, "did you mean 'vllm'?"),
                                                 ({"vllm": {"model": "x"}}, "write model.path")])  # fmt: skip
def test_the_builder_that_serve_calls_takes_types_at_their_word(changes: dict[str, Any], reason: str) -> None:
    # As Serve calls it: Serve would parse leniently by itself if the builder named a model of its own.
    with pytest.raises(ConfigError, match=rf"^args\..*{re.escape(reason)}"):
        call_user_app_builder_with_args_if_necessary(build, {**ARGS, **changes})


def test_the_installed_ray_is_the_one_that_the_router_is_written_for() -> None:
    ray_compat.check_ray()


def test_another_ray_is_refused_with_what_to_install() -> None:
    with pytest.raises(UnsupportedVersionError, match=r'pip install "ray\[serve\]==2.60.0"'):
        ray_compat.check_ray(version="2.61.0")


@pytest.mark.parametrize("missing", ray_compat.ROUTER_SIGNATURES)
def test_a_router_whose_hooks_differ_is_refused_by_name(missing: str) -> None:
    def other(self: object, something: object) -> None: ...

    hooks = {name: getattr(ray_compat.RequestRouter, name) for name in ray_compat.ROUTER_SIGNATURES}
    with pytest.raises(UnsupportedVersionError, match=missing):
        ray_compat.check_ray(router=type("Changed", (), {**hooks, missing: other}))
    with pytest.raises(UnsupportedVersionError, match=missing):
        ray_compat.check_ray(router=type("Gone", (), {k: v for k, v in hooks.items() if k != missing}))
