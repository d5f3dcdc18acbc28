"""An engine asks for as many GPUs as its replica has."""

from typing import Any

import pytest

from orthrus_serve.config.load import parse_args
from orthrus_serve.config.placement import placement_problems
from orthrus_serve.errors import ConfigError

TP, PP = "tensor_parallel_size", "pipeline_parallel_size"
BACKEND = "distributed_executor_backend"


@pytest.mark.parametrize(
    ("num_gpus", "vllm"),
    [
        (1, {}),
        (0.5, {}),
        (2, {TP: 2}),
        (4, {TP: 2, PP: 2}),
        (4, {PP: 4, BACKEND: "mp"}),
        (0, {TP: 2, PP: 2}),  # on CPU workers are processes
        (1, {TP: "2"}),  # vLLM's to refuse
    ],
)
def test_as_many_workers_as_gpus_pass(num_gpus: float, vllm: dict[str, Any]) -> None:
    assert placement_problems(num_gpus, vllm) == []


@pytest.mark.parametrize(
    ("num_gpus", "vllm", "reason"),
    [
        (1, {TP: 2}, "num_gpus_per_replica: 1, but vllm.tensor_parallel_size × pipeline_parallel_size is 2"),
        (2, {}, "num_gpus_per_replica: 2, but vllm.tensor_parallel_size × pipeline_parallel_size is 1"),
        (4, {TP: 2}, "is 2; each worker has one GPU"),
        (0.5, {TP: 2}, "num_gpus_per_replica: 0.5"),
        (2, {TP: 2, BACKEND: "ray"}, "distributed_executor_backend: leave it out or write mp, got 'ray'"),
        (2, {TP: 2, "nnodes": 2}, "nnodes: one engine has the GPUs of one node"),
    ],
)
def test_another_number_is_refused_in_a_sentence(num_gpus: float, vllm: dict[str, Any], reason: str) -> None:
    (problem,) = placement_problems(num_gpus, vllm)
    assert reason in problem


def test_a_file_is_refused_with_the_path_of_the_key() -> None:
    args = {"topology": "orthrus", "model": {"path": "/m"}, "adapters": {"e": {"path": "/a"}}, "vllm": {TP: 2}}
    with pytest.raises(ConfigError, match=r"^args\.num_gpus_per_replica: 1, but args\.vllm\.tensor_parallel_size"):
        parse_args(args, ("args",))
    assert parse_args({**args, "num_gpus_per_replica": 2}).num_gpus_per_replica == 2
