"""Admission before a real engine on CPU (a tiny model), at once and at twice what it can compute. A tool, not a test.

Run: `python -m tests.serve.admission_real` (a minute or two). Everything is a ratio to what this machine can do at the moment.
Other work on it makes admitted requests late and takes from goodput, so no test asserts these figures.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import httpx
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from orthrus_serve.app import build
from orthrus_serve.types import RequestKind
from tests.engine.harness import make_tiny_model
from tests.serve.conftest import TINY_VLLM, local_serve
from tests.serve.overload import PATHS, Answer, goodput, play, poisson

WARM_S = 5.0
NUM_CLOSED = 16
# Goals are that many times the latency of requests that a fourth of the clients send without a pause.
GOAL_RATIO = 8.0
GOAL_HEADERS: dict[RequestKind, str] = {"generate": "x-slo-ttft-ms", "embed": "x-slo-e2e-ms"}


def real_args(tiny: Any) -> dict[str, Any]:
    """One replica with a real engine; goals come with the requests."""
    return {
        "topology": "orthrus",
        "model": {"path": str(tiny.model)},
        "adapters": {"orthrus-embed": {"path": str(tiny.adapter)}},
        "num_gpus_per_replica": 0,
        "num_cpus_per_replica": 1,
        "admission": {},
        "vllm": TINY_VLLM,
    }


def mixed(rng: random.Random) -> tuple[RequestKind, int, dict[str, Any]]:
    """Kind, tokens and body of a request that computes exactly so many tokens; no two begin alike."""
    if rng.random() < 0.5:
        num_tokens = rng.randint(100, 400)
        return "embed", num_tokens, {"input": [rng.choices(range(3, 200), k=num_tokens - 1)]}  # and the EOS
    prompt, output = rng.randint(50, 200), rng.randint(20, 60)
    body = {"prompt": rng.choices(range(3, 200), k=prompt), "max_tokens": output, "ignore_eos": True, "stream": True}
    return "generate", prompt + output, body


async def closed_loop(url: str, num_clients: int, seconds: float) -> tuple[float, float]:
    """Tokens a second, and the median latency, of clients that send their next request when the last is answered."""
    ends_s, rng = time.monotonic() + seconds, random.Random(9)
    latencies: list[float] = []
    num_tokens = 0

    async def ask(session: aiohttp.ClientSession) -> None:
        nonlocal num_tokens
        while time.monotonic() < ends_s:
            kind, tokens, body = mixed(rng)
            sent_s = time.monotonic()
            async with session.post(url + PATHS[kind], json=body) as response:
                await response.read()
                assert response.status == 200
            latencies.append(time.monotonic() - sent_s)
            num_tokens += tokens

    began_s = time.monotonic()
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*[ask(session) for _ in range(num_clients)])
    return num_tokens / (time.monotonic() - began_s), statistics.median(latencies)


def load(url: str, tokens_per_s: float, goal_s: float, seconds: float, seed: int) -> list[Answer]:
    """Offers so many tokens a second, whatever is answered, each request with that goal."""
    requests = poisson(random.Random(seed), seconds, tokens_per_s, mixed)
    with_goals = [replace(due, headers={GOAL_HEADERS[due.kind]: str(int(1000 * goal_s))}) for due in requests]
    return asyncio.run(play(url, with_goals))


def goals_at_the_front(url: str) -> Counter[str]:
    """Goals met and missed so far, as the Front saw them: without what waits in the client, its sockets and the proxy."""
    counted: Counter[str] = Counter()
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text):
        for sample in family.samples:
            if sample.name == "orthrus_goals_total":
                counted[sample.labels["result"]] += int(sample.value)
    return counted


def row(answers: list[Answer], capacity: float, goal_s: float, seconds: float) -> dict[str, Any]:
    """What became of the requests due after the warm-up."""
    counted = [answer for answer in answers if answer.due.at_s >= WARM_S]
    admitted = [answer for answer in counted if answer.status == 200]
    return {
        "requests": len(counted),
        "admitted": len(admitted),
        "late": sum(not answer.is_good(goal_s) for answer in admitted),
        "goodput_of_capacity": round(goodput(answers, goal_s, WARM_S, seconds) / capacity, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, local_serve() as base:
        serve.run(build(real_args(make_tiny_model(Path(folder)))), name="guarded-real", route_prefix="/guarded-real")
        url = f"{base}/guarded-real"
        asyncio.run(closed_loop(url, NUM_CLOSED, 4.0))  # the first requests compile
        capacity, _ = asyncio.run(closed_loop(url, NUM_CLOSED, 6.0))
        _, usual_s = asyncio.run(closed_loop(url, NUM_CLOSED // 4, 4.0))
        goal_s = GOAL_RATIO * usual_s
        rows: dict[str, dict[str, Any]] = {}
        for index, times in enumerate((1.0, 2.0)):
            before = goals_at_the_front(url)
            answers = load(url, times * capacity, goal_s, options.seconds, options.seed + index)
            found = row(answers, capacity, goal_s, options.seconds)
            rows[f"{times:g}x"] = {**found, "at_the_front": goals_at_the_front(url) - before}
    told = {"capacity_tokens_per_s": round(capacity), "goal_s": round(goal_s, 2), "load_average": load_average}
    sys.stdout.write(json.dumps({**told, "seed": options.seed, **rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
