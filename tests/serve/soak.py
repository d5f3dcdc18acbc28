"""A soak: mixed traffic on two real engines that preempt, with one fault after the other. `make soak`.

Proves that nothing admitted is left without an outcome, that no answer is wrong, and that nothing leaks: memory, open files,
charges, requests in an engine. Engines, Fronts and clients share the cores of this machine, and a lost engine takes minutes to
come back beside clients that leave none of them idle: so clients think between requests. `test_soak.py` is a short form.
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
from tests.serve.soak_faults import WELL_WITHIN_S, Faults, NotWellError, front_pids

NUM_ENGINES, NUM_FRONTS = 2, 2
BETWEEN_FAULTS_S = 3.0
SAMPLE_GAP_S = 20.0


@dataclass(frozen=True)
class Traffic:
    """Who asks: clients that behave and that do not, their mean pause, and how long they ask before anything happens."""

    num_usual: int = 6
    num_odd: int = 2
    think_s: float = 0.5
    warm_up_s: float = 20.0


@dataclass(frozen=True)
class Injected:
    """A fault, when it was, and how long until all was well; None: it was not in time, and no fault came after it."""

    what: str
    at_s: float
    well_after_s: float | None


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
    """Memory (bytes), open files and sockets of the proxy and of every Front, replica and core, by process id."""
    found: dict[int, dict[str, Any]] = {}
    roles = dict.fromkeys(front_pids(app), "Front") | {info["pid"]: "replica" for info in app.info("Engine")}
    (raylet,) = {psutil.Process(pid).ppid() for pid in roles}
    roles |= {p.pid: "proxy" for p in psutil.Process(raylet).children() if "ProxyActor" in " ".join(p.cmdline())}
    for pid, role in roles.items():
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            found[process.pid] = {
                "what": role if process.pid == pid else f"{role}'s child",
                "rss_bytes": process.memory_info().rss,
                "files": process.num_fds(),
                "sockets": len(process.net_connections(kind="all")),
            }
    return found


def state_of(app: App) -> dict[str, Any]:
    """What ledgers and engines hold now."""
    fronts = [{key: info[key] for key in ("open", "tokens", "loads", "quarantined")} for info in app.info("Front")]
    reported = ("running", "waiting", "pooling_states", "kv_blocks", "kv_free_blocks")
    engines = [
        {"open": info["open"], "in_engine": info["in_engine"], **{key: info["report"].get(key) for key in reported}}
        for info in app.info("Engine")
    ]
    return {"Fronts": fronts, "engines": engines}


async def soak(
    app: App, seconds: float, seed: int, traffic: Traffic, faults: list[str] | None = None
) -> dict[str, Any]:
    """Runs for about so long, one fault after the other in a random order that repeats; returns everything that was seen.

    Args:
        faults: names to choose from, each at least once; None means all.
    """
    rng = random.Random(seed)
    injector = Faults(app, NUM_ENGINES, NUM_FRONTS, seed)
    await injector.until_well()
    known = await learn_answers(app.url, make_known(rng))
    calm = await asyncio.to_thread(state_of, app)
    clients = Clients(app.url, known, seed, traffic.think_s)
    running = asyncio.create_task(clients.run(traffic.num_usual, traffic.num_odd))
    began_s = time.monotonic()
    await asyncio.sleep(traffic.warm_up_s)
    warm = await asyncio.to_thread(usage_of, app)
    memory: list[dict[str, int]] = []
    sampling = asyncio.create_task(_sample_memory(list(warm), memory))
    injected = await _inject_for(seconds, injector, clients, rng, faults or list(injector.by_name))
    clients.stop()
    sampling.cancel()
    await running
    await injector.until_at_rest()
    end = await asyncio.to_thread(usage_of, app)
    return {
        "seconds": time.monotonic() - began_s,
        "seed": seed,
        "think_s": traffic.think_s,
        "clients": [traffic.num_usual, traffic.num_odd],
        "requests": clients.notes.counts(),
        "by_client": clients.notes.by_what(),
        "faults": _by_fault(injected, clients.notes.ended),
        "unmeant": [vars(one) for one in clients.notes.of("wrong", "broken", "none")],
        "injected": [vars(one) for one in injected],
        "usage": {
            str(pid): {**warm[pid], **{f"{key}_at_end": end[pid][key] for key in ("rss_bytes", "files", "sockets")}}
            for pid in warm
            if pid in end
        },
        "memory": memory,
        "processes": {"warm": len(warm), "end": len(end)},
        "state_before": calm,
        "state_after": await asyncio.to_thread(state_of, app),
    }


async def _sample_memory(pids: list[int], samples: list[dict[str, int]]) -> None:
    """Appends the memory (bytes) of those processes that are still there, every few seconds. Numbers are used again."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    while True:
        samples.append({str(one.pid): one.memory_info().rss for one in processes if one.is_running()})
        await asyncio.sleep(SAMPLE_GAP_S)


async def _inject_for(
    seconds: float, injector: Faults, clients: Clients, rng: random.Random, names: list[str]
) -> list[Injected]:
    """One fault after the other for so long, and each at least once; ends early when the application does not recover."""
    began_s, injected = time.monotonic(), list[Injected]()
    to_come: list[str] = []
    while time.monotonic() - began_s < seconds or len(injected) < len(names):
        if not to_come:
            to_come = rng.sample(names, len(names))
        what, at_s = to_come.pop(), time.monotonic()
        try:
            injected.append(Injected(what, at_s, await injector.inject(what)))
        except NotWellError as error:
            injected.append(Injected(what, at_s, None))
            sys.stderr.write(f"{error}\n")
            break
        sys.stderr.write(f"{injected[-1]} {clients.notes.counts()}\n")
        await asyncio.sleep(BETWEEN_FAULTS_S)
    return injected


def _by_fault(injected: list[Injected], ended: list[Ended]) -> dict[str, Any]:
    """For each kind of fault: how often, the longest until all was well, and how requests ended that were open meanwhile."""
    table: dict[str, Any] = {}
    for fault in injected:
        row = table.setdefault(fault.what, {"times": 0, "longest_s": 0.0, "ends": Counter()})
        row["times"] += 1
        took_s = WELL_WITHIN_S if fault.well_after_s is None else fault.well_after_s
        row["longest_s"] = max(row["longest_s"], round(took_s, 1))
        row["ends"].update(one.end for one in ended if one.ended_s >= fault.at_s and one.at_s <= fault.at_s + took_s)
    return {what: {**row, "ends": dict(row["ends"])} for what, row in table.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--think-s", type=float, default=Traffic.think_s, help="mean pause of a client between its requests"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    traffic = Traffic(think_s=options.think_s)

    with tempfile.TemporaryDirectory() as folder, local_serve() as url:
        tiny = make_tiny_model(Path(folder))
        serve.run(build(args_of(tiny.model, tiny.adapter)), name="soak", route_prefix="/soak")
        found = asyncio.run(soak(App("soak", f"{url}/soak"), options.seconds, options.seed, traffic))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps({**found, "unmeant": found["unmeant"][:20]}, indent=1) + "\n")
    lost = [end for end in ("wrong", "none") if found["requests"].get(end)]
    return 1 if lost or any(one["well_after_s"] is None for one in found["injected"]) else 0


if __name__ == "__main__":
    sys.exit(main())
