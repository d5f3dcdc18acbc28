"""Plays the traces of a real run again, in virtual time, to see whether the simulator can be believed.

The real run is that of `tests/serve/routing_rules.py`: proxy, Fronts, router and replicas on a local Ray, with engines that
compute 1,000 tokens a second, one request after the other. Reads its raw data; leaves out how that was made.
"""

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orthrus_serve.sim.cluster import Cluster, Setup
from orthrus_serve.sim.engines import SerialEngine
from orthrus_serve.sim.summary import percentile
from orthrus_serve.sim.workload import Arrival

NUM_SEEDS = 5  # which Front a request comes to, and ties, are chance in both


def read(path: Path) -> dict[str, Any]:
    """The raw data of such a run.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    return json.loads(gzip.decompress(path.read_bytes()))


def compare(raw: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each block of the real run: its latencies and those of the same trace and rule in virtual time, in ms."""
    conditions = raw["conditions"]
    traces = [[Arrival(*values[:4]) for values in trace] for trace in raw["traces"]]
    for block in raw["blocks"]:
        if block["rule"].startswith("exact"):
            continue
        setup = Setup(
            lambda agenda, ended, _number: SerialEngine(agenda, conditions["tokens_per_s"], ended),
            conditions["engines"],
            conditions["fronts"],
            block["rule"],
        )
        trace = traces[block["round"]]
        played = [Cluster(setup, seed).play(trace).latency_s for seed in range(NUM_SEEDS)]
        yield {
            "rule": block["rule"],
            "round": block["round"],
            "load_average": round(block["load_average"], 1),
            **{f"measured_p{at}_ms": round(percentile(block["latency_ms"], at / 100)) for at in (50, 90, 99)},
            **{f"simulated_p{at}_ms": round(_mean_percentile(played, at / 100)) for at in (50, 90, 99)},
        }


def _mean_percentile(runs: list[list[float]], share: float) -> float:
    return 1e3 * sum(percentile(run, share) for run in runs) / len(runs)
