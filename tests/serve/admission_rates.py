"""Goodput and p99 with and without admission, at a half, one and two times what the engines can compute. A tool, not a test.

Run: `python -m tests.serve.admission_rates --json FILE.json.gz` (about 5 minutes). The whole serving side is real, on a local
Ray; the two engines compute so many tokens a second, one request after the other. Requests arrive by a Poisson process,
whatever the answers do; nobody comes back. Each load plays the same trace with and without admission, on one application each.
"""

import argparse
import asyncio
import gzip
import json
import os
import platform
import random
import statistics
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from ray import serve

from orthrus_serve.app import compose
from orthrus_serve.config.schema import AppArgs
from tests.serve.conftest import FAKE_ARGS, local_serve
from tests.serve.metered import start_metered
from tests.serve.overload import Answer, goodput, play, poisson
from tests.serve.test_admission import GOAL_S, NUM, TOKENS_PER_S, mixed

WARM_S = 5.0
LOADS = (0.5, 1.0, 2.0)


def summary(answers: list[Answer], seconds: float) -> dict[str, Any]:
    """Over requests due after the warm-up."""
    counted = [answer for answer in answers if answer.due.at_s >= WARM_S]
    admitted = [answer for answer in counted if answer.status == 200]
    took = [a.first_s if a.due.kind == "generate" else a.e2e_s for a in admitted]
    return {
        "requests": len(counted),
        "admitted": len(admitted),
        "late": sum(not answer.is_good(GOAL_S) for answer in admitted),
        "p50_s": round(statistics.median(took), 3),
        "p99_s": round(statistics.quantiles(took, n=100, method="inclusive")[98], 3),
        "goodput_tokens_per_s": round(goodput(answers, GOAL_S, WARM_S, seconds)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="raw data, gzipped")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each block")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    goals = {"generate": {"ttft_ms": 1000 * GOAL_S}, "embed": {"e2e_ms": 1000 * GOAL_S}}
    blocks: list[dict[str, Any]] = []
    load_average = os.getloadavg()[0]
    with local_serve() as url:
        for name, admission in (("without", None), ("with", goals)):
            args = {
                **FAKE_ARGS,
                "num_replicas": NUM,
                "front": {"num_replicas": 1, "num_cpus": 0.1},
                "admission": admission,
            }
            app = compose(AppArgs.model_validate(args), start_metered(TOKENS_PER_S))
            serve.run(app, name=name, route_prefix=f"/{name}")
            for number, load in enumerate(LOADS):
                rng = random.Random(options.seed + number)
                trace = poisson(rng, options.seconds, load * TOKENS_PER_S * NUM, mixed)
                answers = asyncio.run(play(f"{url}/{name}", trace))
                block = {"admission": name, "load": load, **summary(answers, options.seconds)}
                sys.stdout.write(json.dumps(block) + "\n")
                sys.stdout.flush()
                raw = [[a.due.at_s, a.due.kind, a.due.num_tokens, a.status, a.first_s, a.e2e_s] for a in answers]
                blocks.append({**block, "raw": [[round(x, 4) if isinstance(x, float) else x for x in r] for r in raw]})
            serve.delete(name)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    conditions = {
        "command": f"python -m tests.serve.admission_rates {' '.join(sys.argv[1:])}",
        "commit": commit,
        "python": platform.python_version(),
        "ray": metadata.version("ray"),
        "cores": os.cpu_count(),
        "load_average_at_start": load_average,
        "tokens_per_s": TOKENS_PER_S,
        "engines": NUM,
        "goal_s": GOAL_S,
        "seconds": options.seconds,
        "seed": options.seed,
    }
    options.json.write_bytes(gzip.compress(json.dumps({"conditions": conditions, "blocks": blocks}).encode(), mtime=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
