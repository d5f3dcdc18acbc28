"""Kubernetes objects around a RayService: pods' common parts, monitors, network, disruptions, the volume with models. Pure.

Guards: nothing runs as root; a Secret is named and never written; selectors match what the pods are labelled with. Leaves out
the RayService itself (`manifests.py`).
"""

from dataclasses import dataclass
from typing import Any

MODELS_FOLDER, CACHE_FOLDER = "/models", "/cache"
BIN_FOLDER = "/opt/orthrus/bin"  # of the images (deploy/docker)
METRICS_PORT, AUTOSCALER_METRICS_PORT, DASHBOARD_METRICS_PORT = 8080, 44217, 44227
DASHBOARD_PORT, AGENT_PORT, DNS_PORT = 8265, 52365, 53
API_SERVER_PORTS = (443, 6443)
CLIENT_LABEL = {"orthrus-serve/client": "true"}
HF_SECRET, HF_SECRET_KEY = "hugging-face", "token"
USER_ID = 1000
SHARED_MEMORY = "8Gi"  # the object store, and what tensor-parallel workers exchange
GRACE_S = 120  # how long a pod that is told to go may take


@dataclass(frozen=True)
class Names:
    """What a RayService's objects are called, and the labels by which they find its pods."""

    name: str
    namespace: str

    @property
    def labels(self) -> dict[str, str]:
        """The label of every object and pod. Not one of `app.kubernetes.io/…`: KubeRay gives its pods those."""
        return {"orthrus-serve/service": self.name}

    @property
    def models_claim(self) -> str:
        """The volume claim that holds the models."""
        return f"{self.name}-models"

    def metadata(self, name: str) -> dict[str, Any]:
        """An object's `metadata`."""
        return {"name": name, "namespace": self.namespace, "labels": self.labels}

    def pods(self, node_type: str | None = None) -> dict[str, Any]:
        """A selector of all pods, or of the `head` or `worker` ones; KubeRay adds that label."""
        extra = {} if node_type is None else {"ray.io/node-type": node_type}
        return {"matchLabels": {**self.labels, **extra}}


@dataclass(frozen=True)
class Fetch:
    """A repository of the Hugging Face hub, or the files of it that match `pattern`, to be put into a folder of the volume."""

    repository: str
    folder: str
    pattern: str | None = None

    @property
    def command(self) -> list[str]:
        """What fetches it; files that are there already are not fetched again."""
        only = [] if self.pattern is None else ["--include", self.pattern]
        return ["hf", "download", self.repository, *only, "--local-dir", self.folder]


def head_pod(names: Names, container: dict[str, Any]) -> dict[str, Any]:
    """The head's pod template. Its service account stays mounted: the autoscaler beside it asks Kubernetes for pods."""
    return _pod(names, container, [], [])


def worker_pod(names: Names, container: dict[str, Any]) -> dict[str, Any]:
    """An engine's pod template: with the models, without a way into Kubernetes, also on nodes that are kept for GPU work."""
    volume = {"name": "models", "persistentVolumeClaim": {"claimName": names.models_claim, "readOnly": True}}
    template = _pod(names, container, [volume], [{"name": "models", "mountPath": MODELS_FOLDER, "readOnly": True}])
    template["spec"]["automountServiceAccountToken"] = False
    template["spec"]["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return template


def _pod(names: Names, container: dict[str, Any], volumes: list[Any], mounts: list[Any]) -> dict[str, Any]:
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}}
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "cache", "mountPath": CACHE_FOLDER}, *mounts]
    spec = {
        "securityContext": _pod_security(),
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [{**container, "volumeMounts": mounts, "securityContext": _container_security()}],
        "volumes": [shm, {"name": "cache", "emptyDir": {}}, *volumes],
    }
    return {"metadata": {"labels": names.labels}, "spec": spec}


def probe(path: str, port: int, *, failures: int) -> dict[str, Any]:
    """A GET every 5 s that may fail `failures` times in a row."""
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": 5,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def pod_monitors(names: Names) -> list[dict[str, Any]]:
    """What Prometheus scrapes: Ray's metrics of every pod, and the server's own `/metrics` once.

    A Front merges the metrics of all engines, so that page is asked for on the head pod only: asked on every pod, each engine's
    numbers would be there once for each pod.
    """
    head_ports = ("metrics", "as-metrics", "dash-metrics")
    return [
        _pod_monitor(names, "head", "head", [{"port": port} for port in head_ports]),
        _pod_monitor(names, "workers", "worker", [{"port": "metrics"}]),
        _pod_monitor(names, "server", "head", [{"port": "serve", "path": "/metrics", "honorLabels": True}]),
    ]


