"""A soak: mixed traffic at saturation on two real engines, with a fault every few seconds. `make soak`.

Proves that nothing admitted is left without an outcome, that no answer is wrong, and that nothing leaks: memory, open files,
charges, requests in an engine. Engines, Fronts and clients share the cores of this machine, and a lost engine takes minutes to
come back beside clients that leave none of them idle: this is for hours, not for every change.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from ray import serve

from orthrus_serve.app import build
from tests.engine.harness import make_tiny_model
from tests.serve.conftest import TINY_VLLM, App, local_serve
from tests.serve.soak_clients import Clients, Ended, learn_answers, make_known
from tests.serve.soak_faults import Faults, front_pids

NUM_ENGINES, NUM_FRONTS = 2, 2
NUM_USUAL, NUM_ODD = 6, 2
BETWEEN_FAULTS_S = 3.0


@dataclass(frozen=True)
class Injected:
    """A fault, when it was, and how long until all was well."""

    what: str
    at_s: float
    well_after_s: float


def args_of(model: Path, adapter: Path) -> dict[str, Any]:
    """Two engines with so little memory that they preempt, found stalled after 4 s and replaced after 2 more."""
    return {
        "topology": "orthrus",
        "model": {"path": str(model)},
        "adapters": {"orthrus-embed": {"path": str(adapter)}},
        "num_replicas": NUM_ENGINES,
        "num_gpus_per_replica": 0,
        "num_cpus_per_replica": 0.5,
        "front": {"num_replicas": NUM_FRONTS, "num_cpus": 0.1},
        "health": {"stall_s": 4.0, "replace_after_s": 2.0},
        "vllm": {**TINY_VLLM, "kv_cache_memory_bytes": 3 * 2**20},
    }


def usage_of(app: App) -> dict[int, dict[str, Any]]:
    """Memory (bytes) and open files of every Front, replica and core, by process id."""
    found: dict[int, dict[str, Any]] = {}
    engines = [info["pid"] for info in app.info("Engine")]
    for pid in [*front_pids(app), *engines]:
        role = "replica" if pid in engines else "Front"
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            what = role if process.pid == pid else f"{role}'s child"
            rss = process.memory_info().rss
            found[process.pid] = {"what": what, "rss_bytes": rss, "files": process.num_fds()}
    return found


async def soak(app: App, seconds: float, seed: int, faults: list[str] | None = None) -> dict[str, Any]:
    """Runs for about so long, one fault after the other in a random order that repeats; returns everything that was seen.

    Args:
        faults: names to choose from, each at least once; None means all.
    """
    rng = random.Random(seed)
    injector = Faults(app, NUM_ENGINES, NUM_FRONTS, seed)
    await injector.until_well()
    known = await learn_answers(app.url, make_known(rng))
    clients = Clients(app.url, known, seed)
    running = asyncio.create_task(clients.run(NUM_USUAL, NUM_ODD))
    began_s, injected = time.monotonic(), list[Injected]()
    await asyncio.sleep(BETWEEN_FAULTS_S)
    warm = await asyncio.to_thread(usage_of, app)
    to_come: list[str] = []
    names = faults or list(injector.by_name)
    while time.monotonic() - began_s < seconds or len(injected) < len(names):
        if not to_come:
            to_come = rng.sample(names, len(names))
        what, at_s = to_come.pop(), time.monotonic()
        injected.append(Injected(what, at_s - began_s, await injector.inject(what)))
        sys.stderr.write(f"{injected[-1]} {clients.notes.counts()}\n")
        await asyncio.sleep(BETWEEN_FAULTS_S)
    clients.stop()
    await running
    await injector.until_at_rest()
    end = await asyncio.to_thread(usage_of, app)
    return {
        "seconds": time.monotonic() - began_s,
        "seed": seed,
        "began_s": began_s,
        "requests": clients.notes.counts(),
        "faults": _by_fault(injected, clients.notes.ended, began_s),
        "unmeant": [vars(one) for one in clients.notes.of("wrong", "broken")],
        "injected": [vars(one) for one in injected],
        "usage": {
            str(pid): {**warm[pid], "rss_bytes_at_end": end[pid]["rss_bytes"], "files_at_end": end[pid]["files"]}
            for pid in warm
            if pid in end
        },
        "processes": {"warm": len(warm), "end": len(end)},
    }


def _by_fault(injected: list[Injected], ended: list[Ended], began_s: float) -> dict[str, Any]:
    """For each kind of fault: how often, the longest until all was well, and ends of requests begun while it was not."""
    table: dict[str, Any] = {}
    for fault in injected:
        row = table.setdefault(fault.what, {"times": 0, "longest_s": 0.0, "ends": Counter()})
        row["times"] += 1
        row["longest_s"] = max(row["longest_s"], round(fault.well_after_s, 1))
        from_s = began_s + fault.at_s - 5.0  # those that were running then, too
        row["ends"].update(one.end for one in ended if from_s <= one.at_s <= began_s + fault.at_s + fault.well_after_s)
    return {what: {**row, "ends": dict(row["ends"])} for what, row in table.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder, local_serve() as url:
        tiny = make_tiny_model(Path(folder))
        serve.run(build(args_of(tiny.model, tiny.adapter)), name="soak", route_prefix="/soak")
        found = asyncio.run(soak(App("soak", f"{url}/soak"), options.seconds, options.seed))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps({**found, "unmeant": found["unmeant"][:20], "injected": None}, indent=1) + "\n")
    return 1 if found["requests"].get("wrong") else 0


if __name__ == "__main__":
    sys.exit(main())
