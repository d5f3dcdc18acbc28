"""Arms of an A/B test against what is set live: weights, mirror, and each arm's own routing. Pure.

Guards: what names no arm, or leaves one out, is refused in a sentence, in the Serve file and at run time alike. Leaves out the
choice of an arm (`policy/arms.py`).
"""

import re
from collections.abc import Mapping
from typing import Any, cast, get_args

from pydantic import ValidationError

from orthrus_serve.config.complaint import KeyPath, did_you_mean, join, sentences
from orthrus_serve.config.roles import ROLES
from orthrus_serve.config.schema import OF_ARMS, AppArgs, FrontLiveSpec, RoutingSpec
from orthrus_serve.errors import ConfigError
from orthrus_serve.types import TopologyName

_ARM_NAME = re.compile(r"[a-z0-9]([a-z0-9_-]{0,30}[a-z0-9])?")


def filled_in(args: Mapping[str, Any], prefix: KeyPath) -> Mapping[str, Any]:
    """`args` with the topology of the first arm at the top, as `AppArgs` has it; without arms, as they are.

    Raises:
        ConfigError: the top says what each arm says for itself.
    """
    arms = args.get("arms")
    if not isinstance(arms, dict) or not arms:
        return args
    given = [key for key in OF_ARMS if key in args]
    if given:
        raise ConfigError(f"{join((*prefix, given[0]))}: each of arms says this for itself; remove it here")
    first: Any = next(iter(cast(dict[str, Any], arms).values()))
    of_first = cast(dict[str, Any], first) if isinstance(first, dict) else {}
    # What is wrong there is said of the arm.
    topology = of_first.get("topology")
    return {**args, "topology": topology if topology in get_args(TopologyName) else "orthrus"}


def arm_problems(args: AppArgs, prefix: KeyPath) -> list[str]:
    """What is wrong with the arms: one sentence each, naming the key below `prefix`."""
    if len(args.arms) == 1:
        return [f"{join((*prefix, 'arms'))}: name at least two, or none"]
    lines: list[str] = []
    for name in args.arms:
        if not _ARM_NAME.fullmatch(name):
            lines.append(
                f"{join((*prefix, 'arms'))}: {name!r} is no name; take up to 32 small letters, digits, - and _ inside"
            )
        try:
            args.of_arm(name)
        except ValidationError as error:  # what the arm itself says: the rest was parsed before
            lines += sentences(error, AppArgs, (*prefix, "arms", name))
    return lines


def live_problems(args: AppArgs, live: FrontLiveSpec, prefix: KeyPath) -> list[str]:
    """What of a Front's `user_config` does not go with `args`: one sentence each, naming the key below `prefix`."""
    if not args.arms:
        given = [key for key in ("weights", "mirror", "arms") if getattr(live, key)]
        lines = [f"{join((*prefix, key))}: goes with args.arms, and there are none" for key in given]
        return lines + routing_problems(args, live, prefix)
    lines = [
        f"{join((*prefix, key))}: each arm has its own; write it below arms"
        for key in RoutingSpec.model_fields
        if getattr(live, key) is not None
    ]
    lines += [_unknown(name, args, (*prefix, "arms")) for name in live.arms if name not in args.arms]
    for name, routing in live.arms.items():
        if name in args.arms:
            lines += routing_problems(args, routing, (*prefix, "arms", name))
            if routing.topology in ROLES and args.arms[name].num_replicas < 2:
                where = join((*prefix, "arms", name, "topology"))
                lines.append(f"{where}: {routing.topology} needs num_replicas of at least 2")
    if live.weights is not None:
        lines += weight_problems(live.weights, args, (*prefix, "weights"))
    if live.mirror is not None:
        ends = {"from": live.mirror.source, "to": live.mirror.target}
        lines += [_unknown(name, args, (*prefix, "mirror", key)) for key, name in ends.items() if name not in args.arms]
        if live.mirror.source == live.mirror.target:
            lines.append(f"{join((*prefix, 'mirror'))}: from and to are the same arm")
    return lines


def routing_problems(args: AppArgs, routing: RoutingSpec, prefix: KeyPath) -> list[str]:
    """What of a pool's live routing does not go with the `args` that its engines were started with."""
    if routing.topology == "disagg_pd" and args.kv_connector is None:
        return [
            f"{join((*prefix, 'topology'))}: disagg_pd moves KV between engines; these were started without kv_connector"
        ]
    return []


def weight_problems(weights: Mapping[str, float], args: AppArgs, prefix: KeyPath) -> list[str]:
    """Weights name every arm and no other, and not all are 0."""
    lines = [_unknown(name, args, prefix) for name in weights if name not in args.arms]
    missing = [name for name in args.arms if name not in weights]
    if missing:
        lines.append(f"{join(prefix)}: {', '.join(missing)} missing; every arm needs a weight, which may be 0")
    elif not any(weights.values()):
        lines.append(f"{join(prefix)}: one must be above 0")
    return lines


def weights_of(args: AppArgs, live: FrontLiveSpec) -> dict[str, float]:
    """The weight of each arm, adding up to 1; alike where none are given."""
    weights = dict.fromkeys(args.by_arm, 1.0) if live.weights is None else live.weights
    return {arm: weight / sum(weights.values()) for arm, weight in weights.items()}


def routing_of(live: FrontLiveSpec, arm: str) -> RoutingSpec:
    """What is set live of one arm's routing; `arm` is empty without arms."""
    return live.arms.get(arm, RoutingSpec()) if arm else live


def _unknown(name: str, args: AppArgs, prefix: KeyPath) -> str:
    hint = did_you_mean(name, args.arms) or f"; there are {', '.join(args.arms)}"
    return f"{join(prefix)}: there is no arm {name!r}{hint}"