def _pod_monitor(names: Names, suffix: str, node_type: str, endpoints: list[dict[str, Any]]) -> dict[str, Any]:
    cluster = [{"sourceLabels": ["__meta_kubernetes_pod_label_ray_io_cluster"], "targetLabel": "ray_io_cluster"}]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": names.metadata(f"{names.name}-{suffix}"),
        "spec": {
            "selector": names.pods(node_type),
            "podMetricsEndpoints": [{**endpoint, "interval": "15s", "relabelings": cluster} for endpoint in endpoints],
        },
    }


def network_policies(names: Names, port: int, operator: str, monitoring: str) -> list[dict[str, Any]]:
    """Who reaches which port: pods of one cluster each other, clients the API, the operator the dashboard, Prometheus metrics.

    Workers reach each other and DNS and nothing else; the head reaches Kubernetes' API too, for the autoscaler.
    """
    siblings = {"podSelector": names.pods()}
    metrics = (METRICS_PORT, AUTOSCALER_METRICS_PORT, DASHBOARD_METRICS_PORT, port)
    ingress = [
        {"from": [siblings]},
        {"from": [{"namespaceSelector": {"matchLabels": CLIENT_LABEL}}], "ports": _tcp(port)},
        {"from": [_namespace(operator)], "ports": _tcp(DASHBOARD_PORT, AGENT_PORT, port)},
        {"from": [_namespace(monitoring)], "ports": _tcp(*metrics)},
    ]
    dns = {"ports": [{"protocol": protocol, "port": DNS_PORT} for protocol in ("UDP", "TCP")]}
    return [
        _network_policy(names, f"{names.name}-pods", names.pods(), ingress=ingress, egress=[{"to": [siblings]}, dns]),
        _network_policy(names, f"{names.name}-head", names.pods("head"), egress=[{"ports": _tcp(*API_SERVER_PORTS)}]),
    ]


def _network_policy(names: Names, name: str, selector: dict[str, Any], **rules: Any) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": names.metadata(name),
        "spec": {"podSelector": selector, "policyTypes": [rule.capitalize() for rule in rules], **rules},
    }


def disruption_budgets(names: Names, min_workers: int) -> list[dict[str, Any]]:
    """What evictions must leave: the head, and all workers but one; the only one stays as well.

    In numbers that must stay: Kubernetes takes `maxUnavailable` only for pods whose owner has a scale, which no RayCluster has.
    """
    stay = {"head": 1, "worker": max(1, min_workers - 1)}
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": names.metadata(f"{names.name}-{node_type}"),
            "spec": {"minAvailable": count, "selector": names.pods(node_type)},
        }
        for node_type, count in stay.items()
    ]


def models_documents(
    names: Names, size: str, storage_class: str | None, image: str, fetch: list[Fetch]
) -> list[dict[str, Any]]:
    """The namespace, the volume that every worker reads, and the job that fills it."""
    claim: dict[str, Any] = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}}
    if storage_class is not None:
        claim["storageClassName"] = storage_class
    documents: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": names.namespace}},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": names.metadata(names.models_claim),
            "spec": claim,
        },
    ]
    return [*documents, _fetch_job(names, image, fetch)] if fetch else documents


def _fetch_job(names: Names, image: str, fetch: list[Fetch]) -> dict[str, Any]:
    token = {"name": HF_SECRET, "key": HF_SECRET_KEY, "optional": True}
    containers = [
        {
            "name": f"fetch-{number}",
            "image": image,
            "command": one.command,
            "env": [
                {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}},
                {"name": "HF_HOME", "value": f"{MODELS_FOLDER}/.huggingface"},
            ],
            "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "4Gi"}},
            "volumeMounts": [{"name": "models", "mountPath": MODELS_FOLDER}],
            "securityContext": _container_security(),
        }
        for number, one in enumerate(fetch, start=1)
    ]
    # Its pods have another label than the cluster's, whose network policy would keep them from the hub.
    labels = {"orthrus-serve/fetches-for": names.name}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": names.metadata(names.models_claim),
        "spec": {
            "backoffLimit": 4,
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "restartPolicy": "OnFailure",
                    "automountServiceAccountToken": False,
                    "securityContext": _pod_security(),
                    "initContainers": containers[:-1],
                    "containers": containers[-1:],
                    "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": names.models_claim}}],
                },
            },
        },
    }


def _tcp(*ports: int) -> list[dict[str, Any]]:
    return [{"protocol": "TCP", "port": port} for port in ports]


def _namespace(name: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _pod_security() -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _container_security() -> dict[str, Any]:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
