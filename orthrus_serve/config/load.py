"""Reads a whole Ray Serve file into frozen values, or says what is wrong with it.

Guards: duplicate and unknown keys at every level (Serve itself ignores what it does not know), wrong types, contradictions
between `args` and `deployments`. Leaves out whether the named files exist (`check.py`) and values that only Ray reads.
"""

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import ValidationError
from typing_extensions import override

from orthrus_serve.config.arms import arm_problems, filled_in, live_problems, routing_of
from orthrus_serve.config.complaint import KeyPath, did_you_mean, join, sentences, type_of, unknown_key
from orthrus_serve.config.embedder import card_memory_problems, switch_problem
from orthrus_serve.config.placement import placement_problems
from orthrus_serve.config.roles import ROLES
from orthrus_serve.config.schema import AppArgs, FrontLiveSpec, LiveSpec
from orthrus_serve.config.section import Section
from orthrus_serve.config.serve_keys import SERVE_FILE, Keys
from orthrus_serve.config.vllm_keys import refused_vllm_keys
from orthrus_serve.errors import ConfigError
from orthrus_serve.types import TopologyName

IMPORT_PATH = "orthrus_serve.app:build"
FRONT, ENGINE = "Front", "Engine"  # names of deployments
PROXY_LOCATIONS = ("Disabled", "HeadOnly", "EveryNode")

# Ports that a Ray head node takes for itself by default.
RAY_PORTS = {6379: "Ray's control store", 8265: "Ray's dashboard", 10001: "Ray's client server", 52365: "Ray's agent"}
DEFAULT_HTTP_PORT, DEFAULT_GRPC_PORT = 8000, 9000

_Live = TypeVar("_Live", bound=Section)


@dataclass(frozen=True)
class Application:
    """One Orthrus application of a Serve file. `live` and `front` are the `user_config` of its engines and of its Fronts, where
    the file sets them; with arms, `arm_live` has that of each arm's engines."""

    name: str
    route_prefix: str | None
    args: AppArgs
    live: LiveSpec
    path: KeyPath
    front: FrontLiveSpec = field(default_factory=FrontLiveSpec)
    arm_live: Mapping[str, LiveSpec] = field(default_factory=dict[str, LiveSpec])

    def of_arm(self, arm: str) -> "Application":
        """One arm as an application of its own; the application itself for the empty name."""
        if not arm:
            return self
        front = FrontLiveSpec(**routing_of(self.front, arm).model_dump())
        return replace(self, args=self.args.by_arm[arm], live=self.arm_live[arm], front=front, arm_live={})


@dataclass(frozen=True)
class ServeFile:
    """What a Serve file says, as far as Orthrus reads it. Applications of other packages are left to Ray."""

    source: str
    host: str
    port: int
    applications: tuple[Application, ...]


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice: PyYAML would keep the last one."""

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            # A merged mapping (<<) may be overridden; a key beside it may not.
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise ConfigError(f"line {key.start_mark.line + 1}: the key {key.value!r} is given twice")
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_serve_file(path: str | Path) -> ServeFile:
    """Read and validate a Serve file.

    Raises:
        ConfigError: the file cannot be read or is wrong; one line per problem, each naming the key.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not text in UTF-8") from error
    return parse_serve_file(text, source=str(path))


def parse_serve_file(text: str, source: str = "the file") -> ServeFile:
    """`read_serve_file` for a text that was read already; `source` names it in errors."""
    try:
        return _parse(_load_yaml(text), source)
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply, or an anchor that holds itself") from None
    except ConfigError as error:
        raise ConfigError("\n".join(f"{source}: {line}" for line in str(error).splitlines())) from error


def parse_args(args: Mapping[str, Any], prefix: KeyPath = ()) -> AppArgs:
    """The `args` of an Orthrus application as frozen values.

    Types are taken at their word: `"2"` is not a number and `true` is not 1.

    Raises:
        ConfigError: one line per problem, each naming the key below `prefix`.
    """
    _refuse(_implausible(args, prefix))
    try:
        # JSON mode is strict about scalars, yet takes a list where a tuple is meant.
        parsed = AppArgs.model_validate_json(json.dumps(filled_in(args, prefix)), strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(sentences(error, AppArgs, prefix))) from error
    _refuse(arm_problems(parsed, prefix))
    sections = {"vllm": parsed.vllm, **{f"arms.{name}.vllm": arm.vllm for name, arm in parsed.arms.items()}}
    if parsed.embedder is not None:
        sections["embedder.vllm"] = parsed.embedder.vllm
    _refuse([line for key, section in sections.items() for line in refused_vllm_keys(section, join((*prefix, key)))])
    vllms = [arm.vllm for arm in parsed.by_arm.values()]
    below = f"{join(prefix)}." if prefix else ""
    gpus = parsed.num_gpus_per_replica
    problems = [line for vllm in vllms for line in placement_problems(gpus, vllm, below)]
    for arm in parsed.by_arm.values():
        if arm.embedder is not None:
            problems += placement_problems(gpus, arm.embedder.vllm, f"{below}embedder.")
            problems += card_memory_problems(gpus, arm.vllm, arm.embedder.vllm, below)
    _refuse(list(dict.fromkeys(problems)))
    return parsed


