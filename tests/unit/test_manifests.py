"""What a Serve file becomes on a cluster: how many pods, what Serve is told, who may reach whom, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from orthrus_serve.config.load import parse_serve_file
from orthrus_serve.errors import ConfigError
from orthrus_serve.ops.manifest_command import generated as generated_for
from orthrus_serve.ops.manifest_command import main, parse
from orthrus_serve.ops.manifests import Choices, PodSize, fleet_of, on_cluster, service_documents, sized

CONFIGS = Path(__file__).parents[2] / "configs"


def raw(name: str = "orthrus.yaml", **args: Any) -> dict[str, Any]:
    """A file's mapping, with some of its `args` changed."""
    file = yaml.safe_load((CONFIGS / name).read_text(encoding="utf-8"))
    file["applications"][0]["args"] |= args
    return file


def made(file: dict[str, Any], **choices: Any) -> dict[tuple[str, str], Any]:
    """The objects by kind and name."""
    documents = service_documents(file, "x.yaml", Choices(**choices))
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


def ray_service(file: dict[str, Any], **choices: Any) -> dict[str, Any]:
    (found,) = [one for (kind, _), one in made(file, **choices).items() if kind == "RayService"]
    return found["spec"]


def workers(file: dict[str, Any], **choices: Any) -> dict[str, Any]:
    (group,) = ray_service(file, **choices)["rayClusterConfig"]["workerGroupSpecs"]
    return group


def counts(group: dict[str, Any]) -> tuple[int, int, int]:
    return group["minReplicas"], group["replicas"], group["maxReplicas"]


def container(group: dict[str, Any]) -> dict[str, Any]:
    return group["template"]["spec"]["containers"][0]


def test_an_embedder_that_is_a_model_of_its_own_lies_on_the_volume_too():
    args = on_cluster(raw("separate_models.yaml"))["applications"][0]["args"]
    assert (args["model"]["path"], args["embedder"]["path"]) == (
        "/models/opt-1.3b",
        "/models/multilingual-e5-large-instruct",
    )


@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8])
def test_each_gpu_is_a_pod_with_one_engine(num_gpus):
    group = workers(raw(), num_gpus=num_gpus)
    assert counts(group) == (num_gpus, num_gpus, num_gpus)
    assert container(group)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert group["rayStartParams"]["num-gpus"] == "1"


def test_what_serve_is_told_is_the_file_with_the_clusters_addresses_and_folders():
    told = ray_service(raw(), num_gpus=2)["serveConfigV2"]
    (application,) = parse_serve_file(told).applications
    assert application.args.num_replicas == 2
    assert application.args.model.path == "/models/Mistral-7B-v0.1"
    assert application.args.adapters["orthrus-embed"].path == "/models/e5-mistral-7b-instruct/lora"
    expected = raw(num_replicas=2)
    expected["proxy_location"], expected["http_options"]["host"] = "EveryNode", "0.0.0.0"
    args = expected["applications"][0]["args"]
    args["model"]["path"], args["adapters"]["orthrus-embed"]["path"] = (
        "/models/Mistral-7B-v0.1",
        "/models/e5-mistral-7b-instruct/lora",
    )
    assert yaml.safe_load(told) == expected


def test_making_objects_leaves_the_file_as_it_was():
    file = raw()
    made(file, num_gpus=8)
    assert file == raw()


def test_an_engine_over_several_gpus_has_a_pod_with_all_of_them():
    vllm = {**raw()["applications"][0]["args"]["vllm"], "tensor_parallel_size": 2}
    group = workers(raw(num_gpus_per_replica=2, vllm=vllm), num_gpus=8)
    assert counts(group) == (4, 4, 4)
    assert container(group)["resources"]["limits"]["nvidia.com/gpu"] == "2"


def test_engines_that_share_a_gpu_share_a_pod():
    file = raw(num_gpus_per_replica=0.5, num_replicas=3)
    assert fleet_of(parse_serve_file(yaml.safe_dump(file)).applications[0].args).num_pods == 2


