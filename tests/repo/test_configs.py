"""The files in configs/ load, and the twins differ in what their names say and in nothing else."""

import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from orthrus_serve.config.load import read_serve_file
from orthrus_serve.ops.plan import num_fronts
from orthrus_serve.types import TopologyName

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
TOPOLOGIES = typing.get_args(TopologyName)


def raw(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_configuration_is_valid(file):
    assert read_serve_file(file).applications


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("prefix", ["", "cpu-"])
def test_every_topology_has_its_file_for_gpus_and_for_cpu(prefix, topology):
    name = "cpu.yaml" if (prefix, topology) == ("cpu-", "orthrus") else f"{prefix}{topology}.yaml"
    (application,) = read_serve_file(CONFIGS / name).applications
    assert application.args.topology == topology
    assert (application.args.num_gpus_per_replica == 0) == (prefix == "cpu-")


# What else a file says, beside its topology: on CPU, topologies with roles need a second engine.
BESIDE: dict[str, dict[str, Any]] = {
    "dedicated.yaml": {"dedicated": {"embed": 1, "generate": 3}},
    "cpu-dedicated.yaml": {"dedicated": {"embed": 1, "generate": 1}, "num_replicas": 2, "num_cpus_per_replica": 0.5},
    "disagg_pd.yaml": {"disagg_pd": {"prefill": 1, "decode": 3}, "kv_connector": "nixl"},
    "cpu-disagg_pd.yaml": {
        "disagg_pd": {"prefill": 1, "decode": 1},
        "kv_connector": "nixl",
        "num_replicas": 2,
        "num_cpus_per_replica": 0.5,
    },
}


@pytest.mark.parametrize(("base", "prefix"), [("orthrus.yaml", ""), ("cpu.yaml", "cpu-")])
def test_twins_differ_in_the_topology_only(base, prefix):
    for topology in TOPOLOGIES[1:]:
        if topology == "separate_models":
            continue  # other models, and two engines
        name = f"{prefix}{topology}.yaml"
        twin, expected = raw(name), raw(base)
        expected["applications"][0]["args"] |= {"topology": topology, **BESIDE.get(name, {})}
        assert twin == expected


@pytest.mark.parametrize("name", ["separate_models.yaml", "cpu-separate_models.yaml"])
def test_two_engines_fit_on_their_card_and_an_input_fits_into_a_step(name):
    (application,) = read_serve_file(CONFIGS / name).applications
    args = application.args
    assert args.embedder is not None
    # The longest input of both embedders is at most 512 tokens.
    assert args.embedder.vllm["max_num_batched_tokens"] >= 512
    if not name.startswith("cpu"):
        shares = [section["gpu_memory_utilization"] for section in (args.vllm, args.embedder.vllm)]
        assert sum(shares) <= 0.95


def test_cuda_graphs_cover_the_mixed_step():
    (application,) = read_serve_file(CONFIGS / "orthrus.yaml").applications
    sizes = application.args.vllm["cudagraph_capture_sizes"]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] >= application.args.vllm["max_num_batched_tokens"]


@pytest.mark.parametrize("file", [file for file in FILES if file.name.startswith("cpu")], ids=lambda file: file.name)
def test_what_a_cpu_file_reserves_fits_on_two_cores(file):
    (application,) = read_serve_file(file).applications
    args = application.args
    fronts = num_fronts(args)
    assert args.most_replicas * args.num_cpus_per_replica + fronts * args.front.num_cpus <= 2


@pytest.mark.parametrize(("base", "name"), [("orthrus.yaml", "ab.yaml"), ("cpu.yaml", "cpu-ab.yaml")])
def test_arms_have_the_engines_of_the_single_topology(base, name):
    (one,), (two,) = read_serve_file(CONFIGS / base).applications, read_serve_file(CONFIGS / name).applications
    for arm in two.args.by_arm.values():
        same = ("model", "adapters", "engine", "limits", "vllm", "num_gpus_per_replica")
        assert {key: getattr(arm, key) for key in same} == {key: getattr(one.args, key) for key in same}
    assert two.args.most_replicas == (4 if name == "ab.yaml" else 2)
