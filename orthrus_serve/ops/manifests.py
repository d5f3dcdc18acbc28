"""Kubernetes objects that run a Serve file on a cluster with KubeRay: from mappings to mappings. Pure.

Decides how many worker pods there are and what each asks for, and what of the file must differ on a cluster: the address, and
where models lie. Guards: whatever Serve is told stands in the file or follows from it. Leaves out the network, disruption and
storage (`manifest_parts.py`), reading and writing files (`manifest_command.py`), and installing KubeRay itself.
"""

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml
from typing_extensions import override

import orthrus_serve
from orthrus_serve.config.load import IMPORT_PATH, Application, parse_serve_file
from orthrus_serve.config.schema import AppArgs
from orthrus_serve.errors import ConfigError
from orthrus_serve.ops import haproxy
from orthrus_serve.ops import manifest_parts as parts
from orthrus_serve.ops.manifest_parts import MODELS_FOLDER, Names

RAY_VERSION = "2.60.0"  # that of the images
OBJECT_STORE_BYTES = 2 * 2**30  # what is above 100 kB passes through it: large request bodies
# How long a pod without a replica is kept, and how long a cluster that was replaced may finish what it still streams.
IDLE_TIMEOUT_S, FINISH_S = 300, 300


@dataclass(frozen=True)
class PodSize:
    """What one worker pod asks for, beside its GPUs. An engine keeps two to three cores busy: its core, its HTTP side."""

    cpus: int = 8
    memory: str = "64Gi"


@dataclass(frozen=True)
class Choices:
    """What the Serve file does not say.

    Attributes:
        num_gpus: GPUs in all, in place of those that follow from the file; None leaves the file's.
        image: for every pod; None is this version's own name, to be pushed to wherever the cluster pulls from.
        high_throughput: HAProxy and a shorter way between Front and replica (deploy/README.md).
    """

    namespace: str = "orthrus"
    num_gpus: int | None = None
    image: str | None = None
    pod: PodSize = PodSize()
    high_throughput: bool = False
    operator_namespace: str = "kuberay-operator"
    monitoring_namespace: str = "monitoring"


@dataclass(frozen=True)
class Fleet:
    """The worker pods: one engine each, or several where an engine takes less than one GPU."""

    num_pods: int
    min_pods: int
    max_pods: int
    num_gpus_per_pod: int

    @property
    def scales(self) -> bool:
        """Whether their number follows the load."""
        return self.min_pods != self.max_pods


def sized(raw: Mapping[str, Any], num_gpus: int | None) -> dict[str, Any]:
    """The file's mapping with as many engines as so many GPUs hold. A copy.

    With `autoscaling`, they are the most that may ever run.

    Raises:
        ConfigError: engines on CPU, GPUs that engines do not divide evenly, or several pools.
    """
    file = copy.deepcopy(dict(raw))
    if num_gpus is None:
        return file
    args = _our_args(file)
    if "arms" in args:
        raise ConfigError("--gpus: the file has several pools (args.arms); write their num_replicas into the file")
    per_replica = args.get("num_gpus_per_replica", 1)
    if per_replica == 0:
        raise ConfigError("--gpus: the file's engines run on CPU (num_gpus_per_replica: 0)")
    num_replicas = num_gpus / per_replica
    if num_replicas < 1 or num_replicas != int(num_replicas):
        raise ConfigError(f"--gpus: engines of {per_replica:g} GPUs do not fill {num_gpus}")
    args["num_replicas"] = int(num_replicas)
    scaling = args.get("autoscaling")
    if scaling is not None:
        scaling["max_replicas"] = int(num_replicas)
        scaling["min_replicas"] = min(scaling.get("min_replicas", 1), int(num_replicas))
    return file


