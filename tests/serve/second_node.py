"""Two Ray nodes on this machine, an engine replica on each, and the loss of the second under load. Prints what it saw as JSON.

A program of its own, since a process can be in one Ray cluster only: `python -m tests.serve.second_node`. Engines are fakes.
"""

import asyncio
import json
import os
import sys
import threading
import time
from collections import Counter
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"

import httpx
import ray
from ray import serve
from ray.cluster_utils import Cluster

from orthrus_serve.app import compose
from orthrus_serve.config.schema import AppArgs
from tests.ports import free_port
from tests.serve.conftest import FAKE_ARGS, App
from tests.serve.fakes import start_fake

NUM_CLIENTS = 12
# A node has room for one engine, and the head for the Front beside it.
ARGS = {**FAKE_ARGS, "num_cpus_per_replica": 1.5, "front": {"num_replicas": 1, "num_cpus": 0.2}}
HEAD_CPUS, SECOND_CPUS = 2, 2
NODE: dict[str, Any] = {"object_store_memory": 100 * 2**20}


async def ask(http: httpx.AsyncClient, number: int) -> str:
    """One request, whole or streamed, and how it ended."""
    body = {"model": "orthrus", "prompt": "x", "max_tokens": 20, "stream": bool(number % 2), "fake": {"gap_s": 0.02}}
    try:
        answer = await http.post("/v1/completions", json=body)
    except httpx.TimeoutException:
        return "nothing came"
    except httpx.TransportError as error:
        return f"connection: {type(error).__name__}"
    if answer.status_code == 503:
        return "503 with Retry-After" if "retry-after" in answer.headers else "503"
    if answer.status_code != 200:
        return f"status {answer.status_code}"
    if "event: error" in answer.text:
        return "cut with an error event"
    is_whole = answer.text.rstrip().endswith("[DONE]") if number % 2 else "t19" in answer.text
    return "right" if is_whole else "cut without a word"


async def info_of(app: App, deployment: str) -> list[dict[str, Any]]:
    """As `App.info`; empty also before there is such a deployment."""
    try:
        return await asyncio.to_thread(app.info, deployment)
    except KeyError:
        return []


async def until(app: App, num_engines: int) -> float:
    """Waits for so many engines that answer and are in the pool, and nothing charged; returns how long it took."""
    began_s = time.monotonic()
    while True:
        engines = await info_of(app, "Engine")
        fronts = await info_of(app, "Front")
        if len(engines) == num_engines and [front["quarantined"] for front in fronts] == [{}]:
            return time.monotonic() - began_s
        assert time.monotonic() - began_s < 90, (engines, fronts)
        await asyncio.sleep(0.1)


async def is_at_rest(app: App) -> bool:
    """Whether nothing is charged, open or running, within some seconds."""
    for _ in range(100):
        engines = await info_of(app, "Engine")
        fronts = await info_of(app, "Front")
        held = [(engine["open"], engine["in_engine"]) for engine in engines]
        if [(f["open"], f["tokens"], f["loads"]) for f in fronts] == [(0, 0, {})] and not any(map(any, held)):
            return True
        await asyncio.sleep(0.1)
    return False


async def lose_the_second(cluster: Cluster, app: App) -> dict[str, Any]:
    """Adds a node, loads both, ends every process of the second at once, and gives the cluster another one."""
    await until(app, 1)
    second = cluster.add_node(num_cpus=SECOND_CPUS, **NODE)
    await until(app, 2)
    ends, stop = Counter[str](), asyncio.Event()
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=app.url, timeout=60, limits=limits) as http:

        async def client(number: int) -> None:
            while not stop.is_set():
                ends[await ask(http, number)] += 1

        clients = [asyncio.create_task(client(number)) for number in range(NUM_CLIENTS)]
        await asyncio.sleep(2.0)
        before, killed_s = dict(ends), time.monotonic()
        await asyncio.to_thread(cluster.remove_node, second, allow_graceful=False)
        await until(app, 1)
        alone_s = time.monotonic() - killed_s
        cluster.add_node(num_cpus=SECOND_CPUS, **NODE)
        await until(app, 2)
        again_s = time.monotonic() - killed_s
        stop.set()
        await asyncio.gather(*clients)
    rest = await is_at_rest(app)
    return {"before": before, "ends": dict(ends), "alone_s": alone_s, "two_again_s": again_s, "at_rest": rest}


def main() -> int:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": HEAD_CPUS, "include_dashboard": False, **NODE})
    try:
        ray.init(address=cluster.address, namespace="serve", log_to_driver=False, logging_level="ERROR")
        port = free_port()
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": "127.0.0.1", "port": port},
            grpc_options={"port": free_port()},
        )
        app = App("nodes", f"http://127.0.0.1:{port}")
        target = compose(AppArgs.model_validate(ARGS), start_fake)
        # Returns when both engines are up, which is not before there is a second node.
        starting = threading.Thread(target=serve.run, args=(target,), kwargs={"name": app.name, "route_prefix": "/"})
        starting.start()
        sys.stdout.write(json.dumps(asyncio.run(lose_the_second(cluster, app))) + "\n")
        starting.join()
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