def test_engines_on_cpu_have_pods_without_gpus_and_the_other_image():
    group = workers(raw("cpu-dedicated.yaml"), pod=PodSize(4, "16Gi"))
    assert counts(group) == (2, 2, 2)
    assert container(group)["resources"] == {
        "requests": {"cpu": "4", "memory": "16Gi"},
        "limits": {"memory": "16Gi"},
    }
    assert container(group)["image"].endswith("-cpu")


def test_the_pools_of_all_arms_have_their_pods():
    assert counts(workers(raw("ab.yaml"))) == (4, 4, 4)
    with pytest.raises(ConfigError, match="--gpus: the file has several pools"):
        made(raw("ab.yaml"), num_gpus=2)


def test_pods_follow_autoscaling_between_its_bounds():
    scaling = {"min_replicas": 2, "max_replicas": 4, "target_tokens_per_replica": 20000}
    file = raw(num_replicas=3, autoscaling=scaling)
    assert counts(workers(file)) == (2, 3, 4)
    assert ray_service(file)["rayClusterConfig"]["enableInTreeAutoscaling"] is True
    # GPUs that are asked for are the most that may ever run.
    assert counts(workers(file, num_gpus=8)) == (2, 8, 8)
    assert ray_service(raw())["rayClusterConfig"]["enableInTreeAutoscaling"] is False


