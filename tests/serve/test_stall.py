"""A real engine whose core stops answering: found by its pulse, and ended with its replica."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
from ray import serve

from orthrus_serve.app import compose
from orthrus_serve.config.schema import AppArgs
from orthrus_serve.serving.engine_replica import start_engine
from tests.serve.conftest import App
from tests.serve.soak_faults import core_of as engine_core_of


def until(condition: Callable[[], bool], limit_s: float) -> None:
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < limit_s, "it did not happen in time"
        time.sleep(0.1)


def core_of(app: App) -> psutil.Process:
    """The EngineCore process of the only replica."""
    (info,) = app.info("Engine")
    return engine_core_of(info["pid"])


def complete(client: httpx.Client, num_tokens: int) -> httpx.Response:
    body = {"prompt": "a b c", "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    return client.post("/v1/completions", json=body)


def test_a_core_that_stops_answering_is_found_and_ended_with_its_replica(serve_url: str, tiny: Any) -> None:
    args = AppArgs.model_validate({
        "topology": "orthrus",
        "model": {"path": str(tiny.model)},
        "adapters": {"orthrus-embed": {"path": str(tiny.adapter)}},
        "num_gpus_per_replica": 0,
        "num_cpus_per_replica": 0.5,
        "health": {"stall_s": 2.0, "replace_after_s": 1.0},
        "vllm": {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 16 * 2**20},
    })  # fmt: skip
    serve.run(compose(args, start_engine, replica_wait_s=1.0), name="stalling", route_prefix="/stalling")
    app = App("stalling", f"{serve_url}/stalling")
    try:
        with httpx.Client(base_url=app.url, timeout=120) as client, ThreadPoolExecutor(1) as pool:
            assert complete(client, 150).json()["usage"]["completion_tokens"] == 150  # the core is not young any more
            core = core_of(app)
            os.kill(core.pid, signal.SIGSTOP)
            waiting = pool.submit(complete, client, 5)
            until(lambda: "stalled" in str(client.get("/health").json()), limit_s=30)
            # The only replica ends, and its core with it; its request ends once, here for want of another replica.
            assert waiting.result().status_code == 503
            assert waiting.result().json()["error"]["code"] == "no_replica"
            until(lambda: not core.is_running() or core.status() == psutil.STATUS_ZOMBIE, limit_s=10)
    finally:
        serve.delete("stalling", _blocking=False)
