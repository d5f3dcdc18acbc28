"""A changed configuration is deployed under steady load: every request is answered, and the new one is in force afterwards.

The engines are fakes, which start in seconds and hold no memory: what a card needs while engines are replaced is not shown.
Clients do what the documents tell them: they come again after a 503 with `Retry-After`, and after nothing else.
"""

import copy
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from ray import serve

from tests.serve.conftest import FAKE_ARGS, REPOSITORY, App
from tests.serve.test_life import deployed, put, until

log = logging.getLogger(__name__)

EMBED, COMPLETE = "/v1/embeddings", "/v1/completions"
NUM_ENGINES, NUM_CLIENTS, STREAM_TOKENS = 4, 12, 40
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "embed": (EMBED, {"model": "orthrus-embed", "input": "hello", "fake": {"delay_s": 0.05}}),
    "complete": (COMPLETE, {"model": "orthrus", "prompt": "x", "max_tokens": 5, "fake": {"gap_s": 0.02}}),
    "stream": (COMPLETE, {"model": "orthrus", "prompt": "x", "max_tokens": STREAM_TOKENS, "stream": True}),
}


@dataclass
class Steady:
    """Clients that send one request after the other until they are stopped."""

    url: str
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_retried: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator["Steady"]:
        kinds = list(BODIES)
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            clients = [pool.submit(self._ask, kinds[n % len(kinds)]) for n in range(NUM_CLIENTS)]
            try:
                yield self
            finally:
                self._stop.set()
            for client in clients:
                client.result()

    def _ask(self, kind: str) -> None:
        path, body = BODIES[kind]
        with httpx.Client(base_url=self.url, timeout=120) as client:
            while not self._stop.is_set():
                try:
                    answer = client.post(path, json=body)
                    while answer.status_code == 503 and "retry-after" in answer.headers:
                        self.num_retried += 1
                        time.sleep(float(answer.headers["retry-after"]))
                        answer = client.post(path, json=body)
                    self.ends[kind, _end_of(kind, answer)] += 1
                except httpx.HTTPError as error:
                    self.ends[kind, repr(error)] += 1


def _end_of(kind: str, answer: httpx.Response) -> str:
    if answer.status_code != 200:
        return f"{answer.status_code} {answer.text[:200]}"
    if kind == "stream":
        lines = [line for line in answer.text.splitlines() if line]
        texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-1]]
        is_whole = lines[-1] == "data: [DONE]" and texts == [f"t{n}" for n in range(STREAM_TOKENS)]
        return "whole" if is_whole else f"cut: {answer.text[-200:]}"
    return "whole"


@pytest.fixture
def rolling(serve_url: str) -> Iterator[tuple[App, dict[str, Any]]]:
    """Four fake engines behind two Fronts, started from a configuration."""
    args = {**FAKE_ARGS, "num_replicas": NUM_ENGINES, "front": {"num_replicas": 2}}
    config = {
        "name": "rolling", "route_prefix": "/rolling", "import_path": "tests.serve.fakes:build_fake", "args": args,
        "runtime_env": {"env_vars": {"PYTHONPATH": str(REPOSITORY)}},
        "deployments": [{"name": "Front"}, {"name": "Engine"}],
    }  # fmt: skip
    put({"applications": [config]})
    app = App("rolling", f"{serve_url}/rolling")
    until(lambda: is_running() and len(pids(app)) == NUM_ENGINES, limit_s=120)
    yield app, config
    serve.delete("rolling", _blocking=False)


def is_running() -> bool:
    return deployed()["applications"]["rolling"]["status"] == "RUNNING"


def pids(app: App) -> set[int]:
    return {engine["pid"] for engine in app.info("Engine")}


def fronts(app: App) -> set[str]:
    return {front["front"] for front in app.info("Front")}


def too_many_inputs(app: App) -> int:
    return httpx.post(f"{app.url}{EMBED}", json={"input": ["x"] * 65}, timeout=60).status_code


@pytest.mark.timeout(900)  # replicas start in seconds, or in a minute where the machine is busy
def test_a_rolling_update_under_load_loses_no_request(rolling: tuple[App, dict[str, Any]]) -> None:
    app, config = rolling
    old_engines, old_fronts = pids(app), fronts(app)
    assert too_many_inputs(app) == 400
    changed = copy.deepcopy(config)
    changed["args"] |= {"topology": "hetero_fcfs", "limits": {**config["args"]["limits"], "max_inputs": 65}}
    with Steady(app.url).running() as load:
        until(lambda: sum(load.ends.values()) > 2 * NUM_CLIENTS, limit_s=60)
        put({"applications": [changed]})
        until(lambda: is_running() and len(pids(app) - old_engines) == NUM_ENGINES, limit_s=200)
        num_then = sum(load.ends.values())
        until(lambda: sum(load.ends.values()) > num_then + 2 * NUM_CLIENTS, limit_s=60)
    log.info("%d requests, %d came again after a 503", sum(load.ends.values()), load.num_retried)
    assert set(load.ends) == {(kind, "whole") for kind in BODIES}
    assert not pids(app) & old_engines
    assert not fronts(app) & old_fronts
    assert too_many_inputs(app) == 200
    assert {front["topology"] for front in app.info("Front")} == {"hetero_fcfs"}
    until(lambda: all(front["open"] == front["tokens"] == 0 for front in app.info("Front")), limit_s=60)
