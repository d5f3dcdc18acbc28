"""What a router's choice costs in CPU time, by rule and number of replicas: `python -m orthrus_serve.sim.choice_cost`.

Times the product's own `RouterState` with everything that it would know: reports of every replica, hundreds of open requests.
One request is chosen for and charged, and an older one settled. Thread CPU time, so other work on the machine counts only
through caches and clocks; the load average is told beside the numbers. Leaves out Ray (`tests/serve/routing_rules.py` times
it).
"""

import argparse
import json
import os
import platform
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from orthrus_serve import __version__
from orthrus_serve.policy.replica_choice import Place
from orthrus_serve.policy.roles import Split
from orthrus_serve.policy.routed_request import RoutedRequest
from orthrus_serve.serving.engine_reports import ReplicaReport
from orthrus_serve.serving.router_state import RouterState
from orthrus_serve.sim.experiments import SIZES, fronts_of
from orthrus_serve.sim.summary import percentile
from orthrus_serve.sim.variants import looks_at
from orthrus_serve.types import ReplicaId, RequestKind

NUM_OPEN = 400
NUM_WARM = 200
# Name → how the state is made. The first four are the product's rules.
WAYS: dict[str, Callable[[], RouterState]] = {
    "least_remaining_tokens": RouterState,
    "in_flight_tokens": lambda: RouterState(rule="in_flight_tokens"),
    "power_of_two": lambda: RouterState(rule="power_of_two"),
    "round_robin": lambda: RouterState(rule="round_robin"),
    "least_remaining_tokens, dedicated": lambda: RouterState(split=Split(1, 3)),
    "least of all (looks at every replica)": lambda: looks_at(None)(),
}


def filled(state: RouterState, num_replicas: int, rng: random.Random) -> tuple[ReplicaId, ...]:
    """Gives a Front's state its place, its replicas, and a report of each; returns the replicas."""
    replicas = tuple(ReplicaId(f"r{number:05d}") for number in range(num_replicas))
    state.rng, state.replicas, state.place = rng, replicas, Place(0, fronts_of(num_replicas))
    for replica in replicas:
        others = {f"other-{number}": rng.randrange(20, 2000) for number in range(rng.randrange(8))}
        state.follow("f0", ReplicaReport(str(replica), {"f1": others}, number=1))
    return replicas


def timed_us(make: Callable[[], RouterState], num_replicas: int, num_choices: int, seed: int) -> dict[str, list[float]]:
    """CPU µs of each choice (chosen, charged and an older request settled), and of each look without a charge."""
    rng = random.Random(seed)
    state = make()
    replicas = filled(state, num_replicas, rng)
    is_open: deque[tuple[str, ReplicaId]] = deque()
    took: dict[str, list[float]] = {"choice": [], "look": []}
    for number in range(NUM_OPEN + NUM_WARM + num_choices):
        kind: RequestKind = "embed" if rng.random() < 0.6 else "generate"
        routed = RoutedRequest(str(number), kind, rng.randrange(20, 2000), 40)
        oldest = is_open.popleft() if len(is_open) >= NUM_OPEN else None
        began_ns = time.thread_time_ns()
        chosen = state.choose_and_charge(routed, replicas)
        if oldest is not None:
            state.settle(*oldest)
        chosen_ns = time.thread_time_ns()
        state.likely(kind, routed.charge)
        looked_ns = time.thread_time_ns()
        is_open.append((routed.request_id, chosen))
        if number >= NUM_OPEN + NUM_WARM:
            took["choice"].append((chosen_ns - began_ns) / 1e3)
            took["look"].append((looked_ns - chosen_ns) / 1e3)
    return took


def rows(sizes: Sequence[int], num_choices: int, seed: int = 1) -> Iterator[dict[str, Any]]:
    """One for each way and size."""
    for name, make in WAYS.items():
        for num_replicas in sizes:
            took = timed_us(make, num_replicas, num_choices, seed)
            yield {
                "way": name,
                "replicas": num_replicas,
                "fronts": fronts_of(num_replicas),
                **{
                    f"{what}_{at}_us": round(percentile(values, share), 1)
                    for what, values in took.items()
                    for at, share in (("median", 0.5), ("p99", 0.99))
                },
            }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row for each way and size, and writes all to a file where one is given."""
    parser = argparse.ArgumentParser(prog="python -m orthrus_serve.sim.choice_cost", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="numbers of replicas")
    parser.add_argument("--choices", type=int, default=5000, help="timed choices of each way at each size (5000)")
    parser.add_argument("--json", type=Path, help="write everything there")
    options = parser.parse_args(argv)
    before = os.getloadavg()[0]
    found: list[dict[str, Any]] = []
    for row in rows(options.sizes, options.choices):
        found.append(row)
        sys.stdout.write(f"{json.dumps(row)}\n")
        sys.stdout.flush()
    told = {
        "version": __version__,
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load_average": {"before": round(before, 2), "after": round(os.getloadavg()[0], 2)},
        "choices": options.choices,
        "rows": found,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