def _load_yaml(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{where}not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from error


def _parse(data: Any, source: str) -> ServeFile:
    if not isinstance(data, dict):
        raise ConfigError(f"must be a mapping with the key 'applications', got {type_of(data)}")
    file = cast(dict[str, Any], data)
    _refuse(_implausible({key: value for key, value in file.items() if key != "applications"}, ()))
    _refuse(_unknown_keys(file, SERVE_FILE, ()))
    entries = file.get("applications")
    if not isinstance(entries, list) or not entries:
        raise ConfigError("applications: must be a list with at least one application")
    host, port = _address(file)
    applications = [_application(entry, index) for index, entry in enumerate(cast(list[Any], entries))]
    ours = tuple(application for application in applications if application is not None)
    if not ours:
        raise ConfigError(f"applications: none has import_path {IMPORT_PATH}")
    _refuse(_clashes(cast(list[dict[str, Any]], entries)))
    return ServeFile(source=source, host=host, port=port, applications=ours)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))


def _implausible(value: Any, path: KeyPath) -> list[str]:
    """Values that YAML can hold and JSON cannot: Serve sends its configuration as JSON."""
    if isinstance(value, Mapping):
        lines: list[str] = []
        for key, inner in cast(Mapping[Any, Any], value).items():
            if isinstance(key, str):
                lines += _implausible(inner, (*path, key))
            else:
                lines.append(f"{join(path)}: the key {key!r} must be text: quote it")
        return lines
    if isinstance(value, list | tuple):
        entries = cast(list[Any], value)
        return [line for index, inner in enumerate(entries) for line in _implausible(inner, (*path, index))]
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{join(path)}: must be a finite number, got {value}"]
    if value is None or isinstance(value, str | int | float):
        return []
    return [f"{join(path)}: must be text, a number, a list or a mapping, got a {type(value).__name__}"]


def _unknown_keys(value: Any, keys: Keys, path: KeyPath) -> list[str]:
    """Keys that Ray's schema does not have, at every level that it describes; lists are described by their entries."""
    if isinstance(value, list) and path[-1:] in (("applications",), ("deployments",)):
        entries = cast(list[Any], value)
        return [line for index, entry in enumerate(entries) for line in _unknown_keys(entry, keys, (*path, index))]
    if value is None:
        return []
    if not isinstance(value, dict):
        return [f"{join(path)}: must be a mapping, got {type_of(value)}"]
    lines: list[str] = []
    for key, inner in cast(dict[str, Any], value).items():
        below = keys.get(key)
        if key not in keys:
            lines.append(unknown_key((*path, key), keys))
        elif below is not None:
            lines += _unknown_keys(inner, below, (*path, key))
    return lines


def _address(file: dict[str, Any]) -> tuple[str, int]:
    location = file.get("proxy_location", "EveryNode")
    if location not in PROXY_LOCATIONS:
        hint = did_you_mean(str(location), PROXY_LOCATIONS)
        raise ConfigError(f"proxy_location: must be one of {', '.join(PROXY_LOCATIONS)}, got {type_of(location)}{hint}")
    http: dict[str, Any] = file.get("http_options") or {}
    host, port = http.get("host", "0.0.0.0"), http.get("port", DEFAULT_HTTP_PORT)
    if not isinstance(host, str) or not host:
        raise ConfigError(f"http_options.host: must be an address, got {type_of(host)}")
    timeout_s = http.get("request_timeout_s")
    if timeout_s is not None and (
        isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s <= 0
    ):
        raise ConfigError(f"http_options.request_timeout_s: must be more than 0 seconds, got {type_of(timeout_s)}")
    _check_port(port, "http_options.port")
    grpc = cast("dict[str, Any] | None", file.get("grpc_options"))
    if grpc is not None:
        grpc_port = grpc.get("port", DEFAULT_GRPC_PORT)
        _check_port(grpc_port, "grpc_options.port")
        if grpc_port == port:
            raise ConfigError(f"grpc_options.port: {port} is also http_options.port")
    return host, cast(int, port)


def _check_port(port: Any, path: str) -> None:
    if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
        raise ConfigError(f"{path}: must be a port from 1 to 65535, got {type_of(port)}")
    if port in RAY_PORTS:
        raise ConfigError(f"{path}: {port} is taken by {RAY_PORTS[port]}; choose another port")


