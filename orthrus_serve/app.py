"""Composition root: from the `args` of a Serve file to bound deployments. `import_path: orthrus_serve.app:build`.

Decides what Serve must know about each deployment. Leaves out everything that happens at run time, and vLLM, which only the
engine replicas load.
"""

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from orthrus_serve.config.environment import replica_environment
from orthrus_serve.config.load import engine_deployment, parse_args
from orthrus_serve.config.schema import AppArgs
from orthrus_serve.ops.plan import num_fronts, topology_of
from orthrus_serve.policy.stream_pacing import Sharers
from orthrus_serve.policy.topology import Topology
from orthrus_serve.serving.autoscaling import autoscaling_config, report_environment
from orthrus_serve.serving.engine_replica import EngineReplica, StartEngine, start_engine
from orthrus_serve.serving.front import Front
from orthrus_serve.serving.ray_compat import check_ray

# Admission is decided in tokens, by the Front and the engine's own queue; Serve's count of requests must never be the limit.
MAX_ONGOING_REQUESTS = 100_000
# A stopping replica finishes what it runs. Longer than the longest generation: 32k tokens at 20 a second, and some.
GRACEFUL_SHUTDOWN_S = 1800.0
# How long a request waits when no replica runs (all are loading) before it is answered with 503.
REPLICA_WAIT_S = 30.0
# How many replicas Serve gives a new configuration at a time; each is not listed for some tenths of a second. Its default, a
# fifth, would make a live switch of eight replicas take seconds.
ROLLING_UPDATE_RATIO = 0.5
HEALTH_CHECK_PERIOD_S = 5.0
HEALTH_CHECK_TIMEOUT_S = 30.0


def build(args: Mapping[str, Any]) -> Application:
    """The application for the `args` of a Serve file.

    Not annotated with the model itself: Serve would parse `args` leniently then, and take `"2"` for a number.

    Raises:
        ConfigError: `args` are wrong; one line per problem.
        UnsupportedVersionError: another Ray than the one that the router is written for.
    """
    return compose(parse_args(args, ("args",)), start_engine)


def compose(args: AppArgs, start: StartEngine, replica_wait_s: float = REPLICA_WAIT_S) -> Application:
    """`build`, with the function that starts an engine, and the wait for a first replica, as arguments."""
    check_ray()
    engines: dict[str, Any] = {}
    fronts = num_fronts(args)
    for arm, of_arm in args.by_arm.items():
        topology = topology_of(of_arm, pool_name=engine_deployment(arm))
        deployment = _engine_deployment(of_arm, topology, {"replica_wait_s": replica_wait_s})
        others = Sharers(fronts, args.most_replicas - of_arm.most_replicas)
        engines[arm] = deployment.bind(of_arm, start, others)
    return _front_deployment(args).bind(args, engines, fronts)


def _engine_deployment(args: AppArgs, topology: Topology, routing: dict[str, Any]) -> serve.Deployment:
    pool = topology.pools[0]
    size: dict[str, Any] = {"num_replicas": pool.num_replicas}
    environment = replica_environment(args)
    if args.autoscaling is not None:
        size = {"autoscaling_config": autoscaling_config(args.autoscaling, pool.num_replicas)}
        environment |= report_environment(args.autoscaling)
    router: Any = RequestRouterConfig
    deployment: Any = serve.deployment(
        EngineReplica,
        name=pool.name,
        **size,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        user_config={"topology": topology.name, "policy": pool.policy, "min_share": args.engine.min_share},
        graceful_shutdown_timeout_s=GRACEFUL_SHUTDOWN_S,
        rolling_update_percentage=ROLLING_UPDATE_RATIO,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        request_router_config=router(
            request_router_class="orthrus_serve.serving.router.RemainingTokenRouter",
            request_router_kwargs=routing,
        ),
        ray_actor_options={
            "num_cpus": args.num_cpus_per_replica,
            "num_gpus": pool.num_gpus_per_replica,
            "runtime_env": {"env_vars": environment},
        },
    )
    return deployment


def _front_deployment(args: AppArgs) -> serve.Deployment:
    deployment: Any = serve.deployment(
        serve.ingress()(Front),
        name="Front",
        num_replicas=num_fronts(args),
        user_config={} if args.arms else {"topology": args.topology},
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=GRACEFUL_SHUTDOWN_S,
        rolling_update_percentage=ROLLING_UPDATE_RATIO,
        ray_actor_options={"num_cpus": args.front.num_cpus},
    )
    return deployment
