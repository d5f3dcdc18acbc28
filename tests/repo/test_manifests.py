"""The committed Kubernetes objects are what the generator makes today, and fit the public schemas of their kinds."""

import gzip
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from orthrus_serve.config.load import parse_serve_file
from orthrus_serve.ops.manifest_command import generated, parse
from orthrus_serve.ops.manifests import RAY_VERSION

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/kuberay"
SCHEMAS = Path(__file__).parent / "schemas"
FILES = sorted(FOLDER.glob("*.yaml"))
OF_KUBERNETES = {
    "Namespace": "io.k8s.api.core.v1.Namespace",
    "PersistentVolumeClaim": "io.k8s.api.core.v1.PersistentVolumeClaim",
    "Job": "io.k8s.api.batch.v1.Job",
    "NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
    "PodDisruptionBudget": "io.k8s.api.policy.v1.PodDisruptionBudget",
}


def unpacked(name: str) -> Any:
    return json.loads(gzip.decompress((SCHEMAS / name).read_bytes()))


def validators() -> dict[str, Draft202012Validator]:
    """A validator for each kind that the generator makes."""
    draft = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    kubernetes = {**draft, **unpacked("kubernetes.json.gz")}
    registry: Registry[Any] = Registry().with_resource("kubernetes", Resource.from_contents(kubernetes))
    schemas: dict[str, Any] = {
        "RayService": yaml.safe_load((SCHEMAS / "rayservice.yaml").read_text(encoding="utf-8")),
        "PodMonitor": {**draft, **unpacked("podmonitor.json.gz")},
        **{kind: {**draft, "$ref": f"kubernetes#/$defs/{name}"} for kind, name in OF_KUBERNETES.items()},
    }
    return {kind: Draft202012Validator(schema, registry=registry) for kind, schema in schemas.items()}


VALIDATORS = validators()


def documents(file: Path) -> list[Any]:
    return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))


def command_of(file: Path) -> list[str]:
    """The command in the head of a file, without program and verb."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines()[1:]:
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip().removesuffix("\\"))
    program, verb, *words = shlex.split(" ".join(lines))
    assert (program, verb) == ("orthrus-serve", "manifests")
    return words


def problems(document: dict[str, Any]) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATORS[document["kind"]].iter_errors(document)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_is_what_the_command_in_its_head_makes(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    made = generated(parse(command_of(file)))
    assert made[file.name] == file.read_text(encoding="utf-8"), "make manifests"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_object_fits_the_public_schema_of_its_kind(file):
    assert {f"{one['kind']} {one['metadata']['name']}": problems(one) for one in documents(file)} == {
        f"{one['kind']} {one['metadata']['name']}": [] for one in documents(file)
    }


def test_there_is_a_file_for_each_size_and_another_topology():
    sizes = {f"orthrus-{count}gpu.yaml" for count in (1, 2, 4, 8)}
    assert sizes | {"dedicated-4gpu.yaml", "orthrus-models.yaml"} <= {file.name for file in FILES}


@pytest.mark.parametrize("file", [file for file in FILES if file.stem.endswith("gpu")], ids=lambda file: file.name)
def test_what_a_ray_service_deploys_is_a_valid_serve_file(file):
    (service,) = [one for one in documents(file) if one["kind"] == "RayService"]
    assert parse_serve_file(service["spec"]["serveConfigV2"]).applications


def test_the_schemas_find_a_misspelt_field_at_every_depth():
    kinds = {one["kind"]: one for file in FILES for one in documents(file)}
    assert set(kinds) == set(VALIDATORS)
    for document in kinds.values():
        assert problems({**document, "spek": {}})
    service = kinds["RayService"]
    text = json.dumps(service)
    for right, wrong in (
        ("containerPort", "containerport"),
        ("maxReplicas", "maxreplicas"),
        ("failureThreshold", "failures"),
        ("serveConfigV2", "serveConfig"),
        ('"mode": "token"', '"mode": "yes"'),
        ("targetPort", "target"),
    ):
        assert right in text
        assert problems(json.loads(text.replace(right, wrong))), wrong
    monitor = json.dumps(kinds["PodMonitor"])
    assert problems(json.loads(monitor.replace("podMetricsEndpoints", "endpoints")))
    assert problems(json.loads(monitor.replace("honorLabels", "honourLabels").replace("interval", "every")))


def test_the_manifests_name_the_locked_ray():
    assert f"ray=={RAY_VERSION}\n" in (ROOT / "requirements/cpu.lock").read_text(encoding="utf-8")


def test_the_schemas_stay_small():
    assert sum(file.stat().st_size for file in SCHEMAS.iterdir() if file.is_file()) < 2**20