def _application(entry: Any, index: int) -> Application | None:
    """The application, or None when another package owns it."""
    path: KeyPath = ("applications", index)
    if not isinstance(entry, dict):
        raise ConfigError(f"{join(path)}: must be a mapping, got {type_of(entry)}")
    application = cast(dict[str, Any], entry)
    for key in ("host", "port"):
        if key in application:
            raise ConfigError(f"{join((*path, key))}: belongs to http_options at the top of the file")
    _check_names(application, path)
    import_path = application.get("import_path")
    if not isinstance(import_path, str):
        raise ConfigError(
            f"{join((*path, 'import_path'))}: must be text such as {IMPORT_PATH}, got {type_of(import_path)}"
        )
    if import_path.replace(":", ".") != IMPORT_PATH.replace(":", "."):
        if import_path.startswith("orthrus") or did_you_mean(import_path, [IMPORT_PATH]):
            raise ConfigError(
                f"{join((*path, 'import_path'))}: {import_path!r} does not exist; did you mean {IMPORT_PATH!r}?"
            )
        return None
    if not isinstance(application.get("args"), dict):
        raise ConfigError(f"{join((*path, 'args'))}: must be a mapping with at least topology, model and adapters")
    args = parse_args(cast(dict[str, Any], application["args"]), (*path, "args"))
    names = [FRONT, *(engine_deployment(arm) for arm in args.by_arm)]
    overridden = _overridden(application.get("deployments") or [], (*path, "deployments"), names)
    lives = {arm: parse_live(*overridden.get(engine_deployment(arm), (None, ())), LiveSpec) for arm in args.by_arm}
    front_config, where = overridden.get(FRONT, (None, ()))
    front = parse_live(front_config, where, FrontLiveSpec)
    _refuse(live_problems(args, front, where))
    if front.topology in ROLES and args.num_replicas < 2:
        raise ConfigError(f"{join(where)}.topology: {front.topology} needs args.num_replicas of at least 2")
    for arm, of_arm in args.by_arm.items():
        wanted: dict[str, TopologyName | None] = {
            FRONT: routing_of(front, arm).topology,
            engine_deployment(arm): lives[arm].topology,
        }
        problems = {name: switch_problem(of_arm.topology, topology) for name, topology in wanted.items()}
        _refuse([f"{join(overridden[name][1])}.topology: {why}" for name, why in problems.items() if why is not None])
    name, route = application.get("name", "default"), application.get("route_prefix", "/")
    live = lives.pop("", LiveSpec())
    return Application(name=name, route_prefix=route, args=args, live=live, path=path, front=front, arm_live=lives)


def engine_deployment(arm: str = "") -> str:
    """The name of the deployment of an arm's engines."""
    return f"{ENGINE}-{arm}" if arm else ENGINE


def _check_names(application: dict[str, Any], path: KeyPath) -> None:
    name, route = application.get("name", "default"), application.get("route_prefix", "/")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{join((*path, 'name'))}: must be text, got {type_of(name)}")
    if route is not None and (not isinstance(route, str) or not route.startswith("/")):
        raise ConfigError(f"{join((*path, 'route_prefix'))}: must begin with '/', got {type_of(route)}")


def _overridden(deployments: Any, path: KeyPath, names: Sequence[str]) -> dict[str, tuple[Any, KeyPath]]:
    """Check what an application's `deployments` override, and return their `user_config`, and where it stands, by name."""
    if not isinstance(deployments, list):
        raise ConfigError(f"{join(path)}: must be a list, got {type_of(deployments)}")
    found: dict[str, tuple[Any, KeyPath]] = {}
    for index, entry in enumerate(cast(list[Any], deployments)):
        here = (*path, index)
        _refuse(_implausible(entry, here))
        deployment = cast(dict[str, Any], entry if isinstance(entry, dict) else {})
        name = str(deployment.get("name"))
        if name not in names or name in found:
            hint = did_you_mean(name, names) if name not in found else "; it is there twice"
            raise ConfigError(f"{join((*here, 'name'))}: must be {' or '.join(names)}, got {type_of(name)}{hint}")
        found[name] = deployment.get("user_config"), (*here, "user_config")
        for key, instead in (
            ("num_replicas", "args.front.num_replicas" if name == FRONT else "args.num_replicas"),
            ("request_router_config", "args.topology"),
            ("autoscaling_config", "args.autoscaling"),
        ):
            if key in deployment:
                raise ConfigError(f"{join((*here, key))}: would override what args say; write {instead} instead")
    return found


def parse_live(user_config: Any, prefix: KeyPath, spec: type[_Live]) -> _Live:
    """The `user_config` of a deployment as frozen values; nothing at all leaves everything as it is.

    Raises:
        ConfigError: one line per problem, each naming the key below `prefix`.
    """
    _refuse(_implausible(user_config, prefix))
    try:
        return spec.model_validate_json(json.dumps({} if user_config is None else user_config), strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(sentences(error, spec, prefix))) from error


def _clashes(entries: list[dict[str, Any]]) -> list[str]:
    """Two applications may not share a name or a route."""
    lines: list[str] = []
    for key, default in (("name", "default"), ("route_prefix", "/")):
        seen: set[str] = set()
        for index, entry in enumerate(entries):
            value = cast("str | None", entry.get(key, default))
            if value in seen:
                lines.append(f"{join(('applications', index, key))}: {value!r} is also that of another application")
            if value is not None:
                seen.add(value)
    return lines
