"""Who waits when all generations and all embeddings come at once, by policy and weight: `python -m orthrus_serve.sim.block`.

The worst block of the routing paper for an order of arrival: so many generations, then at once as many embeddings, on one
engine with the step times of an H200. Prints p99 of each kind and the time of the whole for each way to share steps. Leaves out
the way through HTTP; what cards measured of the same load is in `docs/benchmarks/2026-11-30-gpu-two-cards.md`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from orthrus_serve.sim.batching import BatchingEngine, BatchSpec
from orthrus_serve.sim.engines import Job
from orthrus_serve.sim.events import Agenda
from orthrus_serve.sim.step_clock import h200
from orthrus_serve.sim.summary import percentile
from orthrus_serve.sim.workload import Arrival
from orthrus_serve.types import PolicyName, RequestKind

PROMPT_TOKENS, OUTPUT_TOKENS = 640, 150


@dataclass(frozen=True)
class BlockResult:
    """How long it took, in seconds from the moment at which all came."""

    policy: PolicyName
    embed_weight: float
    embed_p50_s: float
    embed_p99_s: float
    generate_p50_s: float
    generate_p99_s: float
    whole_s: float


def run_block(spec: BatchSpec, num_each: int) -> BlockResult:
    """`num_each` generations and then as many embeddings, all at time 0."""
    agenda = Agenda()
    ends: dict[RequestKind, list[float]] = {"generate": [], "embed": []}
    engine = BatchingEngine(agenda, spec, lambda job: ends[job.arrival.kind].append(agenda.now_s))
    generation, embedding = (
        Arrival(0.0, "generate", PROMPT_TOKENS, OUTPUT_TOKENS),
        Arrival(0.0, "embed", PROMPT_TOKENS, 0),
    )
    for arrival in (generation, embedding):
        for number in range(num_each):
            engine.add(Job(f"{arrival.kind}-{number}", arrival))
    agenda.run(lambda: len(ends["generate"]) + len(ends["embed"]) == 2 * num_each)
    embed, generate = ends["embed"], ends["generate"]
    return BlockResult(
        spec.policy,
        spec.embed_weight,
        *(percentile(embed, 0.5), percentile(embed, 0.99)),
        *(percentile(generate, 0.5), percentile(generate, 0.99)),
        agenda.now_s,
    )


def specs(weights: Sequence[float]) -> list[BatchSpec]:
    """`orthrus` at each weight, and the other policies, which have none."""
    clock = h200()
    others = [policy for policy in get_args(PolicyName) if policy != "orthrus"]
    weighted = [BatchSpec(clock, "orthrus", embed_weight=weight) for weight in weights]
    return [*weighted, *(BatchSpec(clock, policy) for policy in others)]


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m orthrus_serve.sim.block", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--requests", type=int, default=500, metavar="N", help="of each kind (500)")
    parser.add_argument("--weights", type=float, nargs="+", default=[1.0, 2.0, 3.0, 4.0, 8.0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, too")
    options = parser.parse_args(argv)
    results = [run_block(spec, options.requests) for spec in specs(options.weights)]
    lines = ["policy          weight   embed p50    p99   generate p50    p99   whole (s)"]
    lines += [
        f"{one.policy:14} {one.embed_weight:7g} {one.embed_p50_s:11.1f} {one.embed_p99_s:6.1f}"
        f" {one.generate_p50_s:14.1f} {one.generate_p99_s:6.1f} {one.whole_s:11.1f}"
        for one in results
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
