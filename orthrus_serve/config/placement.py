"""Whether an engine asks for as many GPUs as its replica has. Pure.

Ray gives a replica `num_gpus_per_replica` GPUs of one node, and shows its processes only those; vLLM starts one worker process
per GPU among them. Guards: workers without a GPU, GPUs without a worker, and workers that Ray would place beside the replica's
own GPUs. Leaves out CPU, where workers are processes and nothing is reserved for them.
"""

from collections.abc import Mapping
from typing import Any

PARALLEL_KEYS = ("tensor_parallel_size", "pipeline_parallel_size")


def placement_problems(num_gpus_per_replica: float, vllm: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One sentence for each contradiction between the replica's GPUs and what stands under `vllm:`. Values that are no whole
    numbers are left to vLLM. `prefix` is what stands before both keys, such as `args.`."""
    path = f"{prefix}vllm"
    if num_gpus_per_replica == 0:
        return []
    problems: list[str] = []
    backend = vllm.get("distributed_executor_backend")
    if backend not in (None, "mp", "uni"):
        problems.append(
            f"{path}.distributed_executor_backend: leave it out or write mp, got {backend!r}; the replica has its GPUs from "
            "Ray already, and its workers must be its own processes"
        )
    if vllm.get("nnodes", 1) != 1:
        problems.append(f"{path}.nnodes: one engine has the GPUs of one node; more of them come from num_replicas")
    sizes = [vllm.get(key, 1) for key in PARALLEL_KEYS]
    if any(not isinstance(size, int) or isinstance(size, bool) for size in sizes):
        return problems
    num_workers = sizes[0] * sizes[1]
    if num_workers != max(1.0, num_gpus_per_replica):
        problems.append(
            f"{prefix}num_gpus_per_replica: {num_gpus_per_replica:g}, but {path}.{PARALLEL_KEYS[0]} × {PARALLEL_KEYS[1]} is "
            f"{num_workers}; each worker has one GPU, so both must be the same"
        )
    return problems
