"""What our `schedule()` costs beside stock vLLM's, with 10, 1,000 and 10,000 requests waiting. A tool, not a test.

Run: `python -m tests.engine.schedule_cost --json FILE`. Real engine on CPU with the tiny model; only `schedule()` is timed, in
one process, arms interleaved round by round, so that the ratios hold although the machine's speed does not.
"""

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tests.engine.conftest  # noqa: F401  sets vLLM's switches before anything imports it
from tests.engine.harness import Engine, TinyModel, make_tiny_model, token_ids

WAITING = (10, 1_000, 10_000)
ARMS = ("stock", "orthrus", "hetero_fcfs", "unified_homo", "orthrus, mixed load")
STEPS, ROUNDS = 40, 2


def measure(tiny: TinyModel, folder: Path, arm: str, waiting: int, seed: int) -> list[float]:
    """Microseconds of each of `STEPS` calls of `schedule()`, with about `waiting` requests in line."""
    rng = random.Random(seed)
    policy = "orthrus" if arm in ("stock", "orthrus, mixed load") else arm
    engine = Engine(tiny, folder / "none", mixed=arm != "stock", policy=policy, budget=64, max_num_seqs=32)
    if arm != "stock":
        engine.scheduler.recorder = type(engine.scheduler.recorder)(None)  # no step log: it is off in production too
    for i in range(waiting + 40):
        if arm == "orthrus, mixed load" and i % 2:
            engine.embed(f"e{i}", token_ids(rng, 30), "mean")
        else:
            engine.generate(f"g{i}", token_ids(rng, 30), 20)
    scheduler, durations = engine.scheduler, []
    stock_schedule = scheduler.schedule

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        output = stock_schedule(*args, **kwargs)
        durations.append((time.perf_counter() - start) * 1e6)
        return output

    for _ in range(10):  # fills the slots
        engine.step()
    scheduler.schedule = timed
    for _ in range(STEPS):
        engine.step()
    engine.close()
    return durations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    samples: dict[str, list[float]] = {f"{arm} @ {n}": [] for arm in ARMS for n in WAITING}
    with tempfile.TemporaryDirectory() as name:
        tiny = make_tiny_model(Path(name))
        for seed in range(ROUNDS):
            for waiting in WAITING:
                for arm in ARMS:
                    samples[f"{arm} @ {waiting}"] += measure(tiny, Path(name), arm, waiting, seed)
    rows = {
        key: {"median_us": statistics.median(v), "p95_us": statistics.quantiles(v, n=20)[-1]}
        for key, v in samples.items()
    }
    result = {"python": platform.python_version(), "steps": STEPS, "rounds": ROUNDS, "rows": rows}
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    for key, row in rows.items():
        sys.stdout.write(f"{key:32s} median {row['median_us']:8.0f} us   p95 {row['p95_us']:8.0f} us\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
