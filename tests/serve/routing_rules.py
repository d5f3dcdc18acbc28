"""Compares the router's rules on four fake engines of a known speed, and measures what routing costs. A tool, not a test.

Run: `python -m tests.serve.routing_rules --json FILE.json.gz` (about 16 minutes). The whole serving side is real (proxy, two
Fronts and four replicas on a local Ray); an engine computes so many tokens a second, one request after the other. Requests
arrive by a Poisson process, whatever the answers do, at 85 % of what the engines can compute. Each round plays one trace
under every rule, switched live, in another order each round.
"""

import argparse
import asyncio
import gzip
import heapq
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

# Before Ray is imported: its own 15 would let any other work on the machine come first.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray spells it so

import aiohttp
from ray import serve

from orthrus_serve.app import compose
from orthrus_serve.config.schema import AppArgs
from orthrus_serve.policy.replica_choice import RULES
from orthrus_serve.policy.routed_request import RoutedRequest
from orthrus_serve.serving.engine_reports import ReplicaReport
from orthrus_serve.serving.router_state import RouterState
from orthrus_serve.sim.cluster import Cluster, Setup
from orthrus_serve.sim.engines import SerialEngine, SharedEngine
from orthrus_serve.sim.workload import Arrival, heavy_tailed, poisson
from orthrus_serve.types import ReplicaId, RouterRule
from tests.serve.conftest import FAKE_ARGS, App, local_serve
from tests.serve.metered import start_metered

APP, NUM_ENGINES, NUM_FRONTS = "routing-rules", 4, 2
TOKENS_PER_S = 1000
MAX_TOKENS = 2000  # what clients allow; how much really comes out, only the engine knows
REPEAT_COST = 7


def http(arrival: Arrival) -> tuple[str, dict[str, Any]]:
    """Path and body of that request."""
    if arrival.kind == "embed":
        return "/v1/embeddings", {"input": [[1] * arrival.num_prompt]}
    body = {"prompt": [1] * arrival.num_prompt, "max_tokens": MAX_TOKENS, "fake": {"output": arrival.num_output}}
    return "/v1/completions", body


def make_trace(seed: int, seconds: float, utilisation: float) -> list[Arrival]:
    """Six embeddings to four generations, all lengths heavy-tailed; exactly that share of what the engines can compute."""
    return poisson(heavy_tailed, seed, seconds, utilisation * NUM_ENGINES * TOKENS_PER_S)


def simulate_exact(trace: Sequence[Arrival]) -> list[float]:
    """Latencies, in s, if every request went to the engine that is free first, all lengths known and nothing else cost time."""
    free_s = [0.0] * NUM_ENGINES
    latencies: list[float] = []
    for arrival in trace:
        done_s = max(heapq.heappop(free_s), arrival.at_s) + arrival.num_tokens / TOKENS_PER_S
        heapq.heappush(free_s, done_s)
        latencies.append(done_s - arrival.at_s)
    return latencies


async def play(url: str, trace: Sequence[Arrival]) -> list[float]:
    """Latency of every request in s, from the moment when it was due to the end of its answer."""
    began_s = time.monotonic()

    async def ask(session: aiohttp.ClientSession, arrival: Arrival) -> float:
        path, body = http(arrival)
        await asyncio.sleep(began_s + arrival.at_s - time.monotonic())
        async with session.post(url + path, json=body) as response:
            await response.read()
            assert response.status == 200, await response.text()
        return time.monotonic() - began_s - arrival.at_s

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:
        return await asyncio.gather(*[ask(session, arrival) for arrival in trace])


def computed(app: App) -> dict[str, int]:
    """Tokens that each engine has computed, once all are idle and all charges settled."""
    while True:
        fronts, engines = app.info("Front"), app.info("Engine")
        if all(f["open"] == 0 and not f["loads"] for f in fronts) and all(e["in_engine"] == 0 for e in engines):
            return {engine["replica"]: engine["report"]["computed"] for engine in engines}
        time.sleep(0.3)


def switch(app: App, rule: RouterRule) -> None:
    serve.get_deployment_handle("Front", app.name).broadcast("reconfigure", {"rule": rule}).results(timeout_s=10)
    assert [front["rule"] for front in app.info("Front")] == [rule] * NUM_FRONTS


