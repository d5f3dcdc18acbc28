"""What a Serve file would start, in lines to read: replicas, GPUs, kinds, policy, router rule, names. Starts nothing.

The topology printed is the value from which `app.py` builds.
"""

from dataclasses import replace
from typing import Any

from orthrus_serve.config.arms import weights_of
from orthrus_serve.config.load import Application, ServeFile, engine_deployment
from orthrus_serve.config.schema import AppArgs, RoutingSpec
from orthrus_serve.policy.roles import Split
from orthrus_serve.policy.topology import (
    PRESETS,
    Topology,
    default_fronts,
    describe,
    describe_fronts,
    describe_pools,
    describe_total,
    expand,
)


def plan_lines(file: ServeFile) -> list[str]:
    """The plan of every application in the file, an empty line between two."""
    lines: list[str] = []
    for application in file.applications:
        lines += [*([""] if lines else []), *_application_lines(application, file)]
    return lines


def topology_of(args: AppArgs, live: RoutingSpec | None = None, *, pool_name: str | None = None) -> Topology:
    """The topology that `args` ask for, with what the `user_config` of the Fronts (`live`) changes right after the start.

    Args:
        args: of an application without arms, or of one arm (`AppArgs.by_arm`).

    Raises:
        ConfigError: it cannot be had with so many replicas.
    """
    wanted = args.routed(live)
    return expand(
        wanted.topology or args.topology,
        num_replicas=args.num_replicas,
        num_gpus_per_replica=args.num_gpus_per_replica,
        num_fronts=num_fronts(args),
        split=None if wanted.ratio is None else Split(*wanted.ratio),
        router_rule=wanted.rule,
        pool_name=pool_name,
    )


def num_fronts(args: AppArgs) -> int:
    """Fronts of an application: as asked, or `default_fronts` for the engine replicas of all arms."""
    return args.front.num_replicas or default_fronts(args.most_replicas, args.num_gpus_per_replica)


def planned_topology(application: Application, *, pool_name: str | None = None) -> Topology:
    """The topology as it runs right after the start, with the policy that the engines' `user_config` asks for."""
    topology = topology_of(application.args, application.front, pool_name=pool_name)
    live = application.live
    policy = live.policy or (PRESETS[live.topology].pool.policy if live.topology else None)
    if policy is None:
        return topology
    return replace(topology, pools=tuple(replace(pool, policy=policy) for pool in topology.pools))


def _application_lines(application: Application, file: ServeFile) -> list[str]:
    args = application.args
    route = "" if application.route_prefix in (None, "/") else application.route_prefix
    lines = [f"application  {application.name} at http://{file.host}:{file.port}{route}"]
    names = [
        f"generates    {args.model.name}: {args.model.path}",
        *(f"embeds       {line}" for line in _adapter_lines(args)),
    ]
    if args.arms:
        return [*lines, *_arms_lines(application), *names]
    topology = planned_topology(application)
    budget = f"step budget  {_budget(application, topology)}"
    return [*lines, *describe(topology), *_connector_lines(args), *_autoscaling_lines(args), *names, budget]


def _arms_lines(application: Application) -> list[str]:
    args, mirror = application.args, application.front.mirror
    lines = [describe_fronts(num_fronts(args))]
    for name, weight in weights_of(args, application.front).items():
        of_arm = application.of_arm(name)
        topology = planned_topology(of_arm, pool_name=engine_deployment(name))
        share = f"arm          {name}: {weight:.4g} of the requests"
        if mirror is not None and mirror.target == name:
            share += f", and copies of {mirror.share:.4g} of what {mirror.source} answers"
        below = [describe_total(topology), *describe_pools(topology), *_connector_lines(of_arm.args)]
        below += _autoscaling_lines(of_arm.args)
        lines += [share, *(f"  {line}" for line in (*below, f"step budget  {_budget(of_arm, topology)}"))]
    return lines


def _connector_lines(args: AppArgs) -> list[str]:
    if args.kv_connector is None:
        return []
    return [f"KV           moved by {args.kv_connector}; what nobody fetches is freed after {args.kv_lease_s} s"]


def _autoscaling_lines(args: AppArgs) -> list[str]:
    spec = args.autoscaling
    if spec is None:
        return []
    return [
        f"autoscaling  {spec.min_replicas} to {spec.max_replicas} replicas, {args.num_replicas} at first: "
        f"{spec.target_tokens_per_replica} remaining tokens each at most; up after {spec.upscale_delay_s:g} s, "
        f"down after {spec.downscale_delay_s:g} s"
    ]


def _adapter_lines(args: AppArgs) -> list[str]:
    lines: list[str] = []
    for name, spec in args.adapters.items():
        recipe = [f"{spec.pooling} pooling", *(["EOS appended"] if spec.append_eos else [])]
        recipe += ["normalised"] if spec.normalize else []
        alias = f"; also answers /v1/embeddings for {args.model.name}" if name == args.base_name_adapter else ""
        lines.append(f"{name}: {spec.path} ({', '.join(recipe)}{alias})")
    if args.embedder is not None:
        pooling = f"{args.embedder.pooling} pooling" if args.embedder.pooling else "pooling as its files say"
        alias = "" if args.arms else f"; also answers /v1/embeddings for {args.model.name}"
        lines.append(f"{args.embedder.name}: {args.embedder.path} (a model of its own, {pooling}{alias})")
    return lines


def _tokens(tokens: Any) -> str:
    return "vLLM's default for this device" if tokens is None else f"{tokens} tokens"


def _budget(application: Application, topology: Topology) -> str:
    args, live = application.args, application.live
    budget = _tokens(live.step_tokens or args.vllm.get("max_num_batched_tokens"))
    if args.embedder is not None:
        share = args.engine.min_share if live.min_share is None else live.min_share
        rule = live.card_share or args.engine.card_share or "remaining"
        of_embedder = _tokens(args.embedder.vllm.get("max_num_batched_tokens"))
        told = {
            "remaining": f"scaled by what both have left, each at least {share:g}, all of it where the other is idle",
            "static": "half of it at all times",
            "whole": "all of it at all times",
        }
        return f"generator {budget}, embedder {of_embedder}; card_share {rule}: {told[rule]}"
    if any(pool.policy == "orthrus" for pool in topology.pools):
        share = args.engine.min_share if live.min_share is None else live.min_share
        budget += f"; each kind with waiting work gets at least {share:g} of it"
        weight = args.engine.embed_weight if live.embed_weight is None else live.embed_weight
        budget += "" if weight == 1 else f"; an embedding token counts as {weight:g} of a generation's prompt"
    return budget