def test_the_head_runs_neither_engines_nor_fronts():
    head = ray_service(raw())["rayClusterConfig"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == head["rayStartParams"]["num-gpus"] == "0"
    assert "nvidia.com/gpu" not in container(head)["resources"]["limits"]
    assert "models" not in [volume["name"] for volume in head["template"]["spec"]["volumes"]]


def test_ray_asks_for_a_token_and_no_secret_is_written():
    spec = ray_service(raw())
    assert spec["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    text = yaml.safe_dump(spec)
    assert "TOKEN" not in text
    job = generated_for(parse([str(CONFIGS / "orthrus.yaml"), "--fetch", "org/model=~/models/model"]))
    (env,) = [env for env in yaml_of(job["orthrus-models.yaml"])[-1]["env"] if env["name"] == "HF_TOKEN"]
    assert env["valueFrom"]["secretKeyRef"]["name"] == "hugging-face"
    assert "value" not in env


def yaml_of(text: str) -> list[Any]:
    """Containers of the job in a file with the models."""
    job = next(one for one in yaml.safe_load_all(text) if one["kind"] == "Job")
    spec = job["spec"]["template"]["spec"]
    return [*spec["initContainers"], *spec["containers"]]


def test_nothing_runs_as_root():
    cluster = ray_service(raw())["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["template"]["spec"]["securityContext"]["runAsNonRoot"] is True
        assert container(group)["securityContext"]["allowPrivilegeEscalation"] is False


def test_every_selector_finds_pods_of_the_cluster():
    documents = made(raw())
    labels = container_labels(raw())
    for (kind, name), one in documents.items():
        selector = one["spec"].get("selector") or one["spec"].get("podSelector")
        if selector is not None:
            wanted = {key: value for key, value in selector["matchLabels"].items() if key != "ray.io/node-type"}
            assert wanted.items() <= labels.items(), (kind, name)


def container_labels(file: dict[str, Any]) -> dict[str, str]:
    return workers(file)["template"]["metadata"]["labels"]


def test_every_scraped_port_is_a_port_of_the_pods_that_are_selected():
    cluster = ray_service(raw())["rayClusterConfig"]
    ports = {
        node_type: {port["name"] for port in container(group)["ports"]}
        for node_type, group in (("head", cluster["headGroupSpec"]), ("worker", cluster["workerGroupSpecs"][0]))
    }
    monitors = [one["spec"] for (kind, _), one in made(raw()).items() if kind == "PodMonitor"]
    assert len(monitors) == 3
    for monitor in monitors:
        node_type = monitor["selector"]["matchLabels"]["ray.io/node-type"]
        assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports[node_type]


def test_prometheus_may_reach_every_port_that_it_scrapes():
    documents = made(raw())
    rules = documents["NetworkPolicy", "orthrus-pods"]["spec"]["ingress"]
    (open_ports,) = [
        {port["port"] for port in rule["ports"]} for rule in rules if "monitoring" in yaml.safe_dump(rule["from"])
    ]
    cluster = ray_service(raw())["rayClusterConfig"]
    numbers = {port["name"]: port["containerPort"] for port in container(cluster["headGroupSpec"])["ports"]}
    scraped = {
        numbers[endpoint["port"]]
        for (kind, _), one in documents.items()
        if kind == "PodMonitor"
        for endpoint in one["spec"]["podMetricsEndpoints"]
    }
    assert scraped <= open_ports


@pytest.mark.parametrize(("num_gpus", "stay"), [(1, 1), (2, 1), (4, 3), (8, 7)])
def test_evictions_leave_all_workers_but_one_and_never_the_only_one(num_gpus, stay):
    budget = made(raw(), num_gpus=num_gpus)["PodDisruptionBudget", "orthrus-worker"]
    assert budget["spec"]["minAvailable"] == stay


@pytest.mark.parametrize(
    ("args", "num_gpus", "told"),
    [
        ({"num_gpus_per_replica": 2}, 3, "--gpus: engines of 2 GPUs do not fill 3"),
        ({"num_gpus_per_replica": 0}, 2, "run on CPU"),
        ({"topology": "dedicated"}, 1, "dedicated needs at least 2"),
        ({"model": {"path": "models/here"}}, None, "model.path: must be absolute or begin with ~/"),
        ({"num_cpus_per_replica": 8}, None, "--cpus: an engine and a Front reserve 8.1"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(args, num_gpus, told):
    with pytest.raises(ConfigError, match=told):
        made(raw(**args), num_gpus=num_gpus)


def test_a_name_that_kubernetes_would_refuse_is_refused():
    file = raw()
    file["applications"][0]["name"] = "My_App"
    with pytest.raises(ConfigError, match=r"applications\[0\].name: on a cluster"):
        made(file)


def test_a_head_over_all_states_lies_on_the_volume_too():
    head = {"path": "~/models/head.safetensors"}
    adapters = {"headed": {"path": "~/models/lora", "pooling": "all", "head": head}}
    args = on_cluster(raw(adapters=adapters))["applications"][0]["args"]
    assert args["adapters"]["headed"]["head"]["path"] == "/models/head.safetensors"


def test_without_a_number_of_gpus_the_file_decides():
    assert sized(raw(), None) == raw()


def test_files_are_named_by_the_serve_file_and_the_size(tmp_path, capsys):
    assert main([str(CONFIGS / "orthrus.yaml"), "--gpus", "1", "8", "--out", str(tmp_path)]) == 0
    assert {file.name for file in tmp_path.iterdir()} == {
        "orthrus-1gpu.yaml",
        "orthrus-8gpu.yaml",
        "orthrus-models.yaml",
    }
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_printed_objects_are_one_stream_of_yaml(capsys):
    assert main([str(CONFIGS / "cpu.yaml")]) == 0
    kinds = [one["kind"] for one in yaml.safe_load_all(capsys.readouterr().out)]
    assert kinds[:3] == ["Namespace", "PersistentVolumeClaim", "RayService"]


def test_high_throughput_is_asked_for_on_the_head_and_on_workers():
    for wanted in (False, True):
        cluster = ray_service(raw(), high_throughput=wanted)["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]):
            told = {env["name"]: env["value"] for env in container(group)["env"]}
            assert ("RAY_SERVE_ENABLE_HA_PROXY" in told) == wanted
            binary = "/opt/orthrus/bin/orthrus-haproxy" if wanted else None
            assert told.get("RAY_SERVE_HAPROXY_BINARY_PATH") == binary


@pytest.mark.parametrize("fetch", ["model", "org/model=/elsewhere/model", "org/model", "org/model=~/models/a b"])
def test_a_fetch_that_cannot_be_is_refused(fetch):
    with pytest.raises(ConfigError, match="--fetch: must be"):
        main([str(CONFIGS / "orthrus.yaml"), "--fetch", fetch])