def on_cluster(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The file's mapping as Serve gets it in a cluster: answering on every pod with an engine, models on the volume. A copy.

    `~/models/X` becomes `/models/X`, any other `~/X` too; absolute paths stay.

    Raises:
        ConfigError: a relative path, which would mean another folder in every process.
    """
    file = copy.deepcopy(dict(raw))
    file["proxy_location"] = "EveryNode"
    file["http_options"] = {**(file.get("http_options") or {}), "host": "0.0.0.0"}
    args = _our_args(file)
    named = [(key, args[key]) for key in ("model", "embedder") if args.get(key)]
    for section in ("adapters", "generate_adapters"):
        named += [(f"{section}.{name}", spec) for name, spec in args.get(section, {}).items()]
    named += [(f"{where}.head", spec["head"]) for where, spec in named if isinstance(spec.get("head"), dict)]
    for where, spec in named:
        spec["path"] = _path_on_volume(spec["path"], f"{where}.path")
    return file


def fleet_of(args: AppArgs) -> Fleet:
    """The worker pods for an application's engines."""
    per_replica = args.num_gpus_per_replica
    engines_per_pod = math.floor(1 / per_replica) if 0 < per_replica < 1 else 1
    pools = args.by_arm.values()
    first = sum(pool.num_replicas for pool in pools)
    fewest = sum(pool.num_replicas if pool.autoscaling is None else pool.autoscaling.min_replicas for pool in pools)
    pods = [math.ceil(count / engines_per_pod) for count in (first, fewest, args.most_replicas)]
    return Fleet(*pods, num_gpus_per_pod=math.ceil(per_replica))


def service_documents(raw: Mapping[str, Any], source: str, choices: Choices) -> list[dict[str, Any]]:
    """RayService, PodMonitors, NetworkPolicies and PodDisruptionBudgets for the Serve file that `raw` is.

    Raises:
        ConfigError: the file is wrong, or cannot be sized as asked.
    """
    config = on_cluster(sized(raw, choices.num_gpus))
    text = dump(config)
    file = parse_serve_file(text, source)
    if len(file.applications) != 1 or len(config["applications"]) != 1:
        raise ConfigError(f"{source}: applications: a RayService is made for a file with one application")
    (application,) = file.applications
    fleet = fleet_of(application.args)
    _check_pod(application.args, choices.pod)
    names = names_of(application, choices.namespace)
    return [
        _ray_service(text, file.port, fleet, names, replace(choices, image=image_of(application.args, choices.image))),
        *parts.pod_monitors(names),
        *parts.network_policies(names, file.port, choices.operator_namespace, choices.monitoring_namespace),
        *parts.disruption_budgets(names, fleet.min_pods),
    ]


def dump(value: Any) -> str:
    """YAML in the order given, texts of several lines as blocks."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=120, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, lists of plain values in one line, and no anchors."""

    @override
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


def _represent_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.SequenceNode:
    is_plain = all(isinstance(value, str | int | float) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=is_plain)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, _represent_list)


def _our_args(file: dict[str, Any]) -> dict[str, Any]:
    ours = [
        one for one in file["applications"] if one["import_path"].replace(":", ".") == IMPORT_PATH.replace(":", ".")
    ]
    return ours[0]["args"]


def _path_on_volume(path: str, where: str) -> str:
    if path.startswith("~/"):
        return f"{MODELS_FOLDER}/{path.removeprefix('~/').removeprefix('models/')}"
    if not path.startswith("/"):
        raise ConfigError(f"{where}: must be absolute or begin with ~/ on a cluster, got {path!r}")
    return path


def names_of(application: Application, namespace: str) -> Names:
    """Called as the application is. Another size or topology of it has the same name, and replaces it.

    Raises:
        ConfigError: Kubernetes does not take such a name.
    """
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", application.name):
        raise ConfigError(
            "applications[0].name: on a cluster at most 40 of a-z, 0-9 and -, beginning with a letter; "
            f"got {application.name!r}"
        )
    return Names(application.name, namespace)


def image_of(args: AppArgs, image: str | None) -> str:
    """The image for every pod: `image`, or this version's own name."""
    return image or f"orthrus-serve:{orthrus_serve.__version__}-{'cuda' if args.num_gpus_per_replica else 'cpu'}"


def _check_pod(args: AppArgs, pod: PodSize) -> None:
    needed = args.num_cpus_per_replica + args.front.num_cpus
    if pod.cpus < needed:
        raise ConfigError(
            f"--cpus: an engine and a Front reserve {needed:g} (num_cpus_per_replica, front.num_cpus), got {pod.cpus}"
        )


