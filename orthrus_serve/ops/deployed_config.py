"""The configuration that Serve has deployed: finding our application in it, changing what may change live, telling when it did.

Pure: mappings in, mappings out. Guards: nothing but `user_config` or the number of engines differs afterwards, so that nothing
restarts; applications of
others go back as they came, since Serve removes what a new configuration leaves out. Leaves out how it is fetched and put.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import yaml

from orthrus_serve.config.arms import routing_problems
from orthrus_serve.config.complaint import did_you_mean
from orthrus_serve.config.embedder import switch_problem
from orthrus_serve.config.load import FRONT, IMPORT_PATH, engine_deployment, parse_args, parse_live
from orthrus_serve.config.roles import ROLES, RoutingSpec
from orthrus_serve.config.schema import AppArgs, LiveSpec
from orthrus_serve.errors import ConfigError
from orthrus_serve.ops.plan import topology_of
from orthrus_serve.policy.roles import Split
from orthrus_serve.policy.topology import PRESETS, Topology
from orthrus_serve.types import RouterRule, TopologyName


@dataclass(frozen=True)
class Deployed:
    """One application of ours, as Serve has it. `url` is where its Fronts answer; with `arm`, `args` are those of that arm."""

    name: str
    url: str
    args: AppArgs
    arm: str = ""

    @property
    def label(self) -> str:
        """What it is called in sentences."""
        return f"{self.name}, arm {self.arm}" if self.arm else self.name


@dataclass(frozen=True)
class Wanted:
    """What a switch asks for. `rule` and `split` None: as the application's `args` and the topology have them.

    `engine` are live settings of the engines beside the policy; what is not named there stays.
    """

    topology: TopologyName
    rule: RouterRule | None = None
    split: Split | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)


def parse_wanted(
    topology: str, rule: str | None = None, split: str | None = None, settings: Sequence[str] = ()
) -> Wanted:
    """What the command line asks for.

    Args:
        split: `1:3`, embedding to generating replicas; for topologies with roles only.
        settings: `step_tokens=1024` and the like: what `LiveSpec` has beside the policy.

    Raises:
        ConfigError: no such topology, rule, split or setting.
    """
    name = _one_of(topology, "topology", get_args(TopologyName))
    if split is not None and not PRESETS[name].is_split:
        raise ConfigError(
            f"--split: in topology {name} every replica serves both kinds; it goes with dedicated and disagg_pd"
        )
    return Wanted(
        topology=name,
        rule=None if rule is None else _one_of(rule, "rule", get_args(RouterRule)),
        split=None if split is None else _parse_split(split),
        engine=_parse_settings(settings),
    )


def find_application(details: Mapping[str, Any], name: str | None = None) -> Deployed:
    """Our application in Ray's `ServeInstanceDetails`.

    Raises:
        ConfigError: there is none of that name, it is not ours, or several could be meant.
    """
    applications: Mapping[str, Any] = details["applications"]
    if not applications:
        raise ConfigError("Serve runs there, and no application does")
    ours = [found for found in applications if _is_ours(applications[found])]
    if name is None:
        if not ours:
            raise ConfigError(f"no application there was started from a file with import_path {IMPORT_PATH}")
        if len(ours) > 1:
            raise ConfigError(f"several applications there are ours; name one with --app: {', '.join(sorted(ours))}")
        name = ours[0]
    if name not in applications:
        hint = did_you_mean(name, applications) or f"; there are {', '.join(sorted(applications))}"
        raise ConfigError(f"there is no application {name!r}{hint}")
    if name not in ours:
        raise ConfigError(f"application {name!r} was not started from a file with import_path {IMPORT_PATH}")
    config = applications[name]["deployed_app_config"]
    return Deployed(name, _url(details, config), parse_args(config.get("args") or {}, (name, "args")))


def of_arm(deployed: Deployed, arm: str | None) -> Deployed:
    """The arm of that name as an application of its own; without arms, the application itself.

    Raises:
        ConfigError: there are arms and none is named, or there is none of that name.
    """
    arms = deployed.args.arms
    if not arms:
        if arm is not None:
            raise ConfigError(f"--arm: {deployed.name} has no arms")
        return deployed
    if arm is None:
        raise ConfigError(f"{deployed.name} has arms; name one with --arm: {', '.join(arms)}")
    return replace(deployed, args=deployed.args.by_arm[_one_of(arm, "arm", tuple(arms))], arm=arm)


def settled(wanted: Wanted, deployed: Deployed, num_engines: int) -> Wanted:
    """`wanted` with its roles said outright, where it has any: as asked, as `args` have them, or one to all others.

    Raises:
        ConfigError: there are not two engine replicas to give roles to, nothing moves KV between them, or other engines would
            be needed.
    """
    problem = switch_problem(deployed.args.topology, wanted.topology)
    if problem is not None:
        raise ConfigError(problem)
    if not PRESETS[wanted.topology].is_split:
        return wanted
    if num_engines < 2:
        raise ConfigError(
            f"topology {wanted.topology} needs at least 2 engine replicas, {ROLES[wanted.topology]}; "
            f"{deployed.label} runs {num_engines}"
        )
    problems = routing_problems(deployed.args, RoutingSpec(topology=wanted.topology), (deployed.label,))
    if problems:
        raise ConfigError("\n".join(problems))
    ratio = deployed.args.routed(RoutingSpec(topology=wanted.topology)).ratio
    split = wanted.split or (Split(*ratio) if ratio else Split(1, num_engines - 1))
    return replace(wanted, split=split)


def switched(details: Mapping[str, Any], name: str, wanted: Wanted, arm: str = "") -> dict[str, Any]:
    """The configuration to put (Ray's `ServeDeploySchema`): as deployed, with the `user_config` that brings `wanted` about.

    Raises:
        ConfigError: Serve would restart the replicas.
    """
    config = deploy_config(details)
    application = _application(config, name)
    engine = _deployment(application, engine_deployment(arm))
    kept = {key: value for key, value in (engine.get("user_config") or {}).items() if key not in ("topology", "policy")}
    policy = PRESETS[wanted.topology].pool.policy
    engine["user_config"] = {**kept, **wanted.engine, "topology": wanted.topology, "policy": policy}
    front, told = _deployment(application, FRONT), live_spec(wanted).model_dump(exclude_none=True)
    if arm:
        before = front.get("user_config") or {}
        told = {**before, "arms": {**(before.get("arms") or {}), arm: told}}
    front["user_config"] = told
    return config


def weighted(details: Mapping[str, Any], name: str, weights: Mapping[str, float]) -> dict[str, Any]:
    """The configuration to put: as deployed, with these weights of its arms."""
    config = deploy_config(details)
    front = _deployment(_application(config, name), FRONT)
    front["user_config"] = {**(front.get("user_config") or {}), "weights": dict(weights)}
    return config


def scaled(details: Mapping[str, Any], name: str, num_replicas: int, arm: str = "") -> dict[str, Any]:
    """The configuration to put: as deployed, with so many engine replicas. `args` stay: a change there restarts everything."""
    config = deploy_config(details)
    _deployment(_application(config, name), engine_deployment(arm))["num_replicas"] = num_replicas
    return config


def check_scale(details: Mapping[str, Any], deployed: Deployed, num_replicas: int) -> None:
    """Refuses a number that cannot be.

    Raises:
        ConfigError: the application cannot run with so many engine replicas, or decides itself how many run.
    """
    if deployed.args.autoscaling is not None:
        raise ConfigError(f"{deployed.label} scales itself (args.autoscaling): change its file and deploy that")
    live = _deployment(_application(deploy_config(details), deployed.name), FRONT).get("user_config") or {}
    if deployed.arm:
        live = (live.get("arms") or {}).get(deployed.arm) or {}
    topology: TopologyName = live.get("topology") or deployed.args.topology
    fewest = 2 if PRESETS[topology].is_split else 1
    if num_replicas < fewest:
        raise ConfigError(f"topology {topology} needs at least {fewest} engine replicas, got {num_replicas}")


def deploy_config(details: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that was deployed from files, as a configuration that would deploy it again. A copy."""
    keys = ("proxy_location", "http_options", "grpc_options", "target_capacity")
    kept = {key: details[key] for key in keys if details.get(key) is not None}
    applications = [one["deployed_app_config"] for one in details["applications"].values()]
    return copy.deepcopy({**kept, "applications": [config for config in applications if config is not None]})


def live_spec(wanted: Wanted) -> RoutingSpec:
    """What the Fronts are told about the pool for `wanted`."""
    roles, split = PRESETS[wanted.topology].roles, wanted.split
    ratio = (
        {} if roles is None or split is None else {wanted.topology: {roles[0]: split.embed, roles[1]: split.generate}}
    )
    return RoutingSpec.model_validate({"topology": wanted.topology, "rule": wanted.rule, **ratio})


def target(wanted: Wanted, deployed: Deployed) -> Topology:
    """What is in force when `wanted` is."""
    return topology_of(deployed.args, live_spec(wanted))


def behind(
    page: Mapping[str, Any], topology: Topology, before: Mapping[str, Any], settings: Mapping[str, Any] | None = None
) -> list[str]:
    """Who does not follow `topology`, or engines' `settings`, yet by the `/status` page, one sentence each; empty when all do.

    `before` is the page before the change: Serve lists a replica no more while it hands it a new configuration, so there must
    be as many as there were.
    """
    front_has = {"topology": topology.name, "rule": topology.router_rule, **topology.ratios}
    engine_has = {"policy": topology.pools[0].policy, **(settings or {})}
    lines = [_sentence("Front", front["front"], front) for front in page["fronts"] if not _has(front, front_has)]
    for engine in page["engines"]:
        is_set = _has(engine, {"topology": topology.name}) and _has(engine.get("settings", {}), engine_has)
        if not is_set:
            lines.append(_sentence("engine", engine["replica"], engine))
    if page["num_fronts_silent"]:
        lines.append(f"{page['num_fronts_silent']} Fronts do not answer")
    for noun, missing in (
        ("Front", _num_missing(before, page, "fronts")),
        ("engine", _num_missing(before, page, "engines")),
    ):
        if missing > 0:
            lines.append(f"{noun}: {missing} less than before; being reconfigured, or gone")
    return lines


def _num_missing(before: Mapping[str, Any], page: Mapping[str, Any], key: str) -> int:
    listed_before, listed = (sum(one.get("listed", True) for one in of[key]) for of in (before, page))
    return listed_before - listed


def refusals(page: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Who refused the last change, and why."""
    told = [(front["front"], front) for front in page["fronts"]]
    told += [(engine["replica"], engine) for engine in page["engines"]]
    return {(who, said["refused"]) for who, said in told if said.get("refused") is not None}


def _has(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return all(found.get(key) == value for key, value in expected.items()) and found.get("refused") is None


def _sentence(noun: str, who: str, said: Mapping[str, Any]) -> str:
    if said.get("refused") is not None:
        return f"{noun} {who} refused: {said['refused']}"
    return f"{noun} {who} {'does not answer' if said.get('answered') is False else 'has not followed'}"


def _one_of(word: str, noun: str, known: tuple[Any, ...]) -> Any:
    if word not in known:
        raise ConfigError(f"there is no {noun} {word!r}{did_you_mean(word, known)}; there are {', '.join(known)}")
    return word


def _parse_split(text: str) -> Split:
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"--split: must be two whole numbers above 0 such as 1:3, embedding to generating; got {text!r}"
        )
    return Split(int(parts[0]), int(parts[1]))


def _parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set: must be NAME=VALUE such as step_tokens=1024; got {setting!r}")
        if name in ("topology", "policy"):
            raise ConfigError(f"--set: {name} is what the topology says")
        try:
            told[name] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"--set: {setting!r} has no value that could be read") from None
        if told[name] is None:
            raise ConfigError(f"--set: {name} needs a value; to lift a limit, name one that is never reached")
    return parse_live(told, ("--set",), LiveSpec).model_dump(exclude_none=True)


def _is_ours(application: Mapping[str, Any]) -> bool:
    config = application.get("deployed_app_config") or {}
    return str(config.get("import_path", "")).replace(":", ".") == IMPORT_PATH.replace(":", ".")


def _url(details: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    http = details.get("http_options") or {}
    host = http.get("host") or "127.0.0.1"
    route = config.get("route_prefix", "/") or "/"
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{http.get('port', 8000)}{route}".rstrip("/")


def _application(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The application of that name, to be changed.

    Raises:
        ConfigError: Serve would restart its replicas.
    """
    (application,) = [one for one in config["applications"] if one.get("name", "default") == name]
    listed = {deployment.get("name") for deployment in application.get("deployments", [])}
    arms = (application.get("args") or {}).get("arms") or ("",)
    names = [FRONT, *(engine_deployment(arm) for arm in arms)]
    if application.get("runtime_env") and not listed.issuperset(names):
        # Serve 2.60 gives an application's runtime_env only to deployments that are listed: listing one now would change what
        # its replicas were started with.
        entries = ", ".join(f"{{name: {one}}}" for one in names)
        raise ConfigError(
            f"application {name!r} has a runtime_env and does not list all its deployments: Serve would restart the replicas. "
            f"Start it from a file with `deployments: [{entries}]` beside runtime_env"
        )
    return application


def _deployment(application: dict[str, Any], name: str) -> dict[str, Any]:
    """The entry of that name under `deployments`, made where there is none."""
    deployments: list[dict[str, Any]] = application.setdefault("deployments", [])
    for deployment in deployments:
        if deployment.get("name") == name:
            return deployment
    deployments.append({"name": name})
    return deployments[-1]