def compare(app: App, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One block for every rule and round."""
    rules = get_args(RouterRule)
    asyncio.run(play(app.url, make_trace(options.seed - 1, 15.0, 0.5)))  # the Fronts learn what an output costs
    blocks: list[dict[str, Any]] = []
    for number in range(options.rounds):
        trace = make_trace(options.seed + number, options.seconds, options.utilisation)
        exact = {"latency_s": simulate_exact(trace), "by_engine": {}}
        blocks.append({"rule": "exact (simulated)", "round": number, **exact})
        for turn in range(len(rules)):
            rule = rules[(turn + number) % len(rules)]
            switch(app, rule)
            before = computed(app)
            latencies = asyncio.run(play(app.url, trace))
            by_engine = {replica: tokens - before[replica] for replica, tokens in computed(app).items()}
            measured = {"latency_s": latencies, "by_engine": by_engine, "load_average": os.getloadavg()[0]}
            blocks.append({"rule": rule, "round": number, **measured})
    return blocks


def summary(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Percentiles over the blocks together; imbalance of each."""
    latencies = sorted(latency for block in blocks for latency in block["latency_s"])
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    tokens = [block["by_engine"].values() for block in blocks if block["by_engine"]]
    return {
        "requests": len(latencies),
        "mean_ms": round(1e3 * statistics.fmean(latencies)),
        "p50_ms": round(1e3 * cuts[49]),
        "p90_ms": round(1e3 * cuts[89]),
        "p99_ms": round(1e3 * cuts[98]),
        "p99_ms_of_each": [round(1e3 * statistics.quantiles(b["latency_s"], n=100)[98]) for b in blocks],
        "busiest_over_idlest": [round(max(of_block) / min(of_block), 3) for of_block in tokens],
    }


def compare_virtually(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Every rule on both kinds of engine in virtual time, over many traces; by engine kind and rule."""
    arms: list[tuple[str, RouterRule, int, bool]] = [(rule, rule, NUM_FRONTS, True) for rule in get_args(RouterRule)]
    for num_fronts, has_reports in ((NUM_FRONTS, False), (4, True), (4, False)):
        name = f"least_remaining_tokens, {num_fronts} Fronts, {'with' if has_reports else 'without'} reports"
        arms.append((name, "least_remaining_tokens", num_fronts, has_reports))
    found: dict[str, dict[str, Any]] = {}
    for engine, make in {"serial": SerialEngine, "shared": SharedEngine}.items():
        blocks: list[dict[str, Any]] = []
        for seed in range(1000, 1000 + options.virtual_traces):
            trace = make_trace(seed, 300.0, options.utilisation)
            if engine == "serial":
                blocks.append({"rule": "exact (simulated)", "latency_s": simulate_exact(trace), "by_engine": {}})
            for name, rule, num_fronts, has_reports in arms:
                setup = Setup(
                    lambda agenda, ended, _, make=make: make(agenda, TOKENS_PER_S, ended),
                    NUM_ENGINES,
                    num_fronts,
                    rule,
                    max_tokens=MAX_TOKENS,
                    has_reports=has_reports,
                )
                played = Cluster(setup, seed).play(trace)
                by_engine = dict(enumerate(played.by_engine))
                blocks.append({"rule": name, "latency_s": played.latency_s, "by_engine": by_engine})
        names = dict.fromkeys(block["rule"] for block in blocks)
        found[engine] = {name: summary([block for block in blocks if block["rule"] == name]) for name in names}
    return found


# --- what routing costs ---------------------------------------------------------------------------------------------


def choice_cost_us(rule: RouterRule, num_replicas: int, num_requests: int = 2000, num_open: int = 400) -> float:
    """Microseconds for choosing, charging and settling one request, with others open; the least of several runs."""
    rng = random.Random(1)
    replicas = [ReplicaId(f"{number:08x}") for number in range(num_replicas)]
    state = RouterState(rule=rule, rng=random.Random(2))
    charges = [rng.randint(10, 2000) for _ in range(num_requests)]
    routed = [RoutedRequest(f"{number:032x}", "generate", charge, 100) for number, charge in enumerate(charges)]
    took: list[float] = []
    for _ in range(REPEAT_COST):
        chosen = [state.choose_and_charge(request, replicas) for request in routed[:num_open]]
        began_s = time.perf_counter()
        for number, request in enumerate(routed[num_open:]):
            chosen.append(state.choose_and_charge(request, replicas))
            state.settle(routed[number].request_id, chosen[number])
        took.append((time.perf_counter() - began_s) / (num_requests - num_open))
        for number in range(num_requests - num_open, num_requests):
            state.settle(routed[number].request_id, chosen[number])
        assert state.ledger.num_open == 0
    return round(min(took) * 1e6, 1)


def correction_cost_us(num_own: int = 100, num_other: int = 300) -> float:
    """Microseconds for correcting a ledger by one report that names so many open requests; the least of several runs."""
    replica = ReplicaId("a")
    state = RouterState(replicas=(replica,))
    own = {f"{number:032x}": 100 for number in range(num_own)}
    others = {f"front{front}": {f"{front}{number:031x}": 100 for number in range(num_other // 3)} for front in range(3)}
    for request_id in own:
        state.choose_and_charge(RoutedRequest(request_id, "generate", 200), [replica])
    took: list[float] = []
    for number in range(1, 200):
        began_s = time.perf_counter()
        state.follow("mine", ReplicaReport("a", {"mine": own, **others}, number=number))
        took.append(time.perf_counter() - began_s)
    return round(min(took) * 1e6, 1)


def cpu_s(process_name: str) -> float:
    """CPU seconds that the processes of that name have used so far."""
    total = 0.0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(process_name.encode()):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            continue
    return total


def report_cost(app: App, seconds: float = 15.0) -> dict[str, float]:
    """CPU that reports take in Fronts and replicas, as the difference of two spans: all idle, and one long request in each
    engine, which changes its report all the time and costs nothing else."""

    def used() -> tuple[float, float]:
        return cpu_s(f"ray::ServeReplica:{APP}:Front"), cpu_s(f"ray::ServeReplica:{APP}:Engine")

    async def long_requests() -> None:
        trace = [Arrival(0.0, "embed", int((seconds + 5) * TOKENS_PER_S), 0)] * NUM_ENGINES
        await play(app.url, trace)

    async def spans() -> list[tuple[float, float]]:
        marks = [used()]
        await asyncio.sleep(seconds)
        marks.append(used())
        asking = asyncio.create_task(long_requests())
        await asyncio.sleep(2.0)
        marks.append(used())
        await asyncio.sleep(seconds)
        marks.append(used())
        await asking
        return marks

    switch(app, "least_remaining_tokens")
    computed(app)
    idle0, idle1, busy0, busy1 = asyncio.run(spans())
    front, engine = ((busy1[i] - busy0[i]) - (idle1[i] - idle0[i]) for i in (0, 1))
    num_reports = NUM_ENGINES * seconds / 0.1  # to each Front
    return {
        "front_cpu_ms_per_report": round(1e3 * front / num_reports / NUM_FRONTS, 2),
        "front_cpu_share_at_10_reports_a_second_from_4_replicas": round(front / seconds / NUM_FRONTS, 4),
        "replica_cpu_share": round(engine / seconds / NUM_ENGINES, 4),
    }


# --- the run --------------------------------------------------------------------------------------------------------


def conditions(options: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": f"python -m tests.serve.routing_rules {' '.join(sys.argv[1:])}",
        "commit": commit,
        "python": platform.python_version(),
        "ray": metadata.version("ray"),
        "cores": os.cpu_count(),
        "load_average_at_start": os.getloadavg()[0],
        "engines": NUM_ENGINES,
        "fronts": NUM_FRONTS,
        "tokens_per_s": TOKENS_PER_S,
        **{key: value for key, value in vars(options).items() if key != "json"},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="raw data, gzipped")
    parser.add_argument("--seconds", type=float, default=70.0, help="of each block")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--utilisation", type=float, default=0.85)
    parser.add_argument("--virtual-traces", type=int, default=12, help="of 300 s each")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    told = conditions(options)
    cost = {rule: {n: choice_cost_us(rule, n) for n in (4, 1024)} for rule in RULES}
    costs: dict[str, Any] = {"choose_charge_settle_us": cost, "correct_by_a_report_us": correction_cost_us()}
    virtual = compare_virtually(options)
    sys.stdout.write(json.dumps(virtual, indent=1) + "\n")
    args = AppArgs.model_validate(
        {
            **FAKE_ARGS,
            "num_replicas": NUM_ENGINES,
            "front": {"num_replicas": NUM_FRONTS, "num_cpus": 0.1},
            "limits": {"max_body_bytes": 1_000_000},
        }
    )
    with local_serve() as url:
        serve.run(compose(args, start_metered(TOKENS_PER_S)), name=APP, route_prefix="/rules")
        app = App(APP, f"{url}/rules")
        costs["reports"] = report_cost(app)
        sys.stdout.write(json.dumps(costs, indent=1) + "\n")
        blocks = compare(app, options)
    by_rule = {
        rule: summary([block for block in blocks if block["rule"] == rule])
        for rule in ("exact (simulated)", *get_args(RouterRule))
    }
    for block in blocks:
        block["latency_ms"] = [round(1e3 * latency, 1) for latency in block.pop("latency_s")]
    traces = [
        [
            [arrival.at_s, arrival.kind, arrival.num_prompt, arrival.num_output]
            for arrival in make_trace(options.seed + n, options.seconds, options.utilisation)
        ]
        for n in range(options.rounds)
    ]
    raw = {
        "conditions": told,
        "costs": costs,
        "virtual": virtual,
        "by_rule": by_rule,
        "traces": traces,
        "blocks": blocks,
    }
    options.json.write_bytes(gzip.compress(json.dumps(raw).encode(), mtime=0))
    sys.stdout.write(json.dumps(by_rule, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