def _ray_service(text: str, port: int, fleet: Fleet, names: Names, choices: Choices) -> dict[str, Any]:
    cluster: dict[str, Any] = {
        "rayVersion": RAY_VERSION,
        # KubeRay makes the token's Secret and gives it to every container (1.6 and later).
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": fleet.scales,
    }
    if fleet.scales:
        cluster["autoscalerOptions"] = {
            "version": "v2",
            "idleTimeoutSeconds": IDLE_TIMEOUT_S,
            "upscalingMode": "Default",
        }
    cluster["headGroupSpec"] = {
        # No engine, no Front: what serves must not share a pod with what keeps the cluster together.
        "rayStartParams": {**_common_params(), "num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"},
        "template": parts.head_pod(names, _head_container(port, choices)),
    }
    cluster["workerGroupSpecs"] = [
        {
            "groupName": "engines",
            "replicas": fleet.num_pods,
            "minReplicas": fleet.min_pods,
            "maxReplicas": fleet.max_pods,
            "rayStartParams": {
                **_common_params(),
                "num-cpus": str(choices.pod.cpus),
                "num-gpus": str(fleet.num_gpus_per_pod),
            },
            "template": parts.worker_pod(names, _worker_container(port, fleet, choices)),
        }
    ]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": names.metadata(names.name),
        "spec": {
            # Another image or pod starts a second cluster beside this one and moves the traffic when that is ready.
            "upgradeStrategy": {"type": "NewCluster"},
            "rayClusterDeletionDelaySeconds": FINISH_S,
            "excludeHeadPodFromServeSvc": True,
            "serveService": {
                "metadata": {"name": names.name, "labels": names.labels},
                "spec": {"type": "ClusterIP", "ports": [{"name": "serve", "port": port, "targetPort": port}]},
            },
            "serveConfigV2": text,
            "rayClusterConfig": cluster,
        },
    }


def _common_params() -> dict[str, str]:
    return {"object-store-memory": str(OBJECT_STORE_BYTES), "metrics-export-port": str(parts.METRICS_PORT)}


def _environment(choices: Choices) -> list[dict[str, str]]:
    wanted = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HOME": f"{MODELS_FOLDER}/.huggingface",
        # Replicas are told so anyhow; here it holds for every process of the pod.
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": f"{parts.CACHE_FOLDER}/vllm",
        "TRITON_CACHE_DIR": f"{parts.CACHE_FOLDER}/triton",
    }
    if choices.high_throughput:
        wanted |= {**haproxy.SWITCHES, haproxy.BINARY_PATH: f"{parts.BIN_FOLDER}/{haproxy.SCRIPT}"}
    return [{"name": name, "value": value} for name, value in wanted.items()]


def _head_container(port: int, choices: Choices) -> dict[str, Any]:
    ports = {
        "gcs": 6379,
        "dashboard": parts.DASHBOARD_PORT,
        "client": 10001,
        "serve": port,
        "metrics": parts.METRICS_PORT,
        "as-metrics": parts.AUTOSCALER_METRICS_PORT,
        "dash-metrics": parts.DASHBOARD_METRICS_PORT,
    }
    return {
        "name": "ray-head",
        "image": choices.image,
        "env": _environment(choices),
        "ports": [{"name": name, "containerPort": number} for name, number in ports.items()],
        "resources": {"requests": {"cpu": "2", "memory": "8Gi"}, "limits": {"memory": "8Gi"}},
        "startupProbe": parts.probe("/api/local_raylet_healthz", parts.AGENT_PORT, failures=60),
        "livenessProbe": parts.probe("/api/local_raylet_healthz", parts.AGENT_PORT, failures=12),
        "readinessProbe": parts.probe("/api/gcs_healthz", parts.DASHBOARD_PORT, failures=3),
    }


def _worker_container(port: int, fleet: Fleet, choices: Choices) -> dict[str, Any]:
    gpus = {"nvidia.com/gpu": str(fleet.num_gpus_per_pod)} if fleet.num_gpus_per_pod else {}
    size = choices.pod
    return {
        "name": "ray-worker",
        "image": choices.image,
        "env": _environment(choices),
        "ports": [
            {"name": "serve", "containerPort": port},
            {"name": "metrics", "containerPort": parts.METRICS_PORT},
        ],
        "resources": {
            "requests": {"cpu": str(size.cpus), "memory": size.memory, **gpus},
            "limits": {"memory": size.memory, **gpus},
        },
        "startupProbe": parts.probe("/api/local_raylet_healthz", parts.AGENT_PORT, failures=60),
        "livenessProbe": parts.probe("/api/local_raylet_healthz", parts.AGENT_PORT, failures=12),
        # Ready is a pod whose proxy takes requests. There is one only beside an engine or a Front, after it has started.
        "readinessProbe": parts.probe("/-/healthz", port, failures=3),
    }
